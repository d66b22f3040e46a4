"""Functions that run in a process of their own with vLLM on GPUs."""

import tempfile
from pathlib import Path
from unittest import mock

import torch
from vision_cases import encoded, name_tokens, seeing
from vllm_update_cases import published_at

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.vision import Seen
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import StaleWeightsError
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.vllm import AsleepError, Vllm
from verl_fn.benchmarks import workload
from verl_fn.benchmarks.families_vllm import sampled
from verl_fn.benchmarks.tiny_models import tiny_folder, vllm_sizes
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.steps import adamw, aggregate, chain, clip_by_global_norm, constant, ppo_clip
from verl_fn.testing.rollout_case import RolloutCase
from verl_fn.testing.rollouts import check_routes

KEY = Key.from_seed(3)


def prompts(vocab, count=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab, (count, 100), generator=generator).tolist()


def model(shape):
    return workload.write_model(tempfile.mkdtemp(), shape, "cuda")


def made(folder, **options):
    # With a cache of a given size, other processes may use the GPU meanwhile.
    settings = {"gpu_memory_utilization": 0.15, "engine_kwargs": {"kv_cache_memory_bytes": 16 << 30}}
    settings |= {"slots": 128, "max_length": 512, "dtype": "bfloat16"} | options
    return Vllm(folder, **settings)


def gap(engine, trainer, state, version, vocab, tokens=128):
    """The mean absolute difference of log-probs, and the batch."""
    requests = requests_for(prompts(vocab), Sampling(tokens), KEY)
    batch = pack(engine.generate(requests, version=version))
    exact = trainer.forward(state.params, batch, ["logprobs"]).logprobs
    mask = batch["response_mask"].bool()
    return float((exact - batch["rollout_log_probs"])[mask].abs().mean()), batch


def after_real_updates(folder_or_shape, updates=10):
    """The gap after each of some updates of PPO, and how far the log-probs have moved in all."""
    folder = model(folder_or_shape) if folder_or_shape in workload.SHAPES else folder_or_shape
    optimizer = chain(clip_by_global_norm(1.0), adamw(constant(1e-5)))
    trainer = Local(folder, optimizer, device="cuda", dtype="bfloat16", max_tokens=16384)
    state = trainer.load_pretrained(folder, Key.from_seed(0))
    engine = made(folder)
    engine.publish(0, trainer.weights(state.params))
    vocab = engine.vocab
    first, batch = gap(engine, trainer, state, 0, vocab)
    start, gaps = trainer.forward(state.params, batch, ["logprobs"]).logprobs, [first]
    for version in range(1, updates + 1):
        old = trainer.forward(state.params, batch, ["logprobs"]).logprobs
        advantages = torch.randn(len(old), generator=torch.Generator().manual_seed(version))
        ready = aggregate(batch.with_tokens(old_log_probs=old, advantages=advantages))
        grads, _ = trainer.forward_backward(state, ready, ppo_clip())
        state, _ = trainer.apply_update(state, grads)
        engine.publish(version, trainer.weights(state.params))
        now, _ = gap(engine, trainer, state, version, vocab)
        gaps.append(now)
    moved = float((trainer.forward(state.params, batch, ["logprobs"]).logprobs - start).abs().max())
    return gaps, moved


def family(name):
    """What differs between the engine's and the trainer's log-probs, before and after an update."""
    return sampled(tiny_folder(name, tempfile.mkdtemp(), **vllm_sizes(name)), "cuda")


def in_flight(shape, eager):
    """The mean gaps of the tokens of each version, where another thread publishes in the middle of a call."""
    folder = model(shape)
    trainer = Local(folder, adamw(constant(1e-5)), device="cuda", dtype="bfloat16", max_tokens=16384)
    states = [trainer.load_pretrained(folder, Key.from_seed(0)), trainer.init(Key.from_seed(1))]
    engine = made(folder, in_flight=True, enforce_eager=eager)
    engine.publish(0, trainer.weights(states[0].params))
    requests = requests_for(prompts(engine.vocab), Sampling(128), KEY)
    publication = published_at(engine, 40, lambda: engine.publish(1, trainer.weights(states[1].params)))
    batch = pack(engine.generate(requests, version=0))
    publication[0].result()
    exact = [trainer.forward(state.params, batch, ["logprobs"]).logprobs for state in states]
    gaps = [(log_probs - batch["rollout_log_probs"]).abs() for log_probs in exact]
    return [float(gaps[version][batch["versions"] == version].mean()) for version in (0, 1)]


