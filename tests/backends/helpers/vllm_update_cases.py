"""What arrives while the engine of ``vllm_cases`` draws, requests and weights; and adapters without their model."""

import contextlib
import functools
import itertools
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import attrs
import pytest
import torch
import vllm_worker_cases
from vllm_cases import KEY, LORA, PROMPTS, Spoilt, engine, folder, inside, params, trainer

from verl_fn.backends.hf.new_model import CHAT_TEMPLATE
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import Capabilities, StaleWeightsError
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.vllm import EngineError, Vllm
from verl_fn.backends.vllm.worker import beside_others
from verl_fn.backends.weight_sync import IncompleteWeights
from verl_fn.environments import Done
from verl_fn.environments.engine import Conversing, Limits
from verl_fn.environments.processes import EnvError, Scores, Scoring
from verl_fn.environments.rendering import Renderer
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.steps import constant, sgd
from verl_fn.testing import check_rollout
from verl_fn.testing.rollout_case import RolloutCase, check_in_flight


@functools.cache
def adapted():
    """A trainer with adapters."""
    return Local(folder(), sgd(constant(0.1)), deterministic=False, lora=LORA)


def adapters(seed, base=0):
    """Parameters whose adapters move the log-probs."""
    leaves = dict(adapted().init(Key.from_seed(base)).params.items())
    drawn = Key.from_seed(seed).generator()
    for name, t in leaves.items():
        if "lora_" in name:
            leaves[name] = 0.1 * torch.randn(t.shape, generator=drawn)
    return attrs.evolve(adapted().init(Key.from_seed(base)).params, leaves=leaves)


@attrs.frozen
class Noted:
    """Weights that note which tensors are read, and may lose one of the buckets."""

    inner: object
    names: list
    lost: int = -1
    before: object = None

    @property
    def specs(self):
        return self.inner.specs

    @property
    def apart(self):
        return self._noted(getattr(self.inner, "apart", None))

    @property
    def kept(self):
        return self._noted(getattr(self.inner, "kept", None))

    def _noted(self, given):
        if given is None:
            return None
        whole, alone = (attrs.evolve(self, inner=source) for source in (given.whole, given.changing))
        return attrs.evolve(given, whole=whole, changing=alone)

    def buckets(self, max_bytes, *, checked=False):
        for i, bucket in enumerate(self.inner.buckets(4096, checked=checked)):
            self.names.extend(chunk.name for chunk in bucket)
            if self.before is not None:
                self.before()
            if i != self.lost:
                yield bucket


def choosing_excludes_others(made, weights):
    """Another thread cannot replace or drop the model while an engine chooses between it and adapters alone."""
    free = []

    def identify():
        with ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(acquired).result())
        return weights.apart.identify()

    def acquired():
        one = made._lock.acquire(blocking=False)
        if one:
            made._lock.release()
        return one

    made.publish(21, attrs.evolve(weights, apart=attrs.evolve(weights.apart, identify=identify)))
    return free == [False]


def in_flight_adapters(made, asked, params):
    """Adapters alone reach responses in their middle; the engine has them in version 4 then."""
    other = attrs.evolve(params, leaves={n: 2.0 * t if "lora_" in n else t for n, t in params.items()})
    with in_flight(made):
        results = published_at(made, 4, lambda: made.publish(5, adapted().weights(other)))
        batch = pack(made.generate(asked, version=4))
        results[0].result()
        made.publish(4, adapted().weights(params))
    old, new = (adapted().forward(p, batch, ["logprobs"]).logprobs for p in (params, other))
    exact = torch.where(batch["versions"] == 4, old, torch.where(batch["versions"] == 5, new, 0.0))
    torch.testing.assert_close(batch["rollout_log_probs"], exact, atol=1e-4, rtol=0)
    assert sorted(set(batch["versions"].tolist())) == [-1, 4, 5]


