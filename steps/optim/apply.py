"""The one rule for applying an update."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import TypeVar

import attrs
import torch

from verl_fn.state import (
    Grads,
    Metrics,
    Params,
    Sum,
    TrainState,
    Weighted,
    divided,
    divisible,
    joined,
    owned,
    spare,
    sum_of_squares,
    taken,
)

from .leaves import tensors_of
from .transforms import Frozen, Optimizer, Reduce, Update

T = TypeVar("T")

# Groups of leaves in one update, on a GPU and on the CPU, which computes as it is called.
PARTS, PARTS_ON_CPU = 4, 1

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def check_update(optimizer: Optimizer, params: Params, grads: Grads) -> None:
    """Refuse gradients that are not these parameters', for kernels go through both without a look.

    Raises:
        ValueError: names, shapes or dtypes differ, or the optimizer is ``frozen()``.

    >>> from verl_fn.steps import sgd
    >>> check_update(sgd(0.1), Params({"w": torch.zeros(2)}), Grads({"w": torch.zeros(1)}))
    Traceback (most recent call last):
    ValueError: the gradient of w is float32 [1], and the parameter is float32 [2]
    """
    names = params.trained()
    if list(grads) != names:
        odd = sorted(set(grads) ^ set(names))
        raise ValueError(f"gradients and trainable parameters differ in their names or order: {odd[:5]}")
    if isinstance(optimizer, Frozen):
        optimizer.update(grads, None, params, Update.of(torch.zeros(()), 0))
    ours, theirs = tensors_of(grads, names), tensors_of(params, names)
    # No loop in Python, since a GPU may wait for this.
    if list(map(_SHAPE, ours)) != list(map(_SHAPE, theirs)) or list(map(_DTYPE, ours)) != list(map(_DTYPE, theirs)):
        kinds = ([f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in ts] for ts in (ours, theirs))
        name, mine, wanted = next(kind for kind in zip(names, *kinds, strict=True) if kind[1] != kind[2])
        raise ValueError(f"the gradient of {name} is {mine}, and the parameter is {wanted}")


@torch.no_grad()
def apply_update(
    optimizer: Optimizer,
    state: TrainState,
    grads: Grads,
    *,
    donate_inputs: bool = True,
    reduce: Reduce | None = None,
) -> tuple[TrainState, Metrics]:
    """The next state. State and gradients are donated unless ``donate_inputs`` is off.

    Where the gradient's norm is not finite the update is skipped: ``step`` advances, while parameters, the
    optimizer and the schedule's position stay, and the metric ``update_skipped`` is 1.

    Args:
        optimizer: made the ``optimizer`` tree of the state.
        reduce: adds a scalar up over the processes that hold the other shards.

    Returns:
        The state, and the metrics ``grad_norm`` (before clipping), ``lr``, ``update_skipped`` and
        ``perf/residency_copies`` (leaves copied since something else still held them).

    Raises:
        ValueError: the gradients are not those of the trainable parameters, by name, shape or dtype.
        DonatedError: an input was donated before.
    """
    # Launched first, so that a device computes while Python checks what is given and who holds it.
    norm = sum_of_squares(grads.leaves.values(), reduce).sqrt()
    # Before donation, which a refused call must not cost.
    check_update(optimizer, state.params, grads)
    update = Update.of(norm, state.scheduler, reduce)
    groups = _groups(optimizer, state, grads) if donate_inputs else []
    if donate_inputs:
        # Without a name for them here, their leaves belong to the boxes alone.
        boxes = [taken(state, "apply_update")], [taken(grads, "apply_update")]
    else:
        boxes = [spare(state)], [spare(grads)]
    befores, afters, copies, metrics = _updated(optimizer, boxes, update, groups, donate_inputs)
    new = joined(afters)
    new = attrs.evolve(new, scheduler=new.scheduler + 1, step=new.step + 1)
    # The only wait for the device, with nothing left to do behind it.
    seen = float(norm)
    finite = math.isfinite(seen)
    if not finite:
        # The kernels have skipped; the optimizer's count stays too.
        old = joined(befores)
        new = attrs.evolve(old, step=old.step + 1)
    reported: Metrics = {"grad_norm": Weighted(seen, 1.0), "perf/residency_copies": Sum(copies)}
    return new, reported | metrics | {"update_skipped": Sum(0 if finite else 1)}


def _groups(optimizer: Optimizer, state: TrainState, grads: Grads) -> list[list[str]]:
    """Splits the names into groups that are updated one after the other; one group where that gains nothing.

    A GPU then computes on the first group while Python looks at who holds the leaves of the next, which takes about
    as long as a kernel: together it would keep the GPU waiting.
    """
    names = list(grads)
    parts = PARTS if names and grads[names[0]].is_cuda else PARTS_ON_CPU
    whole = len(names) < 16 * parts or not optimizer.by_leaf or not divisible((state.params, state.optimizer), names)
    if parts == 1 or whole:
        return []
    size = -(-len(names) // parts)
    return [names[start : start + size] for start in range(0, len(names), size)]


def _updated(
    optimizer: Optimizer,
    boxes: tuple[list[TrainState], list[Grads]],
    update: Update,
    groups: list[list[str]],
    look: bool,
) -> tuple[list[TrainState], list[TrainState], int, Metrics]:
    """Runs the optimizer on each group of leaves, or on all together where there are no groups.

    Args:
        boxes: hold the state and the gradients, and nothing else does; they are emptied.
        look: whether leaves may be held elsewhere and have to be copied then.

    Returns:
        The parts of the state before and after, the number of copies, and the optimizer's metrics.
    """
    states, grads = boxes
    befores: list[TrainState] = []
    afters: list[TrainState] = []
    metrics: Metrics = {}
    # All gradients at once, since they may be views of one buffer, whose other views are gradients too.
    gradients, copies = owned(grads) if look else (grads.pop(), 0)
    parts = divided(gradients, groups) if groups else [gradients]
    if groups:
        states = divided(states.pop(), groups)
    del gradients
    for box, gradient in zip(_boxed(states), _drained(parts), strict=True):
        part, state_copies = owned(box) if look else (box.pop(), 0)
        copies += state_copies
        params, opt_state, metrics = optimizer.update(gradient, part.optimizer, part.params, update)
        # Fused kernels don't bump version counters, and copies of these tensors may be cached somewhere.
        torch.autograd.graph.increment_version([params[name] for name in gradient])
        befores.append(part)
        afters.append(attrs.evolve(part, params=params, optimizer=opt_state))
    return befores, afters, copies, metrics


def _boxed(values: list[T]) -> Iterator[list[T]]:
    """Yields the values, first to last, each in a list of its own that alone holds it."""
    values.reverse()
    while values:
        yield [values.pop()]


def _drained(values: list[T]) -> Iterator[T]:
    """Yields the values, first to last, and lets each go."""
    values.reverse()
    while values:
        yield values.pop()
