"""Functions that run in a process of their own, which has one vLLM engine for all tests."""

import contextlib
import functools
import itertools
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import attrs
import pytest
import torch

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import Capabilities, StaleWeightsError
from verl_fn.backends.sampler import NotFiniteError, Sampler
from verl_fn.backends.vllm import AsleepError, Vllm
from verl_fn.backends.vllm.arguments import EngineArgumentError
from verl_fn.backends.vllm.routes import RoutesMissing
from verl_fn.backends.weight_sync import IncompleteWeights, Weights
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.steps import constant, sgd
from verl_fn.testing import check_rollout
from verl_fn.testing.in_flight import check_in_flight
from verl_fn.testing.rollout_case import Case
from verl_fn.testing.rollout_routes import check_routes

KEY = Key.from_seed(3)
LORA = Lora(rank=3, alpha=6.0)
PROMPTS = [[1, 4, 5], [1, 5, 4, 6], [1, 7], [1] * 9]


@functools.cache
def folder():
    # vLLM's attention on CPUs wants heads of at least 32.
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    arch = os.environ.get("ARCH", "qwen3")
    if arch == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        plain_activation()
    return new_model(tempfile.mkdtemp(), chars="abcdefgh>", arch=arch, initializer_range=0.2, **sizes)


def plain_activation():
    """Replaces an activation of vLLM's experts, which makes an object at each step that only start-up can make."""
    import vllm.model_executor.layers.fused_moe.cpu_fused_moe as experts

    def silu_and_mul(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    experts._CPU_MOE_ACT_FN[experts.MoEActivation.SILU] = silu_and_mul


def reported_experts():
    """Lets vLLM's layers report their experts on CPUs, where a kernel of its own picks them."""
    import vllm.model_executor.layers.fused_moe.cpu_fused_moe as experts
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    layers, pick, compute = [], experts.select_experts, MoERunner.forward

    def forward(runner, *args, **kwargs):
        layers.append(runner)
        try:
            return compute(runner, *args, **kwargs)
        finally:
            layers.pop()

    def select(*args, **kwargs):
        weights, numbers = pick(*args, **kwargs)
        if layers[-1].router.capture_fn is not None:
            layers[-1].router.capture_fn(numbers)
        return weights, numbers

    MoERunner.forward, experts.select_experts, MoERunner.is_monolithic = forward, select, False


@functools.cache
def engine():
    moe = os.environ.get("ARCH") == "qwen3_moe"
    if moe:
        reported_experts()
    more = {"engine_kwargs": {"block_size": 32}, "routed_experts": True} if moe else {}
    return Vllm(folder(), device="cpu", dtype="float32", slots=16, max_length=64, **more)


@functools.cache
def trainer():
    return Local(folder(), sgd(constant(0.1)), deterministic=False)


def params(seed):
    return trainer().init(Key.from_seed(seed)).params


def laws():
    check_rollout(engine(), trainer(), tolerance=1e-4)


def ten_publications():
    """The largest difference between log-probs of both, and the least that a publication moved them."""
    worst, moved, before = 0.0, [], None
    made = engine()
    for version in range(10):
        now = params(version)
        made.publish(version, trainer().weights(now))
        samples = made.generate(requests_for(PROMPTS, Sampling(12, n=4), KEY), version=version)
        batch = pack(samples)
        exact = trainer().forward(now, batch, ["logprobs"]).logprobs
        worst = max(worst, float((exact - batch["rollout_log_probs"]).abs().max()))
        if before is not None:
            old = trainer().forward(before, batch, ["logprobs"]).logprobs
            moved.append(float((exact - old).abs().max()))
        before = now
    return worst, min(moved)


def same_draws_as_the_sampler():
    """Whether both engines draw the same tokens, log-probs and ends, over all ways of sampling."""
    ours, other = engine(), Sampler(folder(), slots=16)
    for made in (ours, other):
        made.publish(1, trainer().weights(params(1)))
    ways = [
        Sampling(20, n=8),
        Sampling(20, n=4, temperature=0.7, top_k=3),
        Sampling(20, n=4, top_p=0.8),
        Sampling(20, temperature=0.0),
        Sampling(20, n=4, stop_token_ids=(7,)),
    ]
    for sampling in ways:
        asked = requests_for(PROMPTS, sampling, KEY)
        for a, b in zip(ours.generate(asked), other.generate(asked), strict=True):
            if a.near_ties or b.near_ties:
                continue
            assert (a.tokens.tolist(), a.finish_reason) == (b.tokens.tolist(), b.finish_reason), sampling
            torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-4, rtol=0)
            if sampling.cuts:
                torch.testing.assert_close(a.full_log_probs, b.full_log_probs, atol=1e-4, rtol=0)


