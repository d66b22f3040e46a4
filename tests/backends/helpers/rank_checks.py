"""What ranks do that were given different things, or fail alone; each function runs on all of them together."""

import errno
import os
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from rank_cases import KEY, error_of, optimizer
from torch.distributed.tensor import DTensor

from verl_fn.backends import tensor_file
from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.fsdp import backend as fsdp_backend
from verl_fn.backends.fsdp.sharding import whole_of
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.local import Local
from verl_fn.state import Grads, is_donated, tree
from verl_fn.steps import SGD, adamw, chain, clip_by_global_norm, frozen, linear, ppo_clip, sgd, stateless
from verl_fn.testing import tiny_batch

OPTIMIZERS = {
    "another rate": lambda: chain(clip_by_global_norm(1.0), adamw(2e-3, weight_decay=0.0)),
    "another clip": lambda: chain(clip_by_global_norm(2.0), adamw(1e-3, weight_decay=0.0)),
    "another epsilon": lambda: chain(clip_by_global_norm(1.0), adamw(1e-3, eps=1e-6, weight_decay=0.0)),
    "another decay": lambda: chain(clip_by_global_norm(1.0), adamw(1e-3)),
    "another schedule": lambda: chain(clip_by_global_norm(1.0), adamw(linear(1e-3, 500), weight_decay=0.0)),
    "none": frozen,
}


def odd(ordinary, other):
    """What the ranks are given: the last one another thing."""
    return other if dist.get_rank() == dist.get_world_size() - 1 else ordinary


def other_settings(folder, options):
    return error_of(lambda: Fsdp(folder, optimizer(), **odd({}, options)))


def equal_dtypes(folder):
    """A name and a dtype of torch."""
    return error_of(lambda: Fsdp(folder, optimizer(), dtype=odd("bfloat16", torch.bfloat16)))


def other_optimizers(folder):
    return [error_of(lambda m=make: Fsdp(folder, odd(optimizer(), m()))) for make in OPTIMIZERS.values()]


def other_models(folder, another):
    return error_of(lambda: Fsdp(odd(folder, another), optimizer()))


def other_weights(folder, another):
    """Of one architecture, as two ranks with folders of their own may read them."""
    backend = Fsdp(folder, optimizer())
    return error_of(lambda: backend.load_pretrained(odd(folder, another)))


def other_keys(folder):
    backend = Fsdp(folder, optimizer())
    return error_of(lambda: backend.init(odd(KEY, KEY.fold_in("other"))))


def other_devices(folder):
    backend = Fsdp(folder, optimizer())
    state = backend.init(KEY)
    return error_of(lambda: backend.place(state, params=odd("cpu", "meta")))


def other_updates(folder):
    """An update with another optimizer on one rank, and one with the same settings on all."""
    backend = Fsdp(folder, optimizer())
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
    told = [
        error_of(lambda other=other: backend.apply_update(state, grads, optimizer=odd(None, other)))
        for other in (OPTIMIZERS["another rate"](), 1e-3)
    ]
    told.append(error_of(lambda: backend.apply_update(state, grads, optimizer=1e-3), TypeError))
    _, metrics = backend.apply_update(state, grads, optimizer=OPTIMIZERS["another rate"]())
    return told, metrics["lr"].value


def missing_weights(folder, gone):
    """A folder that one rank cannot read whole."""
    backend = Fsdp(folder, optimizer())
    return error_of(lambda: backend.load_pretrained(odd(folder, gone)))


def other_folders(folder, into):
    """To save in, and to restore from."""
    backend = Fsdp(folder, optimizer())
    state, other = backend.init(KEY), backend.init(KEY.fold_in("other"))
    backend.save(state, f"{into}/a")
    backend.save(other, f"{into}/b")
    return [
        error_of(lambda: backend.save(other, odd(f"{into}/a", f"{into}/b"))),
        error_of(lambda: backend.restore(odd(f"{into}/a", f"{into}/b"))),
    ]


