"""What the ranks of test_megatron_offload.py do; each function runs on all of them together."""

import torch
from megatron_cases import DEVICE, megatron, mutant
from rank_cases import KEY

from verl_fn.backends.protocol import HoldsBuffers
from verl_fn.state import snapshot, tree
from verl_fn.steps import ppo_clip
from verl_fn.testing import tiny_batch

__all__ = ["mutant"]


def held(backend):
    """The bytes of weights and of gradients that are allocated."""
    resident = backend._built().resident
    return [
        sum(t.untyped_storage().nbytes() for t, _ in part.sizes) for part in (resident.weights, resident.gradients)
    ]


def freed(folder, options):
    """Two updates, with the state on the CPU and the buffers freed between calls, and without.

    Returns:
        The bytes of the buffers after each kind of call, and whether each of the states and outputs is the same,
        bitwise.
    """
    batch, found = tiny_batch(), []
    for away in (False, True):
        backend = megatron(folder, options)
        assert isinstance(backend, HoldsBuffers)
        state, sizes, made = backend.init(KEY), [], []
        for _ in range(2):
            made.append(backend.forward(state.params, batch, ["logprobs"]).logprobs)
            sizes.append(held(backend))
            grads, _ = backend.forward_backward(state, batch, ppo_clip())
            sizes.append(held(backend))
            if away:
                before = snapshot(state)
                state = backend.place(state, params="cpu", optimizer="cpu")
                sizes.append(held(backend))
                assert all(t.device.type == "cpu" for t in tree.leaves(state) if isinstance(t, torch.Tensor))
                state = backend.place(state, params=DEVICE, optimizer=DEVICE)
                assert tree.equal(state, before)
            state, metrics = backend.apply_update(state, grads)
            assert metrics["perf/residency_copies"].value == 0
            if away:
                backend.free_buffers()
                sizes.append(held(backend))
            made.append(snapshot(state))
        found.append(made)
    return sizes, [tree.equal(a, b) for a, b in zip(*found, strict=True)]


def updated_on_the_cpu(folder, options):
    """Log-probs after an update of a state that stays on the CPU, beside those of one that stays on the device."""
    batch, found = tiny_batch(), []
    for away in (False, True):
        backend = megatron(folder, options)
        state = backend.init(KEY)
        for _ in range(2):
            if away:
                state = backend.place(state, params="cpu", optimizer="cpu")
            grads, _ = backend.forward_backward(state, batch, ppo_clip())
            backend.free_buffers()
            state, _ = backend.apply_update(state, grads)
        found.append(backend.forward(state.params, batch, ["logprobs"]).logprobs)
        source = backend.weights(state.params)
        backend.free_buffers()
        found.append({name: t.cpu() for name, t in source.read()})
        assert held(backend) == [0, 0]
    gaps = [float((t - found[3][name]).abs().max()) for name, t in found[1].items()]
    return float((found[0] - found[2]).abs().max()), max(gaps)


def memory(folder, options):
    """The bytes that torch has allocated on this GPU: with the state, the state on the CPU, and after a call."""
    torch.cuda.empty_cache()
    backend, batch = megatron(folder, options), tiny_batch()
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    state, _ = backend.apply_update(state, grads)
    want = backend.forward(state.params, batch, ["logprobs"]).logprobs
    del grads
    elements, near = sum(t.numel() for t in state.params.values()), torch.cuda.memory_allocated()
    buffers = sum(held(backend))
    kept = snapshot(backend.place(state, params="cpu", optimizer="cpu"))
    state = backend.place(state, params="cpu", optimizer="cpu")
    away = torch.cuda.memory_allocated()
    state = backend.place(state, params="cuda", optimizer="cuda")
    same = tree.equal(backend.place(state, params="cpu", optimizer="cpu"), kept)
    same = same and torch.equal(backend.forward(state.params, batch, ["logprobs"]).logprobs, want)
    return near - away, buffers + 3 * 4 * elements, same


def broken(folder, name):
    return mutant(folder, name, {}, "persistence")
