"""Applies an optimizer to a training state, with donation and skipped updates."""

from __future__ import annotations

import math
import operator

import attrs
import torch

from verl_fn.state import (
    Grads,
    Metrics,
    Sum,
    TrainState,
    Weighted,
    divided,
    divisible,
    isolated,
    joined,
    owned,
    owned_parts,
    refuse_derivatives,
    spare,
    sum_of_squares,
    taken,
)
from verl_fn.state.guards import expect_update

from .transforms import Optimizer, Reduce, Update, check_device, tensors_of

# The number of leaves in an update's first group: small, because the device is idle until its kernel starts.
# Each group has twice as many as the one before. On the CPU kernels run synchronously, so groups would save no time.
FIRST_GROUP, FIRST_GROUP_ON_CPU = 8, 0

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def check_update(optimizer: Optimizer, state: TrainState, grads: Grads) -> None:
    """Checks all that an update would refuse, before anything is donated; the kernels check nothing.

    Args:
        optimizer: the optimizer that will be applied.
        state: the training state.
        grads: the gradients.

    Raises:
        ArgumentError: the arguments are not a ``TrainState`` and ``Grads``.
        ValueError: names, shapes, dtypes or devices of gradients and trained parameters differ, the optimizer did not
            make the state's optimizer tree, or the optimizer is ``frozen()``.

    Example:
        >>> from verl_fn.state import Key, Params
        >>> from verl_fn.steps import sgd
        >>> params = Params({"w": torch.zeros(2)})
        >>> state = TrainState(params, sgd(0.1).init(params), 0, Key.from_seed(0), 0)
        >>> check_update(sgd(0.1), state, Grads({"w": torch.zeros(1)}))
        Traceback (most recent call last):
        ValueError: the gradient of w is float32 [1], and the parameter is float32 [2]
    """
    expect_update(state, grads)
    params = state.params
    names = params.trained()
    if list(grads) != names:
        different = sorted(set(grads) ^ set(names))
        raise ValueError(f"gradients and trainable parameters differ in their names or order: {different[:5]}")
    optimizer.check(params, state.optimizer, state.scheduler)
    gradients, weights = tensors_of(grads, names), tensors_of(params, names)
    # A GPU may be idle until this check ends, so the comparison avoids a loop in Python.
    same_shapes = list(map(_SHAPE, gradients)) == list(map(_SHAPE, weights))
    if not same_shapes or list(map(_DTYPE, gradients)) != list(map(_DTYPE, weights)):
        kinds = zip(names, map(_kind, gradients), map(_kind, weights), strict=True)
        name, gradient_kind, weight_kind = next(row for row in kinds if row[1] != row[2])
        note = "; what is trained is float32, so make the state with .float() of its parameters"
        cast = note if params[name].dtype != torch.float32 else ""
        raise ValueError(f"the gradient of {name} is {gradient_kind}, and the parameter is {weight_kind}{cast}")
    check_device("the gradients lie", gradients, weights)
    # Values are made whole in one mode, so the first tensor of each tells.
    if any(t.is_inference() for t in (*gradients[:1], *weights[:1])):
        raise ValueError(
            "the gradients or the parameters were made in inference mode and cannot be updated later; make "
            "them outside of it, or copy them there with snapshot(value)"
        )


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


