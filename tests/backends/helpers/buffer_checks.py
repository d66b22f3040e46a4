"""What the laws say of buffers: a state's own decide, whatever a backend computed before, and go wherever it goes."""

import attrs
import megatron_on_cpu
import torch
import transformer_engine_on_cpu

from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.local import Local
from verl_fn.backends.megatron import Megatron
from verl_fn.backends.sampler import Sampler
from verl_fn.state import Buffers, Key, Params, Sampling, pack, requests_for, tree
from verl_fn.steps import adamw, chain, ppo_clip
from verl_fn.testing import tiny_batch

KEY = Key.from_seed(0)


def optimizer():
    return chain(adamw(1e-2))


def moved(state, seed=1):
    """The same state with other buffers, by which other experts are picked."""
    generator = torch.Generator().manual_seed(seed)
    buffers = {name: torch.randn(b.shape, generator=generator).to(b.device) for name, b in state.buffers.items()}
    return attrs.evolve(state, params=attrs.evolve(state.params, buffers=Buffers(buffers)))


def whole(backend, params):
    """Parameters with whole tensors, for a backend of one process."""
    named = {name: t.cpu() for name, t in dict(backend.named(params)).items()}
    return Params(named, params.trainable, Buffers({name: b.cpu() for name, b in params.buffers.items()}))


def observed(backend, folder, out):
    """What a backend does with two states that differ only in their buffers.

    Returns:
        By name: whether outputs and gradients are the state's own, and whether its buffers survive; and the largest
        errors beside one process, for both states.
    """
    one, batch = Local(folder, optimizer(), max_tokens=24), tiny_batch()
    first = backend.load_pretrained()
    second, before = moved(first), dict(first.buffers)
    outputs = [backend.forward(state.params, batch).logprobs for state in (first, second, first)]
    grads = [backend.forward_backward(state, batch, ppo_clip())[0] for state in (first, second, first)]
    worst, different = 0.0, float((outputs[0] - outputs[1]).abs().max())
    for state, logprobs, gradients in zip((first, second), outputs, grads, strict=False):
        params = whole(backend, state.params)
        alone = attrs.evolve(one.load_pretrained(), params=params)
        worst = max(worst, float((one.forward(params, batch).logprobs - logprobs).abs().max()))
        wanted, found = one.forward_backward(alone, batch, ppo_clip())[0], dict(backend.named(gradients))
        scale = float(wanted.global_norm())
        worst = max(worst, *(float((found[name].cpu() - g).norm()) / scale for name, g in wanted.items()))
    facts = {
        "pure": torch.equal(outputs[0], outputs[2]) and tree.equal(grads[0], grads[2]),
        "kept": all(first.buffers[name] is b for name, b in before.items()),
    }
    backend.save(second, out)
    facts["restored"] = tree.equal(backend.restore(out), second)
    facts["restored by one process"] = tree.equal(one.restore(out).params, whole(backend, second.params))
    facts["loaded"] = tree.equal(backend.load_pretrained(out).params, second.params)
    published = dict(backend.weights(second.params).read())
    expected = dict(one.weights(whole(backend, second.params)).read())
    facts["published"] = tree.equal({name: t.cpu() for name, t in published.items()}, expected)
    updated, _ = backend.apply_update(second, grads[1])
    facts["after an update"] = tree.equal(dict(updated.buffers), dict(moved(first).buffers))
    # The last pass was one of the first state: its buffers and its parameters are both replaced.
    found, wanted = backend.forward(updated.params, batch), one.forward(whole(backend, updated.params), batch)
    worst = max(worst, float((found.logprobs - wanted.logprobs).abs().max()))
    return facts, worst, different


def sampled(backend, folder):
    """The largest differences between log-probs of an engine and of the state that was published, one by one."""
    engine, first, errors = Sampler(folder), backend.load_pretrained(), []
    for version, state in enumerate((first, moved(first), first)):
        engine.publish(version, backend.weights(state.params))
        requests = requests_for([[1, 3], [1, 4, 2]], Sampling(max_tokens=8, n=4), Key.from_seed(version))
        batch = pack(engine.generate(requests, version=version))
        drawn = batch["response_mask"] > 0
        found = backend.forward(state.params, batch).logprobs
        errors.append(float((found - batch["rollout_log_probs"])[drawn].abs().max()))
    return errors


def on_ranks(kind, folder, options, out):
    """``observed`` by ranks of a sharded backend."""
    if kind == "fsdp":
        backend = Fsdp(folder, optimizer(), max_tokens=24, **options)
    else:
        transformer_engine_on_cpu.install()
        megatron_on_cpu.install()
        kernels = dict.fromkeys(transformer_engine_on_cpu.KERNELS, False)
        backend = Megatron(folder, optimizer(), max_tokens=24, device="cpu", provider=kernels, **options)
    return observed(backend, folder, out)
