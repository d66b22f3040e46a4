"""The laws of a training backend: ``check_backend``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import Freed, Handle, TrainBackend
from verl_fn.state import PER_ROW, Batch, Grads, Key, Params, TrainState, tree
from verl_fn.steps import Loss, ppo_clip, total_loss

from .backend_case import BackendCase, require_agreement
from .backend_splits import check_groups, check_splits
from .backend_states import check_donation, check_persistence, check_restore, check_zero
from .builders import tiny_batch
from .violation import LawViolation, repeatable, require, require_close, require_equal, shared_folder, untouched


def check_backend(
    backend: TrainBackend,
    other: TrainBackend | None = None,
    *,
    loss: Loss | None = None,
    batch: Batch | None = None,
    tolerance: float = 1e-4,
    key: Key | None = None,
    get: Callable[[Any], Any] = get_here,
) -> None:
    """Checks a training backend against the laws.

    The backend needs an optimizer without weight decay whose learning rate is above 0 from the first update on, and a
    token budget that splits the batch (``tiny_batch()`` has about 50 tokens, and its longest row at most 16).

    * Signature, Purity, Split invariance, Persistence, Donation, Zero and Restore check the backend by itself.
    * Derivative, if the backend has ``loss_fn``: the ``torch.func`` gradient of that function is the gradient of
      ``forward_backward``, and so is its derivative along that gradient in forward mode.
    * Layout, with ``other``, which has the same model on another backend, layout or number of ranks: outputs,
      gradients and metrics agree, and each backend restores what the other one saved.

    Args:
        backend: the backend under test.
        other: a second backend for the same model.
        loss: the loss that is differentiated, by default ``ppo_clip()``. For a critic, pass ``value_clip()``.
        batch: by default ``tiny_batch()``, whose token ids are below 8.
        tolerance: how far splits and layouts may differ, relative to the largest value of each tensor. For bf16, pass
            about 0.05.
        key: other keys give other states and splits.
        get: returns the value behind a reference, for a backend whose states are handles: ``workers.get``. The check
            reads the values behind handles with the backend's ``map``.

    Raises:
        LawViolation: a law is broken.

    Example:
        >>> from verl_fn.backends.mock.train import Mock
        >>> from verl_fn.steps import adamw, constant
        >>> check_backend(Mock(8, adamw(constant(0.01), weight_decay=0.0), max_tokens=24))
        >>> check_backend(Mock(8, adamw(constant(0.01), weight_decay=0.1), max_tokens=24))
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Zero: zero gradients with a new optimizer state: ... ['logits'] ...
    """
    batch = tiny_batch() if batch is None else batch
    case = BackendCase(backend, loss or ppo_clip(), batch, tolerance, key or Key.from_seed(0), get)
    try:
        _check_laws(case, None if other is None else attrs.evolve(case, backend=other))
    except Freed as error:
        cause = "a value that is freed while a handle to it exists"
        raise LawViolation("Persistence", f"the value behind a handle is gone: {error}", cause) from error


def _check_laws(case: BackendCase, other: BackendCase | None) -> None:
    _purity(case)
    first, second = case.trained("first"), case.trained("second")
    _signature(case, first)
    check_persistence(case, first, second)
    check_splits(case, first)
    check_groups(case, first)
    _derivative(case, first)
    check_donation(case, first)
    check_zero(case, first)
    check_restore(case, first)
    if other is not None:
        _layout(case, other, first)


def _signature(case: BackendCase, state: Handle[TrainState]) -> None:
    outputs = case.outputs(state.params)
    names, silent = set(outputs.by_name), case.batch["response_mask"] == 0
    tokens, rows = case.batch.num_tokens, len(case.batch)
    require(
        names == set(case.loss.needs),
        "Signature",
        f"forward gives {sorted(names)} where {sorted(case.loss.needs)} are needed",
        "an option that is ignored",
    )
    for name, t in outputs.by_name.items():
        require(
            t.shape == ((rows if name in PER_ROW else tokens),) and t.dtype == torch.float32,
            "Signature",
            f"{name} is {t.dtype}{tuple(t.shape)} where the batch has {tokens} tokens in {rows} rows",
            "compute dtype that was not cast to float32, or targets that were not spread over the batch",
        )
        if name in PER_ROW:
            continue
        top = float(torch.where(silent, t, 0.0).abs().max())
        require(top == 0.0, "Signature", f"{name} reaches {top:.3g} where response_mask is 0", "a missing mask")
    moved = case.read(case.backend.place(state, params="cpu", optimizer="cpu"))
    here = tree.map_tensors(lambda t: t.cpu(), case.read(state))
    require_equal("Signature", "a state placed on the CPU", here, moved, "a place() that drops or casts something")
    named = case.get(case.backend.map(list, case.gradients(state)[0]))
    trained = case.get(case.backend.map(_trained, state))
    require(
        named == trained,
        "Signature",
        f"gradients are named {sorted(set(named) ^ set(trained))[:5]} unlike trained parameters",
        "an executor's own names instead of canonical ones",
    )


def _trained(state: TrainState) -> list[str]:
    return state.params.trained()


def _purity(case: BackendCase) -> None:
    """Checks repeated calls with a new state and batch, since a change in place may happen in the first call only."""
    backend, batch, read = case.backend, case.batch, case.read
    state, again = backend.init(case.key), backend.init(case.key)
    cause = "a global random generator instead of the key"
    require_equal("Purity", "init with the same key", read(state), read(again), cause)
    outputs = repeatable("Purity", "forward", lambda: case.outputs(state.params), read, state=state, batch=batch)
    grads, reported = repeatable(
        "Purity", "forward_backward", lambda: case.gradients(again), read, state=again, batch=batch
    )
    require_close(
        "Purity",
        "the loss computed from forward's outputs, against forward_backward's,",
        float(total_loss(case.loss, outputs, batch)[0]),
        reported["loss"].value,
        "parameters that one of the two takes from elsewhere, or outputs in another order",
        tolerance=case.tolerance,
        floor=1.0,
    )
    repeatable(
        "Purity",
        "apply_update with donate=False",
        lambda: case.update(state, grads, donate=False),
        read,
        state=state,
        grads=grads,
    )


def _derivative(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks the gradients against those of the loss as a pure function of the parameters."""
    if not hasattr(case.backend, "loss_fn"):
        return
    fn = case.backend.loss_fn(case.batch, case.loss)
    grads, reported = case.gradients(state)
    params = cast(Params, state.params)  # A backend with loss_fn has its parameters in this process.
    with untouched("Purity", "loss_fn", params=params):
        derived, of_fn = torch.func.grad(fn, has_aux=True)(params)
    trained = Grads({name: derived[name] for name in params.trained()})
    cause = "a gradient that is scaled, transposed, of the other sign, or of other parameters than those given"
    require_agreement(
        # loss_fn may compute log-probs by other operations, whose rounding differs more than that of splits.
        attrs.evolve(case, tolerance=3 * case.tolerance),
        "Derivative",
        "forward_backward against torch.func.grad of loss_fn:",
        (trained, of_fn),
        (case.read(grads), reported),
        cause,
    )
    along = attrs.evolve(
        params, leaves={n: trained[n] if n in trained else torch.zeros_like(t) for n, t in params.items()}
    )
    slope = torch.func.jvp(lambda point: fn(point)[0], (params,), (along,))[1]
    require_close(
        "Derivative",
        "the derivative of loss_fn along its gradient, in forward mode,",
        float(trained.global_norm()) ** 2,
        float(slope),
        "an autograd function whose jvp is not its derivative",
        tolerance=2 * case.tolerance,
    )


def _layout(case: BackendCase, others: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that two backends restore each other's states and compute the same."""
    with shared_folder() as folder:
        there, back = Path(folder) / "there", Path(folder) / "back"
        case.backend.save(state, there)
        moved = others.backend.restore(there)
        others.backend.save(moved, back)
        returned = case.backend.restore(back)
    cause = "names, an order or a padding of the executor's own in the file"
    named = [
        {name: t.cpu() for name, t in dict(one.get(one.backend.named(one_state.params))).items()}
        for one, one_state in ((case, state), (others, moved))
    ]
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
    norms = [
        one.update(one_state, grads, donate=False)[1]["grad_norm"].value
        for one, one_state, (grads, _) in ((case, state, results), (others, moved, other_results))
    ]
    require_close(
        "Layout",
        "the norm that apply_update reports on the other backend",
        norms[0],
        norms[1],
        "a norm of one rank's shards alone, or of replicated ones twice",
        tolerance=case.tolerance,
    )
