"""The law Layout, a part of ``check_backend``: two backends of one model share states and compute the same."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from verl_fn.backends.protocol import Handle
from verl_fn.state import Grads, TrainState

from .backend_case import BackendCase, require_agreement, scaled
from .backend_updates import changes
from .violation import require, require_close, require_equal, shared_folder


def check_layouts(case: BackendCase, others: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that two backends restore each other's states and compute the same.

    Raises:
        LawViolation: Layout is broken.
    """
    with shared_folder() as folder:
        there, back = Path(folder) / "there", Path(folder) / "back"
        case.backend.save(state, there)
        moved = others.backend.restore(there)
        others.backend.save(moved, back)
        returned = case.backend.restore(back)
    cause = "names, an order or a padding of the executor's own in the file"
    named = [_named(one, one_state) for one, one_state in ((case, state), (others, moved))]
    require_equal("Layout", "a parameter in the other layout", named[0], named[1], cause)
    came_back = "the state, saved by the other backend and restored,"
    require_equal("Layout", came_back, case.read(state), case.read(returned), cause)
    rounding = (
        "a mapping that permutes or transposes wrongly, a rank whose gradient is lost, or a tolerance too tight"
    )
    require_close(
        "Layout",
        "forward on the other backend",
        case.outputs(state.params).by_name,
        others.outputs(moved.params).by_name,
        rounding,
        tolerance=case.tolerance,
    )
    results, other_results = case.gradients(state), others.gradients(moved)
    require_agreement(
        case,
        "Layout",
        "forward_backward on the other backend:",
        case.read(results),
        others.read(other_results),
        rounding,
    )
    norm = float(case.read(results[0]).global_norm())
    # Gradients of other norms are clipped, or are not.
    for factor in (1.0, 1e-3 / norm, 1e3 / norm):
        _updates(
            (case, others),
            (state, moved),
            (case.made(scaled(factor), results[0]), others.made(scaled(factor), other_results[0])),
        )


def _updates(
    cases: tuple[BackendCase, BackendCase],
    states: tuple[Handle[TrainState], Handle[TrainState]],
    grads: tuple[Handle[Grads], Handle[Grads]],
) -> None:
    """Compares the update of each backend with its own gradients."""
    updates = [
        case.update(state, gradient, donate=False) for case, state, gradient in zip(cases, states, grads, strict=True)
    ]
    norms = [reported["grad_norm"].value for _, reported in updates]
    require_close(
        "Layout",
        "the norm that apply_update reports on the other backend",
        norms[0],
        norms[1],
        "a norm of only one rank's shards, or of replicated ones twice",
        tolerance=cases[0].tolerance,
    )
    one, other = (
        changes(_named(case, state), _named(case, new))
        for case, state, (new, _) in zip(cases, states, updates, strict=True)
    )
    gap = sum(float((other[name] - change).square().sum()) for name, change in one.items()) ** 0.5
    size = sum(float(change.square().sum()) for change in one.values()) ** 0.5
    # Adam makes large updates of gradients that are only rounding, so single elements are not compared.
    allowed = 0.1 + 10.0 * cases[0].tolerance
    require(
        gap <= allowed * size,
        "Layout",
        f"the update on the other backend differs by a norm of {gap:.3g} where its own is {size:.3g}",
        "an update that ascends, clips by another norm, or has another learning rate",
    )


def _named(case: BackendCase, state: Handle[TrainState]) -> dict[str, Tensor]:
    """Returns the whole parameters of a state, on the CPU."""
    return {name: t.cpu() for name, t in dict(case.get(case.backend.named(state.params))).items()}
