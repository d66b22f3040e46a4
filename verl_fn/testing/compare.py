"""Comparisons with a formula that a user writes, since the laws do not notice a wrong one, and of two backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import Handle, TrainBackend
from verl_fn.state import Batch, Key, Split, TokenOutputs, TrainState, groups_of
from verl_fn.steps import Loss
from verl_fn.steps.losses.contract import WEIGHTS

from .backend_case import BackendCase
from .builders import in_float64, tiny_batch, tiny_outputs
from .losses import apart, carrying
from .violation import require_close, save_once, shared_folder

LAW = "Reference"
DRAWS = 8


def compare_loss(
    loss: Loss,
    reference: Callable[[TokenOutputs, Batch], Tensor],
    make_batch: Callable[[Key], Batch] = tiny_batch,
    *,
    tolerance: float = 1e-9,
    key: Key | None = None,
) -> None:
    """Compares a loss with a plain formula, in float64, by values and gradients on random ragged batches.

    Only tokens and rows with a weight are compared. The gradient is taken of the weighted sum with respect to every
    output.

    Args:
        loss: the loss; all its terms have the same level.
        reference: ``(outputs, row) -> values``. It gets a batch of one row, or of the rows that the loss keeps
            together, so the fields are plain vectors of that row. It returns what the loss returns without metrics.
        make_batch: makes a batch from a key, with the fields that the loss reads and with weights.
        tolerance: the largest relative difference.
        key: other keys give other batches and outputs.

    Raises:
        LawViolation: the values or the gradients differ.

    Example:
        >>> from verl_fn.steps import loss
        >>> @loss(needs=["logprobs"])
        ... def ascends(outputs, batch):
        ...     return batch["advantages"] * outputs.logprobs, {}
        >>> compare_loss(ascends, lambda outputs, row: row["advantages"] * outputs.logprobs)
        >>> compare_loss(ascends, lambda outputs, row: -row["advantages"] * outputs.logprobs)
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Reference: on batch 0 the loss (most at token 7 of row 2) differs ...
    """
    if len(loss.levels) > 1:
        raise ValueError("this loss has terms of both levels, token and row; compare them one at a time")
    key = key or Key.from_seed(0)
    (level,) = loss.levels
    for number in range(DRAWS):
        batch = in_float64(make_batch(key.fold_in(number)))
        outputs = in_float64(tiny_outputs(batch, loss.needs, key.fold_in(number)))
        split = Split(batch, tuple(torch.tensor(rows) for rows in groups_of(batch, loss.together)))
        carried = carrying(batch, outputs)
        parts = [_evaluated(reference, *apart(carried.take(rows), outputs), WEIGHTS[level]) for rows in split.rows]
        join = split.join if level == "token" else split.join_rows
        wanted = join([values for values, _ in parts])
        expected = {
            "values": wanted,
            "gradient": split.join_outputs([gradient for _, gradient in parts]).by_name,
        }
        values, gradient = _evaluated(lambda *args: loss(*args)[0], outputs, batch, WEIGHTS[level])
        require_close(
            LAW,
            f"on batch {number} the loss{_most_at(batch, level, wanted, values, tolerance)}",
            expected,
            {"values": values, "gradient": gradient.by_name},
            "another sign, a shift by one token, rows that are mixed, a constant in float32 (both are computed in "
            "float64), or a wrong formula in one of the two",
            tolerance=tolerance,
        )


def _evaluated(
    fn: Callable[[TokenOutputs, Batch], Tensor], outputs: TokenOutputs, batch: Batch, weight: str
) -> tuple[Tensor, TokenOutputs]:
    """Returns the values, 0 where their weight is 0, and the gradient of their weighted sum."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in outputs.by_name.items()}
    values = fn(TokenOutputs(leaves), batch)
    weights = batch[weight]
    if values.shape != weights.shape:
        raise ValueError(
            f"the function returns values of shape {tuple(values.shape)} for a batch of {len(batch)} rows and "
            f"{batch.num_tokens} tokens; {weight} has shape {tuple(weights.shape)}"
        )
    live = torch.where(weights != 0, values, 0.0)
    total = (weights * live).sum()
    wrt = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return live.detach(), TokenOutputs(dict(zip(leaves, wrt, strict=True)))


def _most_at(batch: Batch, level: str, expected: Tensor, actual: Tensor, tolerance: float) -> str:
    """Names the row, and the token in it, where two losses differ most; nothing if only their gradients differ."""
    gaps = (expected - actual).abs()
    if not len(gaps) or gaps.max() <= tolerance * expected.abs().max():
        return ""
    worst = int(gaps.argmax())
    if level == "row":
        return f" (most in row {worst})"
    row = int((batch.cu_seqlens <= worst).sum()) - 1
    return f" (most at token {int(batch.positions[worst])} of row {row})"


