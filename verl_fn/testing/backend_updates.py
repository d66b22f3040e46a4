"""Laws of updates, a part of ``check_backend``: an update is what the optimizer computes, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import attrs
from torch import Tensor

from verl_fn.backends.protocol import Handle
from verl_fn.state import Params, TrainState, tree
from verl_fn.steps import Optimizer, apply_update

from .backend_case import BackendCase, scaled
from .violation import require_close

T = TypeVar("T")
LAW = "Update"
LATER = 100
TOLERANCE = 1e-2


def check_updates(case: BackendCase, state: Handle[TrainState], optimizer: Optimizer) -> None:
    """Checks updates against ``steps.apply_update`` with the same optimizer, on whole tensors.

    A small and a large gradient show clipping, and a later position shows the schedule.

    Raises:
        LawViolation: Update is broken.
    """
    grads, _ = case.gradients(state)
    norm = float(case.read(grads).global_norm())
    later = case.made(partial(_at_position, position=LATER), state)
    for what, start, factor in (
        ("a gradient of norm 0.001", state, 1e-3 / norm),
        ("a gradient of norm 1000", state, 1e3 / norm),
        (f"position {LATER} of the schedule", later, 1.0),
    ):
        gradient = case.made(scaled(factor), grads)
        new = _on_cpu(case.read(case.update(start, gradient, donate=False)[0]))
        old = _on_cpu(case.read(start))
        expected, _ = apply_update(optimizer, old, _on_cpu(case.read(gradient)), donate_inputs=False)
        cause = (
            "an update that ascends, clips by another norm, or ignores the schedule's position or a setting of the "
            "optimizer"
        )
        require_close(
            LAW,
            f"with {what}, the change of the parameters",
            changes(old.params, expected.params),
            changes(old.params, new.params),
            cause,
            tolerance=TOLERANCE,
            floor=rounding(old.params) / TOLERANCE,
        )
        state_of = f"with {what}, the optimizer's new state"
        require_close(LAW, state_of, expected.optimizer, new.optimizer, cause, tolerance=TOLERANCE)


def changes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns by how much an update changed each parameter."""
    return {name: new[name].double() - t.double() for name, t in old.items()}


def rounding(params: Params) -> float:
    """Returns how far rounding to float32 moves the largest parameter, with a margin."""
    return 1e-6 * max(float(t.abs().max()) for t in params.values())


def _at_position(state: TrainState, position: int) -> TrainState:
    return attrs.evolve(state, scheduler=position)


def _on_cpu(value: T) -> T:
    return tree.map_tensors(lambda t: t.cpu(), value)