@attrs.frozen
class Spoilt:
    """Buckets of one row each, given as ``how`` says."""

    inner: Weights
    how: str

    @property
    def specs(self):
        return self.inner.specs

    def buckets(self, max_bytes, *, checked=False):
        buckets = list(self.inner.buckets(4096, checked=checked))
        middle = len(buckets) // 2
        if self.how == "suppressed":
            return
        if self.how == "partial":
            buckets = buckets[:middle]
        elif self.how == "repeated":
            buckets.insert(middle, buckets[middle])
        elif self.how == "reordered":
            # Two parts of the embedding, the largest tensor, change places.
            buckets[0], buckets[1] = buckets[1], buckets[0]
        elif self.how == "dropped":
            del buckets[middle]
        yield from buckets


def spoilt_publications():
    """An engine serves nothing after a part of a publication, and heals with the next whole one."""
    made, tensors = engine(), trainer()
    asked = requests_for(PROMPTS, Sampling(12, n=2), KEY)
    made.publish(0, tensors.weights(params(0)))
    expected = [s.tokens.tolist() for s in made.generate(asked)]
    for number, how in enumerate(("suppressed", "partial", "repeated", "reordered", "dropped")):
        with pytest.raises(IncompleteWeights):
            made.publish(10 + number, Spoilt(tensors.weights(params(1)), how))
        for version in (None, 0, 10 + number):
            with pytest.raises(StaleWeightsError):
                made.generate(asked, version=version)
        made.publish(20 + number, tensors.weights(params(0)))
        assert [s.tokens.tolist() for s in made.generate(asked)] == expected


def small_buckets():
    """Weights that come in pieces, and ones that lie where the next bucket will, are loaded as whole ones are."""
    from verl_fn.backends.vllm import loading

    made, asked = engine(), requests_for(PROMPTS, Sampling(12, n=2), KEY)
    made.publish(0, trainer().weights(params(5)))
    expected = [s.tokens.tolist() for s in made.generate(asked)]
    made.publish(1, trainer().weights(params(6)))
    size, loading.BUCKET_BYTES = loading.BUCKET_BYTES, 6000
    try:
        made.publish(2, Overwritten(trainer().weights(params(5))))
        # What is larger than a bucket can be put together where it is loaded, if it fits there.
        tensor, place = torch.arange(4000.0).view(1000, 4), torch.zeros(1024, 4)
        source = Overwritten(Weights.of({"a": tensor, "b": tensor}))
        places = {"a": place, "b": place[:999]}
        arrived = dict(loading.whole(source, checked=False, places=places))
        assert arrived["a"].data_ptr() == place.data_ptr() and torch.equal(arrived["a"], tensor)
        assert torch.equal(arrived["b"], tensor) and not place[1000:].any()
    finally:
        loading.BUCKET_BYTES = size
    assert [s.tokens.tolist() for s in made.generate(asked)] == expected


@attrs.frozen
class Overwritten:
    """A source that reuses the memory of a bucket for the next one."""

    inner: Weights

    @property
    def specs(self):
        return self.inner.specs

    def buckets(self, max_bytes, *, checked=False):
        for bucket in self.inner.buckets(max_bytes, checked=checked):
            lent = tuple(attrs.evolve(c, values=c.values.clone()) for c in bucket)
            yield lent
            for chunk in lent:
                chunk.values.fill_(7.0)


def ignored_weights():
    """A weight that vLLM does not take is an error, also where its layer has others."""
    from verl_fn.backends.vllm import loading

    made, split = engine(), loading.vllm_tensors
    for ignored, layer in (("model.norm.weight", "model.norm"), ("k_proj.weight", "qkv_proj")):
        loading.vllm_tensors = lambda name, t, end=ignored: [] if name.endswith(end) else split(name, t)
        try:
            with pytest.raises(IncompleteWeights, match=layer):
                made.publish(3, trainer().weights(params(0)))
        finally:
            loading.vllm_tensors = split
        with pytest.raises(StaleWeightsError):
            made.generate(requests_for(PROMPTS, Sampling(2), KEY))
    made.publish(4, trainer().weights(params(0)))


