"""What the ranks of test_fsdp.py do to call a backend in unusual ways; each function runs on all of them together."""

import contextlib
import threading
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import KEY, error_of, optimizer
from torch.distributed.tensor import DTensor

from verl_fn.backends import base
from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.fsdp.torch_private import local_of
from verl_fn.backends.local import Local
from verl_fn.backends.tensor_file import checksum
from verl_fn.errors import ArgumentError
from verl_fn.state import NotDifferentiable, is_donated, tree
from verl_fn.steps import loss, ppo_clip, sgd
from verl_fn.testing import tiny_batch


def settings(folder, options):
    """The first leaf that differs when a caller's settings do, by the kind of setting."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24, **options), tiny_batch()

    def steps(around):
        with around:
            state = backend.init(KEY)
            first, _ = backend.forward_backward(state, batch, ppo_clip())
            state, _ = backend.apply_update(state, first)
        second, reported = backend.forward_backward(state, batch, ppo_clip())
        with around:
            outputs = backend.forward(state.params, batch)
            kept, _ = backend.apply_update(state, second, donate=False)
        return outputs, second, reported, kept

    expected = steps(contextlib.nullcontext())
    surroundings = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "default device": torch.device("meta"),
    }
    return {name: tree.first_difference(steps(around), expected) for name, around in surroundings.items()}


def shared_groups(folder, options):
    """The models of several roles need no process groups of their own."""
    first, second = (Fsdp(folder, optimizer(), max_tokens=24, **options) for _ in range(2))
    assert first.layout is second.layout and first.layout is not Fsdp(folder, optimizer()).layout


def storages(folder):
    """The memory of a shard that somebody holds is copied; gradients that had to be moved are spent."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    held = local_of(state.params["model.norm.weight"]).untyped_storage()
    before = bytes(held)
    state, found = backend.apply_update(state, grads)
    assert bytes(held) == before and found["perf/residency_copies"].value == 1
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    beside, base.beside = base.beside, lambda state, grads, move: tree.snapshot(grads)
    try:
        state, found = backend.apply_update(state, grads)
    finally:
        base.beside = beside
    assert is_donated(grads) and found["perf/residency_copies"].value == 0


def refusals(folder):
    """Errors before anything is donated, and before ranks wait for each other."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    other = Fsdp(folder, sgd(0.1), max_tokens=24)

    def by_advantages(values):
        return backend.forward_backward(state, batch.with_tokens(advantages=values), ppo_clip())[1]["loss"].total

    says = [
        error_of(lambda: other.apply_update(state, grads), ValueError),
        error_of(lambda: backend.apply_update(state, {}), ArgumentError),
        error_of(lambda: backend.forward(state, batch), ArgumentError),
        error_of(lambda: backend.forward_backward(state, batch, ppo_clip), ArgumentError),
        error_of(
            lambda: torch.func.grad(
                lambda a: (
                    backend.forward_backward(state, batch.with_tokens(advantages=a), ppo_clip())[1]["loss"].total
                )
            )(batch["advantages"]),
            NotDifferentiable,
        ),
        beside_another_thread(backend, state, batch),
    ]
    assert not is_donated(state) and not is_donated(grads)
    return says


def beside_another_thread(backend, state, batch):
    began, end = threading.Event(), threading.Event()

    def other():
        with backend._one_call():
            began.set()
            assert end.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert began.wait(30)
    try:
        return error_of(lambda: backend.forward(state.params, batch), ValueError)
    finally:
        end.set()
        thread.join(30)


def constants(folder):
    """A loss that ignores the outputs has zero gradients, and a batch's fields are constants."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    state, source = backend.init(KEY), batch["advantages"].clone().requires_grad_()
    tracked = batch.with_tokens(advantages=source * 1.0)

    @loss(needs=["logprobs"])
    def constant(outputs, batch):
        return batch["advantages"], {}

    zeros, reported = backend.forward_backward(state, tracked, constant)
    assert not any(local_of(g).any() for g in zeros.values()) and reported["loss"].value != 0.0
    expected, found = (backend.forward_backward(state, b, ppo_clip()) for b in (batch, tracked))
    assert tree.equal(found, expected) and source.grad is None


def held_rows(folder, options, gathers):
    """The rows that all ranks send are the weights, each once; without adapters no tensor is gathered for them."""
    lora = {"lora": options["lora"]} if "lora" in options else {}
    one, many = (cls(folder, optimizer(), **given) for cls, given in ((Local, lora), (Fsdp, options)))
    states = []
    for backend in (one, many):
        state = backend.init(KEY)
        # B is zero before the first update.
        grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
        states.append(backend.apply_update(state, grads, donate=False)[0])
    weights, held = one.weights(states[0].params), many.weights(states[1].params).held
    worst = _gap(weights, held, gathers)
    if lora:
        kept = many.weights(many.apply_update(states[1], grads, donate=False)[0].params).held
        assert held.apart.identify() == kept.apart.identify()
        for kind in ("whole", "changing"):
            worst = max(worst, _gap(getattr(weights.apart, kind), getattr(held.apart, kind), 0))
        before = held.apart.identify()
        next(iter(states[1].params.base.values())).mul_(2.0)
        assert held.apart.identify() != before
    return worst


def _gap(weights, held, gathers):
    """The largest difference between whole tensors and the rows that all ranks hold of them."""
    whole = dict(weights.read())
    with mock.patch.object(DTensor, "full_tensor", autospec=True, side_effect=DTensor.full_tensor) as full:
        buckets = list(held.buckets(2000, checked=True))
    assert full.call_count == gathers, full.call_count
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, [[(c.name, c.start, c.values, c.checksum) for c in bucket] for bucket in buckets])
    # All ranks end their buckets together, each within its part of the bytes, or with one row.
    assert len({len(buckets) for buckets in by_rank}) == 1
    largest = max(t[:1].nbytes for t in whole.values())
    sizes = [sum(t.nbytes for _, _, t, _ in bucket) for buckets in by_rank for bucket in buckets]
    assert max(sizes) <= max(2000 // len(by_rank), largest)
    rows = {name: torch.full_like(t, torch.nan) for name, t in whole.items()}
    for name, start, t, checked in (chunk for buckets in by_rank for bucket in buckets for chunk in bucket):
        assert rows[name][start : start + len(t)].isnan().all() and checked == checksum(t)
        rows[name][start : start + len(t)] = t
    return max(float((t - whole[name]).abs().max()) for name, t in rows.items())
