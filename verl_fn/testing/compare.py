"""Comparisons of losses and estimators with a formula of the user's, and of the first steps of two backends.

The laws do not notice a formula that is wrong everywhere in the same way.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import Handle, TrainBackend
from verl_fn.state import Batch, Key, Split, TokenOutputs, TrainState, groups_of
from verl_fn.steps import Loss
from verl_fn.steps.losses.contract import WEIGHTS, total_loss

from .backend_case import BackendCase
from .builders import in_float64, tiny_batch, tiny_outputs
from .losses import apart, carrying
from .violation import require_close, save_once, shared_folder

LAW = "Reference"
DRAWS = 8
# In bfloat16, rounding moves single gradients and updates by so much that no bar would say anything.
BARS: Mapping[str, Mapping[str, float]] = {
    "float32": {"loss": 1e-6, "grad_norm": 1e-6, "gradient": 1e-5, "update_from_reference": 1e-5},
    "bfloat16": {"loss": 1e-3, "grad_norm": 5e-3},
}


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


def bars_of(dtype: str, layers: int) -> dict[str, float]:
    """Returns the largest errors that are rounding. Each layer adds its rounding, so the bars grow with the layers.

    Args:
        dtype: of the computation, a key of ``BARS``.
        layers: of the model; up to two layers have the same bars.

    Example:
        >>> bars_of("bfloat16", 2), bars_of("bfloat16", 24)
        ({'loss': 0.001, 'grad_norm': 0.005}, {'loss': 0.012, 'grad_norm': 0.06})
    """
    return {kind: max(1.0, layers / 2) * bar for kind, bar in BARS[dtype].items()}


def missed_bars(errors: Mapping[str, float], bars: Mapping[str, float]) -> list[str]:
    """Returns the names of the errors above their bar; an error that is not a number is.

    Example:
        >>> missed_bars({"loss": 0.1, "grad_norm": math.nan, "gradient": 9.0}, {"loss": 0.2, "grad_norm": 0.2})
        ['grad_norm']
    """
    return [kind for kind, bar in bars.items() if kind in errors and not errors[kind] <= bar]


def compare_numbers(result: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    """Returns the relative errors of losses and of the gradient norm.

    Args:
        result: ``loss``, ``grad_norm`` and perhaps ``second_loss`` of a backend.
        wanted: these of the reference, and the ``scale`` of its loss: the sum of |weight x loss|, since a PPO loss is
            near zero and has no relative error.

    Example:
        >>> compare_numbers({"loss": 1.5, "grad_norm": 3.0}, {"loss": 1.0, "grad_norm": 2.0, "scale": 4.0})
        {'loss': 0.125, 'grad_norm': 0.5}
    """
    scales = {"loss": wanted["scale"], "grad_norm": wanted["grad_norm"], "second_loss": wanted["scale"]}
    return {
        name: abs(result[name] - wanted[name]) / max(scale, sys.float_info.min)
        for name, scale in scales.items()
        if name != "second_loss" or name in result
    }


@attrs.frozen
class FirstStep:
    """What two backends make of one state and one batch: a pair holds the value of each backend.

    Attributes:
        gradients: by parameter, the norm of the difference of both gradients over the norm of the first one.
        scale: what the error of the loss is relative to: of the first backend, the sum of |weight x loss|, or of
            |output x slope of the loss| if that is more.
        bars: the largest errors that are rounding, by the names of ``errors``. An error without a bar is fine.
    """

    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    gradients: Mapping[str, float]
    scale: float
    bars: Mapping[str, float] = BARS["float32"]

    @property
    def worst(self) -> str:
        """The name of the parameter whose gradients differ most; NaN is more than any number."""
        return max(self.gradients, key=lambda name: (math.isnan(self.gradients[name]), self.gradients[name]))

    @property
    def errors(self) -> dict[str, float]:
        """The relative errors of ``loss`` and ``grad_norm``, and of the worst ``gradient``."""
        wanted, found = ({"loss": self.loss[i], "grad_norm": self.grad_norm[i]} for i in (0, 1))
        return compare_numbers(found, wanted | {"scale": self.scale}) | {"gradient": self.gradients[self.worst]}

    @property
    def missed(self) -> list[str]:
        """The names of the errors above their bar."""
        return missed_bars(self.errors, self.bars)

    @property
    def ok(self) -> bool:
        """Whether no error is above its bar."""
        return not self.missed

    def __str__(self) -> str:
        """Returns a table: values, relative errors, and which of them are above their bars.

        Example:
            >>> bars = {"loss": 1e-6, "grad_norm": 1e-6}
            >>> print(FirstStep((1.0, 1.5), (2.0, 2.0), {"a": 0.25, "b": 0.0}, 4.0, bars))
                       backend a       backend b   relative error
            loss                   1             1.5   error 0.12, MISSES its bar of 1e-06
            grad norm              2               2   error 0, holds its bar of 1e-06
            gradient   a differs most                  error 0.25, no bar
        """
        names = {
            "loss": _pair(self.loss),
            "grad_norm": _pair(self.grad_norm),
            "gradient": f" {self.worst} differs most",
        }
        lines = [f"{'':<10}{'backend a':>14}{'backend b':>16}   relative error"]
        for name, values in names.items():
            verdict = "no bar"
            if name in self.bars:
                verdict = f"{'MISSES' if name in self.missed else 'holds'} its bar of {self.bars[name]:.3g}"
            lines.append(f"{name.replace('_', ' '):<10}{values:<30}   error {self.errors[name]:.2g}, {verdict}")
        return "\n".join(lines)


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:>14.6g}{values[1]:>16.6g}"


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
    optimizer; their layouts, dtypes and budgets of tokens may differ. Under torchrun all ranks call it, with the same
    batch; one backend may be a ``Local`` of each rank.

    The bars of the result are the ones of ``verl-fn bench first-step``, times half the model's layers, for the lower
    of both dtypes: ``backend.dtype``, or float32 for a backend without it.

    Args:
        a: the backend to compare with.
        b: the other backend.
        batch: a batch with the weights of the loss, as ``aggregate`` writes them.
        loss: the loss that is differentiated.
        state: a state of ``a``, not donated, such as ``a.load_pretrained()``; by default one with new random weights.
        key: a new state is drawn from it.
        get: returns the value behind a reference, for a backend whose states are handles: ``workers.get``.

    Raises:
        ValueError: the gradients have other names; the backends hold different models.

    Example:
        >>> from verl_fn.backends.mock import Mock
        >>> from verl_fn.steps import cross_entropy, sgd
        >>> from verl_fn.testing import tiny_batch
        >>> whole, split = Mock(8, sgd(0.1)), Mock(8, sgd(0.1), max_tokens=24)
        >>> first = compare_backends(whole, split, tiny_batch(), cross_entropy())
        >>> first.ok, first.errors["loss"] < 1e-6
        (True, True)
    """
    first, second = (BackendCase(backend, loss, batch, 0.0, key or Key.from_seed(0), get) for backend in (a, b))
    start = a.init(first.key) if state is None else state
    with shared_folder() as folder:
        save_once(a, start, Path(folder) / "state")
        moved = b.restore(Path(folder) / "state")
    (ours, metrics), (theirs, more) = first.gradients(start), second.gradients(moved)
    whole = first.read(ours), second.read(theirs)
    wanted, given = ({name: t.double().cpu() for name, t in grads.items()} for grads in whole)
    if wanted.keys() != given.keys():
        raise ValueError(f"only one of the backends has gradients named {sorted(wanted.keys() ^ given.keys())[:5]}")
    norms = [math.hypot(*(float(t.norm()) for t in grads.values())) for grads in (wanted, given)]
    floor = 1e-6 * norms[0]  # A gradient that is rounding error has no relative error of its own.
    return FirstStep(
        loss=(metrics["loss"].value, more["loss"].value),
        grad_norm=(norms[0], norms[1]),
        gradients={name: float((given[name] - t).norm()) / max(float(t.norm()), floor) for name, t in wanted.items()},
        scale=loss_scale(loss, first.outputs(start.params), batch),
        bars=_bars((a, b), wanted),
    )