@isolated()
def apply_update(
    optimizer: Optimizer,
    state: TrainState,
    grads: Grads,
    *,
    donate_inputs: bool = True,
    reduce: Reduce | None = None,
    total: Reduce | None = None,
) -> tuple[TrainState, Metrics]:
    """Returns the state after an update with these gradients.

    If the gradient's norm is not finite, the update is skipped: ``step`` advances, but the parameters, the optimizer
    state and the position of the schedule stay the same, and the metric ``update_skipped`` is 1.

    Args:
        optimizer: the optimizer; its ``init`` made ``state.optimizer``.
        state: the training state.
        grads: the gradients of the trained parameters.
        donate_inputs: whether state and gradients are donated, so that the result reuses their buffers.
        reduce: adds a scalar over the processes that hold the other shards of the same tensors.
        total: adds a scalar over the processes that hold any other part of the model; by default ``reduce``.

    Returns:
        The next state and the metrics: ``grad_norm`` (before clipping), ``lr``, ``update_skipped`` and
        ``perf/residency_copies`` (the number of leaves that were copied because something else references them).

    Raises:
        ArgumentError, ValueError: as ``check_update``; nothing was donated then.
        DonatedError: the state or the gradients were donated before.
        NotDifferentiable: a derivative of this function was taken.
    """
    expect_update(state, grads)
    refuse_derivatives("apply_update", state, grads)
    # The norm is launched first, so that a device computes it while Python checks the arguments.
    norm = sum_of_squares(grads.leaves.values(), total or reduce).sqrt()
    # If the check fails, the arguments must not have been donated.
    check_update(optimizer, state, grads)
    update = Update.of(norm, state.scheduler, reduce)
    groups = _groups(optimizer, state, grads) if donate_inputs else []
    if donate_inputs:
        # The lists are the only references to the moved fields; a local variable would force copies.
        boxes = [taken(state, "apply_update")], [taken(grads, "apply_update")]
    else:
        boxes = [spare(state)], [spare(grads)]
    befores, afters, copies, metrics = _updated(optimizer, boxes, update, groups, donate_inputs)
    new = joined(afters)
    new = attrs.evolve(new, scheduler=new.scheduler + 1, step=new.step + 1)
    # Reading the norm is the only wait for the device, so it comes after all kernels are launched.
    grad_norm = float(norm)
    finite = math.isfinite(grad_norm)
    if not finite:
        # The kernels wrote nothing. The old state also has the optimizer's old count.
        old = joined(befores)
        new = attrs.evolve(old, step=old.step + 1)
    reported: Metrics = {"grad_norm": Weighted(grad_norm, 1.0), "perf/residency_copies": Sum(copies)}
    return new, reported | metrics | {"update_skipped": Sum(0 if finite else 1)}


def _groups(optimizer: Optimizer, state: TrainState, grads: Grads) -> list[list[str]]:
    """Splits the names into groups that are updated one after the other, or returns no groups if that saves no time.

    Checking which leaves must be copied takes Python about as long as a kernel takes. With groups, a GPU computes on
    one group while Python checks the next one.
    """
    names = list(grads)
    size = FIRST_GROUP if names and grads[names[0]].is_cuda else FIRST_GROUP_ON_CPU
    if not size or not optimizer.by_leaf or not divisible((state.params, state.optimizer), names):
        return []
    groups: list[list[str]] = []
    while names:
        groups.append(names[:size])
        names, size = names[size:], 2 * size
    return groups


def _updated(
    optimizer: Optimizer,
    boxes: tuple[list[TrainState], list[Grads]],
    update: Update,
    groups: list[list[str]],
    donate: bool,
) -> tuple[list[TrainState], list[TrainState], int, Metrics]:
    """Runs the optimizer on each group of leaves, or on all leaves together if there are no groups.

    Args:
        optimizer: the optimizer.
        boxes: a list with the state and a list with the gradients; they have the only references to both. Both
            lists are emptied.
        update: describes the update.
        groups: the names of each group.
        donate: whether the values were donated, so that leaves with other references have to be copied.

    Returns:
        The parts of the state before and after the update, the number of copies, and the optimizer's metrics.
    """
    states, grads = boxes
    befores: list[TrainState] = []
    afters: list[TrainState] = []
    metrics: Metrics = {}
    copies = 0
    parts = divided(states, groups) if groups else iter([[states.pop()]])
    gradients = owned_parts(grads, groups or [list(grads[0])]) if donate else iter([(grads.pop(), 0)])
    for box, (gradient, gradient_copies) in zip(parts, gradients, strict=True):
        part, part_copies = owned(box) if donate else (box.pop(), 0)
        copies += gradient_copies + part_copies
        params, opt_state, metrics = optimizer.update(gradient, part.optimizer, part.params, update)
        # Fused kernels don't bump version counters, but caches of these tensors compare them.
        torch.autograd.graph.increment_version([params[name] for name in gradient])
        befores.append(part)
        afters.append(attrs.evolve(part, params=params, optimizer=opt_state))
    return befores, afters, copies, metrics