def adapters_alone():
    """The model is sent once and adapters alone afterwards; log-probs are the trainer's after each publication."""
    made = Vllm(folder(), device="cpu", dtype="float32", slots=16, max_length=64, lora=LORA)
    asked, before, worst, moved, sent = requests_for(PROMPTS, Sampling(12, n=4), KEY), None, 0.0, [], []

    def publish(version, params, lost=-1):
        names = []
        made.publish(version, Noted(adapted().weights(params), names, lost))
        return {name for name in names if "lora_" not in name}, {name for name in names if "lora_" in name}

    # The last one has another model, and the one before it comes to an engine that has lost its weights.
    for version, (seed, base) in enumerate([(0, 0), (1, 0), (2, 0), (3, 0), (4, 5)]):
        if version == 3:
            made.sleep(2)
            made.wake()
        now = adapters(seed, base)
        sent.append(tuple(map(len, publish(version, now))))
        batch = pack(made.generate(asked, version=version))
        exact = adapted().forward(now, batch, ["logprobs"]).logprobs
        worst = max(worst, float((exact - batch["rollout_log_probs"]).abs().max()))
        if before is not None:
            moved.append(float((exact - adapted().forward(before, batch, ["logprobs"]).logprobs).abs().max()))
        before = now
    in_flight_adapters(made, asked, before)
    for number, lost in enumerate((0, 1)):
        with pytest.raises(IncompleteWeights):
            publish(10 + number, adapters(7, 5), lost)
        for version in (None, 4, 10 + number):
            with pytest.raises(StaleWeightsError):
                made.generate(asked, version=version)
    assert publish(20, before)[0] == set()
    assert choosing_excludes_others(made, adapted().weights(before))
    torch.testing.assert_close(pack(made.generate(asked))["rollout_log_probs"], batch["rollout_log_probs"])
    # The same tensors with other values are another model.
    before["model.layers.0.mlp.down_proj.weight"].mul_(-3.0)
    sent.append(tuple(map(len, publish(22, before))))
    batch = pack(made.generate(asked, version=22))
    exact = adapted().forward(before, batch, ["logprobs"]).logprobs
    worst = max(worst, float((exact - batch["rollout_log_probs"]).abs().max()))
    with pytest.raises(ValueError, match=r"these weights have none: set rollout\.adapters=merged"):
        made.publish(30, trainer().weights(params(0)))
    return worst, min(moved), sent


@contextlib.contextmanager
def in_flight(made):
    """An engine, as if it was made with ``in_flight``."""
    made.capabilities = Capabilities(versions_per_token=True)
    try:
        with slow(made):
            yield made
    finally:
        made.capabilities = Capabilities()


@contextlib.contextmanager
def slow(made):
    """Slow steps of an engine: its core does not end them before this process has done something meanwhile."""
    made._engine.call(vllm_worker_cases.before_steps, vllm_worker_cases.wait, 0.02)
    try:
        yield
    finally:
        made._engine.call(vllm_worker_cases.before_steps, None)


def weights_in_flight():
    """Responses go on with weights that arrive between two steps, also where vLLM had begun the next one."""
    with in_flight(engine()) as made:
        prompts = [tuple(prompt) for prompt in PROMPTS]
        case = RolloutCase(made, trainer(), prompts, Sampling(12, n=4), 1e-4, KEY, False, (2,), lambda value: value)
        check_in_flight(case, params(0), params(1))
        made.publish(30, trainer().weights(params(2)))
        results = published_at(made, 4, lambda: made.publish(31, trainer().weights(params(3))))
        samples = made.generate(requests_for(PROMPTS, Sampling(20, n=4), KEY), version=30)
        results[0].result()
        assert not made._drawn
        assert any(set(s.versions.tolist()) == {30, 31} for s in samples)
        batch = pack(samples)
        old, new = (trainer().forward(params(i), batch, ["logprobs"]).logprobs for i in (2, 3))
        exact = torch.where(batch["versions"] == 30, old, torch.where(batch["versions"] == 31, new, 0.0))
        torch.testing.assert_close(batch["rollout_log_probs"], exact, atol=1e-4, rtol=0)
        results = published_at(made, 4, lambda: made.publish(32, Spoilt(trainer().weights(params(3)), "partial")))
        with pytest.raises(StaleWeightsError, match="a publication failed"):
            made.generate(requests_for(PROMPTS, Sampling(20, n=4), KEY))
        with pytest.raises(IncompleteWeights):
            results[0].result()
    made.publish(33, trainer().weights(params(0)))
    assert len(made.generate(requests_for(PROMPTS, Sampling(2), KEY), version=33)) == len(PROMPTS)


def published_at(made, number, publish):
    """Lets another thread publish after so many steps of the next call, and waits until it waits for the step."""
    pool, step, count, results = ThreadPoolExecutor(1), made._engine.step, itertools.count(1), []

    def stepping():
        if next(count) == number:
            del made._engine.step
            results.append(pool.submit(publish))
            while not made._arriving and not results[0].done():
                time.sleep(0.001)
        return step()

    made._engine.step = stepping
    return results


def laws_in_flight():
    with in_flight(engine()) as made:
        check_rollout(made, trainer(), tolerance=1e-4)