def sleeping(shape):
    """GiB in use before, during and after sleep; answers are the same."""

    def used():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    folder = model(shape)
    engine = made(folder)
    trainer = Local(folder, adamw(constant(1e-5)), device="cuda", dtype="bfloat16")
    state = trainer.load_pretrained(folder, Key.from_seed(0))
    engine.publish(0, trainer.weights(state.params))
    asked = requests_for(prompts(engine.vocab, 8), Sampling(16), KEY)
    expected = [s.tokens.tolist() for s in engine.generate(asked)]
    awake = used()
    engine.sleep(1)
    first = used()
    for call in (lambda: engine.generate(asked), lambda: engine.publish(1, trainer.weights(state.params))):
        try:
            call()
        except AsleepError:
            continue
        raise AssertionError("a sleeping engine answered")
    engine.wake()
    assert [s.tokens.tolist() for s in engine.generate(asked, version=0)] == expected
    engine.sleep(2)
    second = used()
    try:
        engine.generate(asked)
    except StaleWeightsError:
        pass
    else:
        raise AssertionError("an engine without weights answered")
    engine.wake(["weights"])
    engine.publish(1, trainer.weights(state.params))
    partly = used()
    # Half awake, it falls asleep as a whole.
    engine.sleep(2)
    assert abs(used() - second) < 1
    engine.wake(["weights"])
    engine.publish(1, trainer.weights(state.params))
    engine.wake(["cache"])
    assert [s.tokens.tolist() for s in engine.generate(asked, version=1)] == expected
    return awake, first, second, partly, used()


def images(arch):
    """The worst gap after each of two publications, and the worst if the trainer hides later image tokens."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40}
    folder = seeing(Path(tempfile.mkdtemp()), arch, **sizes)
    if arch == "gemma3":
        name_tokens(folder)
    trainer = Local(folder, adamw(constant(1e-5)), device="cuda")
    engine, gaps, hidden = made(folder, dtype="float32", slots=16, max_length=128), [], 0.0
    ids, shown = zip(*encoded(folder)[0], strict=True)

    def worst(params, batch):
        exact = trainer.forward(params, batch, ["logprobs"]).logprobs
        return float((exact - batch["rollout_log_probs"]).abs().max())

    for version, state in enumerate((trainer.load_pretrained(), trainer.init(Key.from_seed(9)))):
        engine.publish(version, trainer.weights(state.params))
        asked = requests_for(ids, Sampling(8, n=3), KEY, images=shown)
        batch = pack(engine.generate(asked, version=version))
        gaps.append(worst(state.params, batch))
        with mock.patch.object(Seen, "blocks", None):
            hidden = max(hidden, worst(state.params, batch))
    return gaps, hidden


def recorded_experts():
    """How many choices of experts of vLLM and of the embedded engine are alike, for the same weights and tokens."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [1]}
    folder = new_model(
        tempfile.mkdtemp(), chars="abcdefgh", arch="qwen3_moe", hidden_size=256, num_hidden_layers=3, **sizes
    )
    trainer = Local(folder, adamw(constant(1e-5)), device="cuda", dtype="bfloat16")
    weights = trainer.weights(trainer.init(KEY).params)
    engines = (
        made(folder, max_length=128, routed_experts=True),
        Sampler(folder, device="cuda", dtype="bfloat16", routed_experts=True),
    )
    prompts = [[1, *(4 + (i + j) % 8 for j in range(40))] for i in range(4)]
    routes = []
    for engine in engines:
        engine.publish(0, weights)
        # One drawn token, so that all tokens of both are the same.
        samples = engine.generate(requests_for(prompts, Sampling(1, n=4), KEY))
        check_routes(RolloutCase(engine, None, prompts, Sampling(1), 1e-2, KEY, False, (), None), samples)
        routes.append(torch.cat([s.routed_experts[:-1] for s in samples]).sort(-1).values)
    return float((routes[0] == routes[1]).float().mean())


def tensor_parallel(shape):
    """The gap of an engine on two GPUs."""
    folder = model(shape)
    trainer = Local(folder, adamw(constant(1e-5)), device="cuda", dtype="bfloat16", max_tokens=16384)
    state = trainer.load_pretrained(folder, Key.from_seed(0))
    engine = made(folder, tensor_parallel_size=2, enforce_eager=True)
    gaps = []
    for version in range(2):
        engine.publish(version, trainer.weights(state.params))
        gaps.append(gap(engine, trainer, state, version, engine.vocab, tokens=32)[0])
    return gaps