def compare_advantage(
    estimator: Callable[[Batch], Batch],
    reference: Callable[[Batch], Mapping[str, Tensor]],
    make_batch: Callable[[Key], Batch] = tiny_batch,
    *,
    tolerance: float = 1e-9,
    key: Key | None = None,
) -> None:
    """Compares an estimator with a plain formula, in float64, on random ragged batches.

    Only tokens with ``response_mask`` are compared.

    Args:
        estimator: batch -> batch.
        reference: returns the fields to compare, ``advantages``, ``returns`` or both, for a whole batch.
        make_batch: makes a batch from a key, with the fields that the estimator reads.
        tolerance: the largest relative difference.
        key: other keys give other batches.

    Raises:
        LawViolation: a field differs.

    Example:
        >>> from verl_fn.steps import rloo
        >>> def leave_one_out(batch):
        ...     masks, groups = batch.rows("response_mask"), batch["group"].tolist()
        ...     scores = [float((r * m).sum()) for r, m in zip(batch.rows("token_level_rewards"), masks)]
        ...     advantages = []
        ...     for row, group in enumerate(groups):
        ...         same = [i for i, g in enumerate(groups) if g == group and i != row and masks[i].any()]
        ...         baseline = sum(scores[i] for i in same) / len(same) if same else scores[row]
        ...         advantages.append(scores[row] - baseline)
        ...     return {"advantages": batch.spread(torch.tensor(advantages).double())}
        >>> compare_advantage(rloo, leave_one_out, tolerance=1e-5)
    """
    key = key or Key.from_seed(0)
    for number in range(DRAWS):
        batch = in_float64(make_batch(key.fold_in(number)))
        fields, new = reference(batch), estimator(batch)
        if unknown := sorted(set(fields) - {"advantages", "returns"}):
            raise ValueError(f"the reference returns {unknown}; an estimator writes advantages and returns")
        mask = batch["response_mask"] != 0
        expected, actual = (
            {name: torch.where(mask, one[name].double(), 0.0) for name in fields} for one in (fields, new)
        )
        cause = "another sign, a baseline of other rows, a sum over later or earlier tokens, or a wrong formula"
        require_close(LAW, f"on batch {number} the estimator", expected, actual, cause, tolerance=tolerance)


@attrs.frozen
class FirstStep:
    """What two backends make of one state and one batch: a pair holds the value of each backend.

    Attributes:
        loss: the loss.
        grad_norm: the norm of all gradients.
        gradients: by parameter, the norm of the difference of both gradients over the norm of the first one.
    """

    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    gradients: Mapping[str, float]

    @property
    def worst(self) -> str:
        """The name of the parameter whose gradients differ most; NaN is more than any number."""
        return max(self.gradients, key=lambda name: (math.isnan(self.gradients[name]), self.gradients[name]))

    def __str__(self) -> str:
        """Returns a table of three lines.

        Example:
            >>> print(FirstStep((1.0, 1.5), (2.0, 2.0), {"a": 0.25, "b": 0.0}))
            loss                   1             1.5   differ by 0.5
            grad norm              2               2   differ by 0
            worst gradient: a, differs by 0.25 of its norm
        """
        lines = [
            f"{name:<10}{pair[0]:>14.6g}{pair[1]:>16.6g}   differ by {abs(pair[0] - pair[1]):.3g}"
            for name, pair in (("loss", self.loss), ("grad norm", self.grad_norm))
        ]
        most = self.gradients[self.worst]
        worst = f"worst gradient: {self.worst}, differs by {most:.3g} of its norm"
        return "\n".join([*lines, worst if most else "all gradients are equal"])


def compare_backends(
    a: TrainBackend,
    b: TrainBackend,
    batch: Batch,
    loss: Loss,
    *,
    state: Handle[TrainState] | None = None,
    key: Key | None = None,
    get: Callable[[Any], Any] = get_here,
) -> FirstStep:
    """Computes the first step of two backends from one state: loss, norm of the gradient and each gradient.

    The second backend restores the state that the first one saves. So both have the same model and the same kind of
    optimizer; their layouts, dtypes and budgets of tokens may differ. ``check_backend`` asks whether differences are
    rounding; this function says how large they are. Under torchrun all ranks call it, with the same batch; one
    backend may be a ``Local`` of each rank.

    Args:
        a: the backend to compare with.
        b: the other backend.
        batch: a batch with the weights of the loss, as ``aggregate`` writes them.
        loss: the loss that is differentiated.
        state: a state of ``a``, not donated; by default a new one.
        key: a new state is drawn from it.
        get: returns the value behind a reference, for a backend whose states are handles: ``workers.get``.

    Raises:
        ValueError: the gradients have other names; the backends hold different models.

    Example:
        >>> from verl_fn.backends.mock import Mock
        >>> from verl_fn.steps import cross_entropy, sgd
        >>> whole, split = Mock(8, sgd(0.1)), Mock(8, sgd(0.1), max_tokens=24)
        >>> first = compare_backends(whole, split, tiny_batch(), cross_entropy())
        >>> round(first.loss[0], 3) == round(first.loss[1], 3), first.gradients[first.worst] < 1e-6
        (True, True)
    """
    first, second = (BackendCase(backend, loss, batch, 0.0, key or Key.from_seed(0), get) for backend in (a, b))
    start = a.init(first.key) if state is None else state
    with shared_folder() as folder:
        save_once(a, start, Path(folder) / "state")
        moved = b.restore(Path(folder) / "state")
    (ours, metrics), (theirs, more) = first.gradients(start), second.gradients(moved)
    wanted, given = (
        {name: t.double().cpu() for name, t in case.read(grads).items()}
        for case, grads in ((first, ours), (second, theirs))
    )
    if wanted.keys() != given.keys():
        raise ValueError(f"only one of the backends has gradients named {sorted(wanted.keys() ^ given.keys())[:5]}")
    norms = [math.hypot(*(float(t.norm()) for t in grads.values())) for grads in (wanted, given)]
    # A gradient that is rounding error has no relative error of its own.
    floor = 1e-6 * norms[0]
    return FirstStep(
        loss=(metrics["loss"].value, more["loss"].value),
        grad_norm=(norms[0], norms[1]),
        gradients={name: float((given[name] - t).norm()) / max(float(t.norm()), floor) for name, t in wanted.items()},
    )
