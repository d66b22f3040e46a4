"""Functions that run in a process of their own, which has one vLLM engine for all tests."""

import functools
import os
import tempfile
from unittest import mock

import attrs
import pytest
import torch
import vllm_worker_cases

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import StaleWeightsError
from verl_fn.backends.sampler import NotFiniteError, Sampler
from verl_fn.backends.vllm import AsleepError, Vllm
from verl_fn.backends.vllm.arguments import EngineArgumentError
from verl_fn.backends.vllm.engine import RoutesMissing
from verl_fn.backends.weight_sync import IncompleteWeights, Weights
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import Buffers, Key, Sampling, pack, requests_for
from verl_fn.steps import constant, sgd
from verl_fn.testing import check_rollout
from verl_fn.testing.rollout_case import RolloutCase
from verl_fn.testing.rollouts import check_routes

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
    if arch == "glm4_moe":
        sizes |= {"head_dim": 32, "vocab_size": 12, "moe_intermediate_size": 32, "n_shared_experts": 1}
        return tiny_folder(arch, tempfile.mkdtemp(), **sizes)
    if arch == "vaultgemma":
        sizes |= {"head_dim": 32, "vocab_size": 12, "sliding_window": 4, "layer_types": ["full_attention"] * 4}
        return tiny_folder(arch, tempfile.mkdtemp(), **sizes, final_logit_softcapping=2.0)
    return new_model(tempfile.mkdtemp(), chars="abcdefgh>", arch=arch, initializer_range=0.2, **sizes)


@functools.cache
def engine():
    moe = os.environ.get("ARCH") == "qwen3_moe"
    more = {"engine_kwargs": {"block_size": 32}, "routed_experts": True} if moe else {}
    with vllm_worker_cases.replacing():
        return Vllm(folder(), device="cpu", dtype=torch.float32, slots=16, max_length=64, **more)


def inside(function, *args):
    """Runs a function in the worker of the engine."""
    return engine()._engine.call(function, *args)[0]


@functools.cache
def trainer():
    return Local(folder(), sgd(constant(0.1)), deterministic=False)


def params(seed):
    """Weights of a seed; also the biases of experts, if there are any: they decide, and bf16 rounds them to a few."""
    made = trainer().init(Key.from_seed(seed)).params
    generator = torch.Generator().manual_seed(seed)
    biases = {name: 100 + 2 * torch.rand(b.shape, generator=generator) for name, b in made.buffers.items()}
    return attrs.evolve(made, buffers=Buffers(biases))


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


def experts_are_repacked_once():
    """Experts that share the bias of their router are repacked once in a publication."""
    inside(vllm_worker_cases.count_repacks)
    engine().publish(10, trainer().weights(params(0)))
    names = inside(vllm_worker_cases.repacked)
    assert names and len(names) == len(set(names)), names


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
    size = inside(vllm_worker_cases.buckets_of, 6000)
    try:
        made.publish(2, Overwritten(trainer().weights(params(5))))
    finally:
        inside(vllm_worker_cases.buckets_of, size)
    with mock.patch.object(loading, "BUCKET_BYTES", 6000):
        # What is larger than a bucket can be put together where it is loaded, if it fits there.
        tensor, place = torch.arange(4000.0).view(1000, 4), torch.zeros(1024, 4)
        source = Overwritten(Weights.of({"a": tensor, "b": tensor}))
        places = {"a": place, "b": place[:999]}
        arrived = dict(loading.whole(source, checked=False, places=places))
        assert arrived["a"].data_ptr() == place.data_ptr() and torch.equal(arrived["a"], tensor)
        assert torch.equal(arrived["b"], tensor) and not place[1000:].any()
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
    made = engine()
    for ignored, layer in (("model.norm.weight", "model.norm"), ("k_proj.weight", "qkv_proj")):
        inside(vllm_worker_cases.ignoring, ignored)
        try:
            with pytest.raises(IncompleteWeights, match=layer):
                made.publish(3, trainer().weights(params(0)))
        finally:
            inside(vllm_worker_cases.ignoring, None)
        with pytest.raises(StaleWeightsError):
            made.generate(requests_for(PROMPTS, Sampling(2), KEY))
    made.publish(4, trainer().weights(params(0)))