def requests_that_arrive():
    """Requests that arrive during a call give the samples that they give in a call of their own."""
    made = engine()
    made.publish(0, trainer().weights(params(2)))
    asked = [
        attrs.evolve(request, sampling=Sampling(6 + 5 * request.id))
        for request in requests_for(PROMPTS, Sampling(1), KEY)
    ]
    alone = [made.generate([request], version=0)[0] for request in asked]
    arriving, ended, idle = [asked[:2], [], asked[2:3]], [], [0]

    def more(samples):
        ended.extend(samples)
        if arriving:
            return arriving.pop(0)
        if len(ended) == 3 and idle[0] < 3:
            idle[0] += 1
            return [] if idle[0] < 3 else asked[3:]
        return [] if len(ended) < 4 else None

    made.grow(more, version=0)
    together = sorted(ended, key=lambda sample: sample.request)
    assert [s.tokens.tolist() for s in together] == [s.tokens.tolist() for s in alone]
    torch.testing.assert_close([s.log_probs for s in together], [s.log_probs for s in alone])
    assert [s.finish_reason for s in together] == [s.finish_reason for s in alone]
    parts = iter([asked[:1], [attrs.evolve(asked[1], sampling=Sampling(5, temperature=0.5))]])
    with pytest.raises(ValueError, match="differ only in max_tokens"):
        made.grow(lambda samples: next(parts), version=0)
    for second, problem in ((None, "while 1 requests are still drawn"), (asked[3:], "the id 3")):
        parts = iter([asked[3:], second])
        with in_flight(made):
            with pytest.raises(ValueError, match=problem):
                made.grow(lambda samples, parts=parts: next(parts), version=0)
            made.publish(0, trainer().weights(params(2)))
    with pytest.raises(StaleWeightsError):
        made.grow(lambda samples: None, version=1)
    assert made.generate([asked[0]])[0].tokens.tolist() == alone[0].tokens.tolist()


class Fault(BaseException):
    """Ends a call as an interruption by the user does."""


def failed_calls():
    """A call that fails leaves neither requests nor blocks of the cache behind, and the next one draws the same."""
    made, asked = engine(), requests_for(PROMPTS, Sampling(40, n=2), KEY)
    made.publish(0, trainer().weights(params(2)))
    expected, idle = [s.tokens.tolist() for s in made.generate(asked)], inside(vllm_worker_cases.free_blocks)
    assert idle[1] == 0

    def fails(call, error, match):
        with pytest.raises(error, match=match):
            call()
        assert not made._engine.has_unfinished_requests() and inside(vllm_worker_cases.free_blocks) == idle
        assert not made._engine.output_processor.request_states

    for call in (lambda: made.generate(asked), lambda: list(made.stream(asked))):
        count, step = itertools.count(1), made._engine.step

        def stepping(count=count, step=step):
            if next(count) == 4:
                assert inside(vllm_worker_cases.free_blocks)[1] > 0
                raise Fault("in a step")
            return step()

        with slow(made), mock.patch.object(made._engine, "step", stepping):
            fails(call, Fault, "in a step")
        assert [s.tokens.tolist() for s in made.generate(asked)] == expected
    singles = [attrs.evolve(request, sampling=Sampling(40)) for request in asked]
    parts = iter([singles, [], singles])
    fails(lambda: made.grow(lambda samples: next(parts), version=0), ValueError, "is given to 2 prompts")
    conversing(made, fails)
    older, newer = made.stream(asked), made.stream(asked)
    next(newer)
    with pytest.raises(StaleWeightsError, match="interrupted"):
        next(older)
    assert len(list(newer)) == len(expected) - 1, "its requests are those of a later call"