def bad_mask(folder):
    """A batch that one rank alone would have to refuse, in its share."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    mask = batch["response_mask"].clone()
    mask[0] = 1.0
    return error_of(lambda: backend.forward(backend.init(KEY).params, batch.with_tokens(response_mask=mask)))


def other_layouts(folder, into):
    """States of another layout, and of no layout at all, wherever a state goes in."""
    batch, plain = tiny_batch(), Local(folder, optimizer())
    here, there = (Fsdp(folder, optimizer(), max_tokens=24, **o) for o in ({}, {"replicate": 2}))
    mine, found = here.init(KEY), []
    grads, _ = here.forward_backward(mine, batch, ppo_clip())
    for state in (there.init(KEY), plain.init(KEY)):
        found += [
            error_of(lambda s=state: here.forward(s.params, batch)),
            error_of(lambda s=state: here.forward_backward(s, batch, ppo_clip())),
            error_of(lambda s=state: here.apply_update(s, grads)),
            error_of(lambda s=state: here.apply_update(mine, Grads(dict(s.params)))),
            error_of(lambda s=state: here.save(s, into)),
        ]
    whole = plain.init(KEY)
    found += [
        error_of(lambda: plain.forward(mine.params, batch)),
        error_of(lambda: plain.forward_backward(mine, batch, ppo_clip())),
        error_of(lambda: plain.apply_update(mine, grads)),
        error_of(lambda: plain.apply_update(whole, grads)),
        error_of(lambda: plain.save(mine, into)),
        error_of(lambda: plain.weights(mine.params)),
    ]
    here.apply_update(mine, grads)
    plain.apply_update(whole, Grads(dict(whole.params)))
    return found


def refused_model(folder):
    with mock.patch.object(Skeleton, "layers", ()):
        return error_of(lambda: Fsdp(folder, optimizer()).init(KEY))


def placed(folder):
    """Gradients follow a state that lies elsewhere than the ranks compute; parts that lie apart are refused."""
    backend = Fsdp(folder, optimizer(), max_tokens=24)
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
    apart = backend.place(state, params="meta")
    refused = error_of(lambda: backend.apply_update(apart, grads))
    away = backend.place(state, params="meta", optimizer="meta")
    from verl_fn.backends.base import beside
    from verl_fn.backends.fsdp.sharding import moved

    return refused, {str(g._local_tensor.device) for g in beside(away, grads, moved).values()}


def full_disk(folder, into, calls):
    """Errors of the disk on one rank, at each of its writes: what every rank is told."""
    backend = Fsdp(folder, optimizer())
    state, found, real = backend.init(KEY), [], os.pwrite
    for allowed in range(calls):
        count = 0

        def pwrite(fd, data, at, allowed=allowed):
            nonlocal count
            count += 1
            if count > allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Short, as the system may be.
            return real(fd, data[: max(1, len(data) // 2)], at)

        os.pwrite = odd(real, pwrite)
        try:
            found.append(error_of(lambda: backend.save(state, into), OSError))
        finally:
            os.pwrite = real
    return found


def no_folder(folder, blocked):
    """A folder that cannot be made: only the first rank tries."""
    backend = Fsdp(folder, optimizer())
    state = backend.init(KEY)
    return error_of(lambda: backend.save(state, blocked), OSError)


def gathers_nothing(folder, into, options):
    """Save and restore with every way to a whole tensor closed; the elements that a rank reads and writes."""
    backend = Fsdp(folder, optimizer(), **options)
    state = backend.init(KEY)
    # Zeros would not be written.
    state = attrs.evolve(state, optimizer=tree.map_tensors(lambda t: t + 1, state.optimizer))

    def closed(*args, **kwargs):
        raise AssertionError("a whole tensor")

    ways = [
        (DTensor, "full_tensor"),
        (DTensor, "redistribute"),
        (dist, "all_gather_into_tensor"),
        (dist, "all_gather"),
    ]
    kept, written, real = [getattr(*way) for way in ways], 0, os.pwrite

    def counted(fd, data, at):
        nonlocal written
        written += len(data)
        return real(fd, data, at)

    os.pwrite = counted
    for owner, name in ways:
        setattr(owner, name, closed)
    try:
        backend.save(state, into)
        found = backend.restore(into)
    finally:
        os.pwrite = real
        for (owner, name), way in zip(ways, kept, strict=True):
            setattr(owner, name, way)
    for name, t in found.params.items():
        assert torch.equal(t._local_tensor, state.params[name]._local_tensor)
    return written


def restored(folder, source):
    backend = Fsdp(folder, optimizer())
    return error_of(lambda: backend.restore(source))


def out_of_memory(folder):
    """Of the second micro-batch, on the last rank alone: that one is told which it was."""
    backend = Fsdp(folder, optimizer(), max_tokens=24)
    state, batch = backend.init(KEY), tiny_batch()
    hidden_states, calls = type(backend._built()).hidden_states, 0

    def full(self, *args):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return hidden_states(self, *args)

    type(backend._built()).hidden_states = odd(hidden_states, full)
    try:
        return error_of(lambda: backend.forward_backward(state, batch, ppo_clip()), RuntimeError)
    finally:
        type(backend._built()).hidden_states = hidden_states


def refused_updates(folder):
    """Gradients that are not the parameters' are refused on every rank, and nothing is lost by it."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    name = next(iter(grads))
    wrong = [
        Grads({n: g for n, g in grads.items() if n != name}),
        Grads({n: g.full_tensor() if n == name else g for n, g in grads.items()}),
        Grads({n: g.bfloat16() if n == name else g for n, g in grads.items()}),
    ]
    says = [error_of(lambda g=g: backend.apply_update(state, g)) for g in wrong]
    says.append(error_of(lambda: Fsdp(folder, frozen(), max_tokens=24).apply_update(state, grads)))
    return says, [is_donated(value) for value in (state, grads, *wrong)]