def streams_and_interruptions():
    """A stream gives the same samples; another call ends it; one that is dropped leaves nothing behind."""
    made, asked = engine(), requests_for(PROMPTS, Sampling(20, n=4), KEY)
    made.publish(0, trainer().weights(params(2)))
    whole = {(s.request, s.number): s.tokens.tolist() for s in made.generate(asked)}
    assert {(s.request, s.number): s.tokens.tolist() for s in made.stream(asked)} == whole
    stream = made.stream(asked)
    first = next(stream)
    assert first.tokens.tolist() == whole[first.request, first.number]
    assert {(s.request, s.number): s.tokens.tolist() for s in made.generate(asked)} == whole
    with pytest.raises(StaleWeightsError, match="interrupted"):
        list(stream)
    older, newer = made.stream(asked), made.stream(asked)
    next(newer)
    with pytest.raises(StaleWeightsError, match="interrupted"):
        next(older)
    assert len(list(newer)) == len(whole) - 1
    next(made.stream(asked))
    made.publish(1, trainer().weights(params(3)))
    assert not made._engine.has_unfinished_requests()
    other = {(s.request, s.number): s.tokens.tolist() for s in made.generate(asked, version=1)}
    assert other != whole


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
    with pytest.raises(ValueError, match="differ in max_tokens alone"):
        made.grow(lambda samples: next(parts), version=0)
    for second, problem in ((None, "while 1 requests are drawn"), (asked[3:], "the id 3")):
        parts = iter([asked[3:], second])
        with in_flight(made):
            with pytest.raises(ValueError, match=problem):
                made.grow(lambda samples, parts=parts: next(parts), version=0)
            made.publish(0, trainer().weights(params(2)))
    with pytest.raises(StaleWeightsError):
        made.grow(lambda samples: None, version=1)
    assert made.generate([asked[0]])[0].tokens.tolist() == alone[0].tokens.tolist()


def late_outputs():
    """A stream is the same where vLLM returns responses a step after it drew them, as it may with GPUs."""
    made, asked = engine(), requests_for(PROMPTS, Sampling(20, n=4), KEY)
    made.publish(0, trainer().weights(params(2)))
    whole = {(s.request, s.number): s.tokens.tolist() for s in made.generate(asked)}
    step, unfinished, held = made._engine.step, made._engine.has_unfinished_requests, []

    def late():
        held.append(step() if unfinished() else [])
        return held.pop(0) if len(held) > 1 or not unfinished() else []

    made._engine.step, made._engine.has_unfinished_requests = late, lambda: unfinished() or any(held)
    try:
        assert {(s.request, s.number): s.tokens.tolist() for s in made.stream(asked)} == whole
    finally:
        del made._engine.step, made._engine.has_unfinished_requests


def sleep_and_wake():
    made, asked = engine(), requests_for(PROMPTS, Sampling(4), KEY)
    made.publish(0, trainer().weights(params(0)))
    expected = [s.tokens.tolist() for s in made.generate(asked)]
    made.sleep(1)
    made.wake()
    assert [s.tokens.tolist() for s in made.generate(asked, version=0)] == expected
    made.sleep(2)
    with pytest.raises(StaleWeightsError):
        made.generate(asked)
    made.wake(["weights"])
    made.publish(1, trainer().weights(params(0)))
    made.wake(["cache"])
    assert [s.tokens.tolist() for s in made.generate(asked, version=1)] == expected
    with pytest.raises(ValueError, match="'kv_cache'"):
        made.wake(["weights", "kv_cache"])
    # A CPU has nothing to free; what a GPU's engine refuses depends on this record alone.
    made._awake = {"weights"}
    with pytest.raises(AsleepError, match="awake only with its weights"):
        made.generate(asked)
    made._awake = set()
    with pytest.raises(AsleepError, match="asleep"):
        made.publish(2, trainer().weights(params(0)))
    made._awake = {"weights", "kv_cache"}


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

    @property
    def specs(self):
        return self.inner.specs

    @property
    def apart(self):
        given = self.inner.apart
        whole, alone = (attrs.evolve(self, inner=source) for source in (given.whole, given.adapters))
        return attrs.evolve(given, whole=whole, adapters=alone)

    def buckets(self, max_bytes, *, checked=False):
        for i, bucket in enumerate(self.inner.buckets(4096, checked=checked)):
            self.names.extend(chunk.name for chunk in bucket)
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
    with pytest.raises(ValueError, match=r"these weights have none: set rollout\.adapters=merged"):
        made.publish(30, trainer().weights(params(0)))
    return worst, min(moved), sent