def ends_of_the_core():
    """A core that fails or is killed ends the calls that wait for it, and answers no later one."""
    made, asked = engine(), requests_for(PROMPTS, Sampling(40, n=2), KEY)
    second = Vllm(folder(), device="cpu", dtype="float32", slots=16, max_length=64)
    for one in (made, second):
        one.publish(0, trainer().weights(params(2)))
    expected, again = ([s.tokens.tolist() for s in one.generate(asked)] for one in (made, second))
    assert expected == again
    second._engine.call(vllm_worker_cases.before_steps, vllm_worker_cases.fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a kernel failed, on purpose"):
            second.generate(asked)
    assert [s.tokens.tolist() for s in made.generate(asked)] == expected
    (core,) = made._engine.engine_core.resources.engine_manager.processes
    with pytest.raises(EngineError, match="was killed"):
        made.publish(1, Noted(trainer().weights(params(3)), [], before=core.kill))
    with pytest.raises(StaleWeightsError):
        made.generate(asked)
    # Also from calls that ask vLLM for nothing but to pause or to wake.
    for call in (lambda: made.publish(2, trainer().weights(params(3))), lambda: made._engine.wake_up(["weights"])):
        with pytest.raises(EngineError, match="was killed"):
            call()
    with pytest.raises(EngineError, match="Call to wake_up failed"), made._engine._explaining():
        raise Exception("Call to wake_up failed")


def images_are_held_once():
    """Requests that show an image share its features, as long as one of them is there."""
    from vllm.multimodal.inputs import MultiModalKwargsItem

    from verl_fn.backends.vllm import core

    shown, given = weakref.WeakValueDictionary(), [MultiModalKwargsItem() for _ in range(3)]
    names = ("cat", "cat", "dog")
    features = [mock.Mock(identifier=name, data=item) for name, item in zip(names, given, strict=True)]
    with mock.patch.object(core, "ADD_REQUEST", lambda core, request: request):
        for feature in features:
            core.share_images(None, shown, mock.Mock(mm_features=[feature]))
        core.share_images(None, shown, mock.Mock(mm_features=None))
    assert [feature.data is given[0] for feature in features] == [True, True, False]
    del given, feature, features
    assert not shown


def talking(made, environment):
    """Conversations of an engine with an environment."""
    tokenizer = read_tokenizer(folder())
    tokenizer.chat_template = CHAT_TEMPLATE
    talk = Conversing(made, environment, Renderer(tokenizer, [2]), tokenizer, [2], Limits(2, 20, 9))
    requests = requests_for([()] * 4, Sampling(50, n=3), KEY)
    return talk.generate([attrs.evolve(r, problem={"data_source": "s"}) for r in requests], version=0)


def conversing(made, fails):
    """The same where an environment's messages cannot be used while the replies of others are drawn."""

    def half(jobs):
        if any(job.replies for job in jobs):
            raise EnvError("no such tool")
        return [({"role": "user", "content": "a"},) for _ in jobs]

    fails(lambda: talking(made, half), EnvError, "no such tool")


class Lengths:
    """Ends a conversation with its second reply, and ranks those of a group by length."""

    scores_groups = True

    def __call__(self, jobs):
        return [self._scores(job) if isinstance(job, Scoring) else self._answer(job) for job in jobs]

    def _answer(self, job):
        return ({"role": "user", "content": "a"},) if len(job.replies) < 2 else Done(9.0, 1.0)

    def _scores(self, scoring):
        lengths = [len(job.replies[-1]) for job in scoring.jobs]
        return Scores(tuple(Done(float(sorted(lengths).index(length)), 0.0) for length in lengths))


def groups_of_conversations():
    """Groups are scored as with the embedded engine, though their conversations end one after the other."""
    embedded, weights = Sampler(folder(), slots=16), params(2)
    both = []
    for made in (engine(), embedded):
        made.publish(0, trainer().weights(weights))
        both.append(talking(made, Lengths()))
    assert len({s.outcome.score for s in both[0]}) > 1
    for ours, theirs in zip(*both, strict=True):
        assert (ours.request, ours.number, ours.outcome) == (theirs.request, theirs.number, theirs.outcome)
        assert torch.equal(ours.tokens, theirs.tokens)


def sleeping_beside_others():
    """vLLM's own worker for GPUs, on one whose free memory shrinks while the worker frees its own."""
    from vllm.v1.worker import gpu_worker

    worker = mock.Mock(spec=gpu_worker.Worker, model_runner=mock.Mock(**{"model.named_buffers.return_value": []}))
    allocator = mock.Mock()
    sleep = functools.partial(gpu_worker.Worker.sleep, worker)
    for free, level in itertools.product([(2, 3), (3, 2)], [1, 2]):
        freed = mock.patch.object(torch.cuda, "mem_get_info", side_effect=[(one * 2**30, 4 * 2**30) for one in free])
        with mock.patch.object(gpu_worker, "get_mem_allocator_instance", return_value=allocator), freed:
            beside_others(sleep)(level=level)
        assert allocator.sleep.call_count == 1
        allocator.reset_mock()
    allocator.sleep.side_effect = AssertionError("another one")
    with (
        mock.patch.object(gpu_worker, "get_mem_allocator_instance", return_value=allocator),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(1, 2)),
        pytest.raises(AssertionError, match="another one"),
    ):
        beside_others(sleep)(level=1)