def a_loader_without_a_name():
    """The values of a weight whose loader is a partial function, as vLLM's MiniMax has them, after it was loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from verl_fn.backends.vllm import loading

    class Model(torch.nn.Module):
        def load_weights(self, tensors):
            for _, t in tensors:
                self.norm.weight.weight_loader(self.norm.weight, t)
            return {"norm.weight"}

    model = Model()
    model.norm = torch.nn.LayerNorm(4, bias=False)
    model.norm.weight.weight_loader = functools.partial(default_weight_loader)
    record_metadata_for_reloading(model)
    tensors = iter([("norm.weight", torch.full((4,), 3.0))])
    loading._load_by_layers(model, mock.Mock(dtype=torch.float32), tensors, ())
    return model.norm.weight.tolist()


def shares_of_a_gpu():
    """The share that vLLM asks for by default, and if it is told the size of its cache."""
    from verl_fn.backends.vllm.arguments import engine_arguments

    settings = {"device": "cuda", "dtype": "float32", "slots": 2, "max_length": 64, "tensor_parallel_size": 1}
    settings |= {"gpu_memory_utilization": 0.5, "enforce_eager": True}
    given = ({}, {"kv_cache_memory_bytes": 2**30})
    made = [engine_arguments(folder(), engine_kwargs=more, **settings) for more in given]
    return tuple(one["gpu_memory_utilization"] for one in made)


def rotations():
    """The largest difference between vLLM's cosines and sines for Ministral 3 and transformers'."""
    from transformers import Ministral3Config
    from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from verl_fn.backends.vllm.arguments import corrections

    config = Ministral3Config(head_dim=32)
    with set_current_vllm_config(VllmConfig()):
        ours = get_rope(32, 64, rope_parameters=corrections(config)["rope_parameters"])
    cos, sin = Ministral3RotaryEmbedding(config)(torch.zeros(1), torch.arange(64)[None])
    theirs = torch.cat([cos[0, :, :16], sin[0, :, :16]], -1)
    return float((ours.cos_sin_cache[:64] - theirs).abs().max())


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
    made._awake = {"weights", "cache"}


def not_finite():
    """Spoilt before the layers, the keys and values in the cache are not finite either."""
    made, asked = engine(), requests_for(PROMPTS, Sampling(4, n=2), KEY)
    made.publish(0, trainer().weights(params(0)))
    wanted = made.generate(asked)
    for number, name in enumerate(("model.norm.weight", "model.embed_tokens.weight")):
        leaves = {key: t.clone() for key, t in params(0).items()}
        leaves[name].view(-1)[::3] = torch.nan
        made.publish(2 * number + 1, Weights.of(leaves))
        with pytest.raises(NotFiniteError, match="diverged"):
            made.generate(asked)
        made.publish(2 * number + 2, trainer().weights(params(0)))
        for _ in range(2):
            for ours, theirs in zip(made.generate(asked), wanted, strict=True):
                assert torch.equal(ours.tokens, theirs.tokens)


def experts_are_those_of_the_sampler():
    """One prompt is longer than a block of the cache, so that its samples share the block."""
    made, embedded, weights = engine(), Sampler(folder(), routed_experts=True), params(0)
    for one in (made, embedded):
        one.publish(0, trainer().weights(weights))
    requests = requests_for([*PROMPTS, [1, *[4, 5, 6] * 13]], Sampling(12, n=3), KEY)
    both = [one.generate(requests) for one in (made, embedded)]
    check_routes(RolloutCase(made, None, PROMPTS, Sampling(12), 1e-4, KEY, False, (), None), both[0])
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
    made = engine()
    with pytest.raises(EngineArgumentError, match=r"model\.layers\.0\.mlp\.experts does not report them"):
        inside(vllm_worker_cases.unreported_experts)
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


def parameters_that_are_loaded_at_once():
    """Returns what a layer has whose only parameter vLLM's loading by layers leaves in its place."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from verl_fn.backends.vllm.loading import _load_by_layers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = torch.nn.Module()
            self.moe.e_score_correction_bias = torch.nn.Parameter(torch.zeros(4))

        def load_weights(self, tensors):
            for name, t in tensors:
                default_weight_loader(dict(self.named_parameters())[name], t)
            return {name}

    model = Model()
    record_metadata_for_reloading(model)
    _load_by_layers(model, None, iter([("moe.e_score_correction_bias", torch.ones(4))]), ())
    return model.moe.e_score_correction_bias.tolist()


def sampler_that_is_replaced():
    """The kernel of vLLM's own sampler does nothing until an engine is set up, and is itself afterwards."""
    return inside(vllm_worker_cases.kernel_of_the_sampler)
