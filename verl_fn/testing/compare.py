"""Comparisons with a formula that a user writes, since the laws do not notice a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verl_fn.state import Batch, Key, Split, TokenOutputs, groups_of
from verl_fn.steps import Loss
from verl_fn.steps.losses.contract import WEIGHTS

from .builders import in_float64, tiny_batch, tiny_outputs
from .losses import apart, carrying
from .violation import require_close

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