@contextlib.contextmanager
def in_flight(made):
    """An engine, as if it was made with ``in_flight``."""
    made.capabilities = Capabilities(versions_per_token=True)
    try:
        yield made
    finally:
        made.capabilities = Capabilities()


def weights_in_flight():
    """Responses go on with weights that arrive between two steps, also where vLLM had begun the next one."""
    with in_flight(engine()) as made:
        prompts = [tuple(prompt) for prompt in PROMPTS]
        case = Case(made, trainer(), prompts, Sampling(12, n=4), 1e-4, KEY, False, (2,), lambda value: value)
        check_in_flight(case, params(0), params(1))
        made.publish(30, trainer().weights(params(2)))
        results = published_at(made, 4, lambda: made.publish(31, trainer().weights(params(3))))
        samples = made.generate(requests_for(PROMPTS, Sampling(20, n=4), KEY), version=30)
        results[0].result()
        assert not made._outputs and not made._drawn
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


def not_finite():
    made, asked = engine(), requests_for(PROMPTS, Sampling(4, n=2), KEY)
    leaves = {name: t.clone() for name, t in params(0).items()}
    leaves["model.norm.weight"][0] = torch.nan
    made.publish(0, Weights.of(leaves))
    with pytest.raises(NotFiniteError, match="diverged"):
        made.generate(asked)
    made.publish(1, trainer().weights(params(0)))
    assert len(made.generate(asked)) == 8


def experts_are_those_of_the_sampler():
    """One prompt is longer than a block of the cache, so that its samples share the block."""
    made, embedded, weights = engine(), Sampler(folder(), routed_experts=True), params(0)
    for one in (made, embedded):
        one.publish(0, trainer().weights(weights))
    requests = requests_for([*PROMPTS, [1, *[4, 5, 6] * 13]], Sampling(12, n=3), KEY)
    both = [one.generate(requests) for one in (made, embedded)]
    check_routes(Case(made, None, PROMPTS, Sampling(12), 1e-4, KEY, False, (), None), both[0])
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens) and ours.routed_experts.dtype == torch.uint8
        routes = [s.routed_experts.sort(-1).values for s in (ours, theirs)]
        assert torch.equal(*routes) and routes[0].shape == (len(ours.prompt) + len(ours.tokens), 2, 2)
    assert made._engine.vllm_config.cache_config.block_size == 32
    # Blocks of the first call are still in the cache.
    again = made.generate(requests)
    assert all(torch.equal(a.routed_experts, b.routed_experts) for a, b in zip(both[0], again, strict=True))


def experts_that_are_not_reported():
    """A kernel that picks experts itself, as without ``reported_experts``; and answers that lack a token."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    made = engine()
    unreported = pytest.raises(EngineArgumentError, match=r"model\.layers\.0\.mlp\.experts does not report them")
    with mock.patch.object(MoERunner, "is_monolithic", True), unreported:
        made._call("layers_with_experts")
    made.publish(0, trainer().weights(params(0)))
    lost = mock.patch("vllm.v1.engine.output_processor.np.concatenate", lambda chunks, axis: chunks[0])
    missing = pytest.raises(RoutesMissing, match="experts of 3 tokens for a row of 5 tokens, of which it computed 4")
    with lost, missing:
        made.generate(requests_for(PROMPTS[:1], Sampling(4), KEY))


def other_draws_are_an_error():
    """vLLM's own tokens are compared with those that were drawn."""
    from verl_fn.backends.vllm import EngineError

    made = engine()
    made.publish(0, trainer().weights(params(0)))
    step = made._engine.step

    def altered():
        outputs = step()
        for output in outputs:
            if output.finished:
                output.outputs[0].token_ids[-1] += 1
        return outputs

    made._engine.step = altered
    try:
        with pytest.raises(EngineError, match="other tokens"):
            made.generate(requests_for(PROMPTS, Sampling(4), KEY))
    finally:
        del made._engine.step


def refused(arguments):
    """The error that an engine with these arguments raises."""
    try:
        Vllm(folder(), device="cpu", dtype="float32", max_length=64, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
