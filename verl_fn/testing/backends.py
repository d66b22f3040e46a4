"""The laws of a training backend: ``check_backend``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import Freed, Handle, TrainBackend
from verl_fn.state import PER_ROW, Batch, Key, TrainState, tree
from verl_fn.steps import Loss, Optimizer, ppo_clip, total_loss

from .backend_case import BackendCase
from .backend_states import check_donation, check_persistence, check_restore, check_threads, check_zero
from .backend_values import check_gradients, check_groups, check_layouts, check_outputs, check_splits, check_updates
from .builders import tiny_batch
from .violation import LawViolation, repeatable, require, require_close, require_equal


def check_backend(
    backend: TrainBackend,
    other: TrainBackend | None = None,
    *,
    loss: Loss | None = None,
    batch: Batch | None = None,
    optimizer: Optimizer | None = None,
    tolerance: float = 1e-4,
    key: Key | None = None,
    get: Callable[[Any], Any] = get_here,
) -> None:
    """Checks a training backend against the laws.

    The backend needs an optimizer without weight decay whose learning rate is above 0 from the first update on, and a
    token budget that splits the batch (``tiny_batch()`` has about 50 tokens, and its longest row at most 16).

    * Signature, Purity, Split invariance, Persistence, Donation, Zero and Restore check the backend by itself. In one
      process Purity includes calls from two threads.
    * Outputs: outputs depend on the tokens before them, log-probs on the token too, and none on later ones.
      Logits are divided by the row's ``temperature``.
    * Derivative: the gradient predicts how ``forward``'s outputs change when parameters do. If the backend has
      ``loss_fn``, the ``torch.func`` gradient of that function is the gradient of ``forward_backward``, and so is its
      derivative along that gradient in forward mode.
    * Update, if the optimizer is known: updates equal the updates of ``steps.apply_update``.
    * Layout, with ``other`` for the same model on another backend, layout or number of ranks: outputs,
      gradients, metrics and updates agree, and each backend restores what the other one saved.

    Args:
        backend: the backend under test.
        other: a second backend for the same model.
        loss: the loss that is differentiated, by default ``ppo_clip()``. For a critic, pass ``value_clip()``.
        batch: by default ``tiny_batch()``, whose token ids are below 8.
        optimizer: the optimizer of the backend, by default its attribute ``optimizer``, if it has one.
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
    optimizer = getattr(backend, "optimizer", None) if optimizer is None else optimizer
    try:
        _check_laws(case, None if other is None else attrs.evolve(case, backend=other), optimizer)
    except Freed as error:
        cause = "a value that is freed while a handle to it exists"
        raise LawViolation("Persistence", f"the value behind a handle is gone: {error}", cause) from error


def _check_laws(case: BackendCase, other: BackendCase | None, optimizer: Optimizer | None) -> None:
    _purity(case)
    first, second = case.trained("first"), case.trained("second")
    _signature(case, first)
    check_persistence(case, first, second)
    check_threads(case, first, second)
    check_splits(case, first)
    check_groups(case, first)
    check_outputs(case, first)
    check_gradients(case, first)
    check_donation(case, first)
    check_zero(case, first)
    if optimizer is not None:
        check_updates(case, first, optimizer)
    check_restore(case, first)
    if other is not None:
        check_layouts(case, other, first)


def _signature(case: BackendCase, state: Handle[TrainState]) -> None:
    outputs = case.outputs(state.params)
    names, silent = set(outputs.by_name), case.batch["response_mask"] == 0
    tokens, rows = case.batch.num_tokens, len(case.batch)
    require(
        names == set(case.loss.needs),
        "Signature",
        f"forward gives {sorted(names)}, but {sorted(case.loss.needs)} are needed",
        "an option that is ignored",
    )
    for name, t in outputs.by_name.items():
        require(
            t.shape == ((rows if name in PER_ROW else tokens),) and t.dtype == torch.float32,
            "Signature",
            f"{name} is {t.dtype}{tuple(t.shape)}, but the batch has {tokens} tokens in {rows} rows",
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
