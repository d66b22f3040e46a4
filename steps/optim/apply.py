"""The one rule for applying an update."""

from __future__ import annotations

import math
import operator

import attrs
import torch

from verl_fn.state import Grads, Metrics, Params, Sum, TrainState, Weighted, donate, spare, sum_of_squares

from .leaves import tensors_of
from .transforms import Frozen, Optimizer, Reduce, Update

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
    copies = 0
    if donate_inputs:
        state, state_copies = donate(state, "apply_update")
        grads, grad_copies = donate(grads, "apply_update")
        copies = state_copies + grad_copies
    else:
        state, grads = spare(state), spare(grads)
    update = Update.of(norm, state.scheduler, reduce)
    params, opt_state, metrics = optimizer.update(grads, state.optimizer, state.params, update)
    # Fused kernels don't bump version counters, and copies of these tensors may be cached somewhere.
    torch.autograd.graph.increment_version([params[name] for name in grads])
    reported: Metrics = {"grad_norm": Weighted(float(norm), 1.0), "perf/residency_copies": Sum(copies)}
    if not math.isfinite(float(norm)):
        # The kernels have skipped; the optimizer's count stays too.
        new = attrs.evolve(state, step=state.step + 1)
        return new, reported | metrics | {"update_skipped": Sum(1)}
    new = attrs.evolve(state, params=params, optimizer=opt_state, scheduler=state.scheduler + 1, step=state.step + 1)
    return new, reported | metrics | {"update_skipped": Sum(0)}