def other_calls(folder):
    """Another state, other positions and other needs on the last rank."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    first, moved = backend.init(KEY), attrs.evolve(batch, positions=batch.positions + 1)
    grads, _ = backend.forward_backward(first, batch, ppo_clip())
    second, _ = backend.apply_update(first, grads, donate=False)
    return [
        error_of(lambda: backend.forward_backward(odd(first, second), batch, ppo_clip())),
        error_of(lambda: backend.forward(first.params, odd(batch, moved))),
        error_of(lambda: backend.forward(first.params, batch, odd(("logprobs",), ("entropy",)))),
    ]


class HoldsADict(SGD):
    def init(self, params):
        return {name: torch.zeros_like(p) for name, p in params.items()}


def own_optimizers(folder):
    """A momentum in a dict cannot be sharded; a norm of each parameter's own can be had through ``reduce``."""
    plain = sgd(lambda count: 0.1)
    held = HoldsADict(plain.schedule)
    says = error_of(lambda: Fsdp(folder, held).init(KEY))

    def normalized(grads, update):
        return Grads({n: g / (update.reduce(g.square().sum()).sqrt() + 1e-9) for n, g in grads.items()}), update

    by_layer, moved = chain(stateless(normalized), plain), []
    for backend in (Local(folder, by_layer), Fsdp(folder, by_layer)):
        state = backend.init(KEY)
        grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
        moved.append(whole_of(backend.apply_update(state, grads)[0].params))
    return says, max(float((moved[1][n] - t).abs().max()) for n, t in moved[0].items())


def loaded(folder, options):
    """Whether the shards of a folder are the rows that one process reads; the rows read and the wholes made here."""
    alone = {name: options[name] for name in ("head", "lora") if name in options}
    backend, rows, wholes = Fsdp(folder, optimizer(), **options), 0, 0
    read, make = tensor_file.Slices.rows, fsdp_backend.build

    def counted(self, name, start, end):
        nonlocal rows
        rows += end - start
        return read(self, name, start, end)

    def noted(*args, **kwargs):
        nonlocal wholes
        wholes += 1
        return make(*args, **kwargs)

    tensor_file.Slices.rows, fsdp_backend.build = counted, noted
    try:
        states = [backend.load_pretrained(), backend.init(KEY)]
    finally:
        tensor_file.Slices.rows, fsdp_backend.build = read, make
    local = Local(folder, optimizer(), **alone)
    same = [
        not [name for name, t in backend.named(state.params) if not torch.equal(t, wanted.params[name])]
        and state.params.trainable == wanted.params.trainable
        for state, wanted in zip(states, (local.load_pretrained(), local.init(KEY)), strict=True)
    ]
    return same, rows, wholes