def _bars(backends: Iterable[TrainBackend], parameters: Iterable[str]) -> dict[str, float]:
    """Returns the bars for the lowest dtype of the backends, and for the layers that the parameters' names count."""
    layers = len({found[1] for name in parameters if (found := re.search(r"\.(\d+)\.", name))})
    low = {getattr(backend, "dtype", torch.float32) for backend in backends} - {torch.float32, torch.float64}
    return bars_of("bfloat16" if low else "float32", layers)


def loss_scale(loss: Loss, outputs: TokenOutputs, batch: Batch) -> float:
    """Returns the sum of |weight x loss| over tokens and rows, or of |output x slope of the loss| if that is more.

    Rounding changes outputs by a part of them, and so a loss whose values are near 0 by a large part of itself.
    """
    scale = 0.0
    for level in loss.levels:
        values, _ = Loss(tuple(term for term in loss.terms if term.level == level))(outputs, batch)
        weights = batch[WEIGHTS[level]]
        scale += float(torch.where(weights != 0, weights * values, 0.0).double().abs().sum())
    leaves = {name: t.detach().clone().requires_grad_() for name, t in outputs.by_name.items()}
    total, _ = total_loss(loss, TokenOutputs(leaves), batch)
    slopes = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    moved = (torch.where(d != 0, t * d, 0.0) for t, d in zip(outputs.by_name.values(), slopes, strict=True))
    return max(scale, sum(float(change.double().abs().sum()) for change in moved))
