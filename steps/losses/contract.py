"""Losses: pure functions of a model's outputs and a batch. They can be added and scaled.

A loss is a sum of terms, and each term has a level. A ``token`` term returns one value per token, ``[T]``, and is
weighted by the batch's ``loss_weight``; a ``row`` term returns one value per row, ``[B]``, and is weighted by
``row_weight``. A backend differentiates ``total_loss``, the sum of weight times value. A loss therefore computes no
averages and does not depend on micro-batches or ranks, and any two losses can be added:

    loss = ppo_clip(clip_ratio_high=0.28) + 0.001 * kl_to_reference("low_var_kl") - 0.01 * entropy()
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.errors import ArgumentError, UserError, kind_of, place_of, signature_of, takes
from verl_fn.state import PER_ROW, Batch, Metrics, Sum, TokenOutputs, Weighted, metrics, read_only
from verl_fn.state.metrics import Metric

Level: TypeAlias = Literal["token", "row"]
LossFn: TypeAlias = Callable[[TokenOutputs, Batch], tuple[Float[Tensor, " N"], Metrics]]

WEIGHTS: dict[str, str] = {"token": "loss_weight", "row": "row_weight"}
WRITERS: dict[str, str] = {"token": "steps.aggregate", "row": "steps.aggregate_rows"}


class LossError(UserError, ValueError):
    """A loss did not return one value for each token, or row, and metrics."""


@attrs.frozen(eq=False)
class Term:
    """One function of a loss.

    Attributes:
        fn: returns the values and the metrics.
        needs: the names of the model's outputs that it reads: ``logprobs``, ``entropy``, ``values``, ``row_values``.
        level: ``token`` for values ``[T]``, ``row`` for values ``[B]``.
        together: a per-row field; rows with the same value are never split apart.
        factor: the values are multiplied by it.
    """

    fn: LossFn
    needs: frozenset[str]
    level: Level = "token"
    together: str | None = None
    factor: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.level not in WEIGHTS:
            raise ValueError(f"level is {self.level!r}; it must be {' or '.join(WEIGHTS)}")

    def values(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        """Returns the values times the factor, and the metrics as they are.

        Raises:
            LossError: the function returns something else, or writes in place into what it gets.
        """
        with read_only(described(self.fn), LossError, batch, **outputs.by_name):
            try:
                returned = self.fn(outputs, batch)
            except Exception as error:
                error.add_note(f"raised in {described(self.fn)}")
                if "must match the size" in str(error) and batch.per_row:
                    error.add_note(
                        f"a field for each row ({', '.join(sorted(batch.per_row))}) goes with fields for each token "
                        "as batch.spread(field)"
                    )
                raise
        values, reported = self.checked(returned)
        return values if self.factor == 1.0 else self.factor * values, reported

    def checked(self, returned: Any) -> tuple[Tensor, Metrics]:
        """Returns what the function has returned.

        Raises:
            LossError: it is something else than values and metrics.
        """
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor)):
            raise self._error(f"{kind_of(returned)}; a loss returns its values and its metrics")
        values, reported = returned
        if not isinstance(reported, Mapping):
            raise self._error(f"{kind_of(reported)} as its metrics; they are a dict by name")
        for name, metric in reported.items():
            if not isinstance(metric, Metric):
                raise self._error(
                    f"{kind_of(metric)} as the metric {name!r}; it does not add up over micro-batches; "
                    f"verl_fn.steps.{self.level}_mean(batch, values) makes one, and verl_fn.state has Weighted, Sum, "
                    "Max, Min and Moments"
                )
        if "loss" in reported:
            raise self._error("a metric named 'loss', as the total is; give it another name")
        return values, dict(reported)

    def _error(self, what: str) -> LossError:
        return LossError(f"{described(self.fn)} returns {what}")


@attrs.frozen(eq=False)
class Loss:
    """A sum of terms. ``loss`` makes one from a function.

    Raises:
        ValueError: two terms keep rows together by different fields.
    """

    terms: tuple[Term, ...]

    def __attrs_post_init__(self) -> None:
        fields = {term.together for term in self.terms} - {None}
        if len(fields) > 1:
            raise ValueError(
                f"losses that keep rows together by different fields ({', '.join(sorted(map(str, fields)))}) cannot "
                "be added; use the same per-row field for both"
            )

    @property
    def needs(self) -> frozenset[str]:
        """The names of the model's outputs that any term reads."""
        return frozenset().union(*(term.needs for term in self.terms))

    @property
    def levels(self) -> frozenset[str]:
        """The levels of the terms: ``token``, ``row`` or both."""
        return frozenset(term.level for term in self.terms)

    @property
    def together(self) -> str | None:
        """The per-row field that keeps rows together, or None if no term declares one."""
        return next((term.together for term in self.terms if term.together is not None), None)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Float[Tensor, " N"], Metrics]:
        """Returns the values and the metrics of a loss whose terms all have the same level.

        Raises:
            ValueError: the loss has terms of both levels; their values can only be added after they are weighted.
        """
        if len(self.levels) > 1:
            raise ValueError("this loss has terms of both levels, token and row; compute it with steps.total_loss")
        values, reported = zip(*(term.values(outputs, batch) for term in self.terms), strict=True)
        return sum(values[1:], values[0]), metrics.merge(*reported)

    def __add__(self, other: Loss) -> Loss:
        if not isinstance(other, Loss):
            return NotImplemented
        return Loss((*self.terms, *other.terms))

    def __mul__(self, factor: float) -> Loss:
        return Loss(tuple(attrs.evolve(term, factor=factor * term.factor) for term in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Loss:
        return self * (1 / divisor)

    def __sub__(self, other: Loss) -> Loss:
        return self + -1.0 * other

    def __radd__(self, start: int) -> Loss:
        # sum() begins with 0.
        return self if start == 0 else NotImplemented


def loss(
    needs: Iterable[str] = ("logprobs",), *, level: Level = "token", together: str | None = None
) -> Callable[[LossFn], Loss]:
    """Makes a decorator that turns a function of outputs and batch into a ``Loss``.

    Args:
        needs: the names of the model's outputs that the function reads.
        level: ``token`` if it returns one value per token, ``row`` if it returns one value per row.
        together: a per-row field of integers; rows with the same value are always in one micro-batch.

    Raises:
        LossError: ``needs`` is no list of names; or, in the decorator, the function does not take outputs and batch.

    Example:
        >>> @loss(needs=["logprobs"])
        ... def reinforce(outputs, batch):
        ...     return -batch["advantages"] * outputs.logprobs, {}
        >>> @loss(needs=["row_values"], level="row", together="pair")
        ... def reward_spread(outputs, batch):
        ...     return -outputs.row_values.square(), {}
        >>> both = reinforce + 0.1 * reward_spread
        >>> sorted(both.needs), sorted(both.levels), both.together
        (['logprobs', 'row_values'], ['row', 'token'], 'pair')
    """

    if isinstance(needs, str) or callable(needs):
        raise LossError('needs is a list of names: write @loss(needs=["logprobs"])')

    def made(fn: LossFn) -> Loss:
        if not takes(fn, ["outputs", "batch"]):
            raise LossError(
                f"{described(fn)} takes {signature_of(fn)}, and a loss takes (outputs, batch): outputs.logprobs are "
                'the policy\'s log-probs, and batch["old_log_probs"], batch["advantages"] and batch["response_mask"] '
                "have one value for each token, too"
            )
        return Loss((Term(fn, frozenset(needs), level, together),))

    return made


def total_loss(loss: Loss, outputs: TokenOutputs, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
    """Returns the sum of weight times value, for a backend to differentiate, and the metrics.

    Tokens and rows with weight zero are ignored, even if their values or the derivatives of these are not finite.

    Args:
        batch: has the weights, ``loss_weight`` or ``row_weight``.

    Raises:
        ArgumentError: ``loss`` is not a ``Loss``.
        LossError: a term does not return one value per token, or per row, and its metrics.
        ValueError: the batch has no weights for a term.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"loss_weight": [[0.0, 0.5]]})
        >>> minus = loss(needs=["logprobs"])(lambda outputs, batch: (-outputs.logprobs, {}))
        >>> total_loss(minus, TokenOutputs({"logprobs": torch.tensor([float("nan"), -4.0])}), batch)[0].item()
        2.0
    """
    check_fields(loss, batch)
    outputs = _guarded(loss, outputs, batch)
    sums: dict[str, Tensor] = {}
    reported: list[Metrics] = []
    for term in loss.terms:
        values, of_term = term.values(outputs, batch)
        # Adding before weighting rounds like a single loss function that computes all terms of the level.
        check_shape(values, batch, term)
        sums[term.level] = sums[term.level] + values if term.level in sums else values
        reported.append(of_term)
    totals = [_weighted(batch, values, level) for level, values in sums.items()]
    total = sum(totals[1:], totals[0])
    if not total.requires_grad:
        if torch.is_grad_enabled() and any(t.requires_grad for t in outputs.by_name.values()):
            names = " and ".join(described(term.fn) for term in loss.terms)
            warnings.warn(f"the gradient of {names} is zero: it depends on no output of the model", stacklevel=2)
        # The gradient of a loss that does not depend on the outputs is zero, and not an error of autograd.
        total = total + sum(t[:0].sum() for t in outputs.by_name.values())
    return total, metrics.merge(*reported)


def check_weights(loss: Loss, batch: Batch) -> None:
    """Checks that the batch has the fields that the loss needs, and weights only where the model gives outputs.

    Raises:
        ArgumentError: ``loss`` is not a ``Loss``.
        ValueError: the batch lacks weights or the field that keeps rows together, or a token has a ``loss_weight``
            but no ``response_mask``; for missing weights the message names the function that writes them.

    Example:
        >>> check_weights(loss()(lambda outputs, batch: (outputs.logprobs, {})), Batch.from_rows([[1]]))
        Traceback (most recent call last):
        ValueError: the batch has no loss_weight; call steps.aggregate on the whole update batch first
    """
    check_fields(loss, batch)
    if "token" not in loss.levels or "response_mask" not in batch:
        return
    stray = (batch["loss_weight"] != 0) & (batch["response_mask"] == 0)
    if bool(stray.any()):
        row = int(batch.row_ids[stray][0])
        raise ValueError(
            f"row {row}: loss_weight is set on {int(stray.sum())} tokens of this batch where response_mask is 0, for "
            "which the model gives no outputs; set response_mask first, then call steps.aggregate"
        )


def check_fields(loss: Loss, batch: Batch) -> None:
    """Checks that the batch has the weights that the loss needs and the field that keeps rows together.

    Raises:
        ArgumentError: ``loss`` is not a ``Loss``.
        ValueError: the batch lacks one of them.
    """
    if not isinstance(loss, Loss):
        raise ArgumentError(
            f"a loss is a Loss, not a {type(loss).__name__}; decorate a function with @loss(needs=[...]), and call a "
            "function that makes a loss, such as ppo_clip()"
        )
    for level in sorted(loss.levels):
        if WEIGHTS[level] not in batch:
            raise ValueError(
                f"the batch has no {WEIGHTS[level]}; call {WRITERS[level]} on the whole update batch first"
            )
    if loss.together is not None and loss.together not in batch.per_row:
        raise ValueError(
            f"the loss keeps rows with the same {loss.together!r} together, but the batch has no per-row field of "
            f"that name; it has {sorted(batch.per_row)}"
        )


def token_mean(batch: Batch, values: Tensor) -> Weighted:
    """Makes the metric for the mean of ``values`` over response tokens; every split gives the same one.

    Example:
        >>> token_mean(Batch.from_rows([[1, 2]], {"response_mask": [[0.0, 1.0]]}), torch.tensor([9.0, 2.0])).value
        2.0
    """
    return Weighted.of(values, batch["response_mask"])


def row_mean(batch: Batch, values: Tensor) -> Weighted:
    """Makes the metric for the mean of ``values`` over rows whose weight is not 0, the same for every split.

    Example:
        >>> batch = Batch.from_rows([[1], [2]], per_row={"row_weight": [0.0, 0.5]})
        >>> row_mean(batch, torch.tensor([9.0, 2.0])).value
        2.0
    """
    return Weighted.of(values, batch["row_weight"] != 0)


def weighted_sum(batch: Batch, values: Tensor, level: Level = "token") -> Sum:
    """Makes the metric for a term of the loss: the sum of weight times value, with the weights of ``level``."""
    return Sum(_weighted(batch, values.detach().double(), level))


def _weighted(batch: Batch, values: Tensor, level: Level | str) -> Tensor:
    weight = batch[WEIGHTS[level]]
    # The inner ``where`` keeps values that are not finite out of the gradient, where 0 * inf would be nan.
    live = weight != 0
    return torch.where(live, weight * torch.where(live, values, 0.0), 0.0).sum()


def _guarded(loss: Loss, outputs: TokenOutputs, batch: Batch) -> TokenOutputs:
    """Returns the outputs with gradients of 0 instead of nan at tokens and rows that no term gives a weight."""
    guarded = {}
    for name, t in outputs.by_name.items():
        weightless = _weightless(loss, batch, rows=name in PER_ROW)
        guarded[name] = without_nan_gradients(t, weightless.reshape(-1, *[1] * (t.ndim - 1)))
    return TokenOutputs(guarded)


def _weightless(loss: Loss, batch: Batch, *, rows: bool) -> Tensor:
    """Returns a mask of the rows, or of the tokens, that no term gives a weight."""
    weighted = []
    for level in loss.levels:
        mask = batch[WEIGHTS[level]] != 0
        if rows and level == "token":
            mask = batch.sum_rows(mask.float()) > 0
        weighted.append(batch.spread(mask) if level == "row" and not rows else mask)
    return ~torch.stack(weighted).any(0)


def check_shape(values: Tensor, batch: Batch, term: Term) -> None:
    """Raises LossError unless there is one value for each token, or row, as the level of the term says."""
    count, unit = (batch.num_tokens, "token") if term.level == "token" else (len(batch), "row")
    if values.shape != (count,):
        raise LossError(
            f"{described(term.fn)} has the shape {tuple(values.shape)}, but the batch has {count} {unit}s; a {unit} "
            f"loss returns one value per {unit}, and {WEIGHTS[term.level]} makes it a sum or a mean"
        )


def described(fn: Callable[..., object]) -> str:
    """Returns the name and the place of a function, for errors.

    Example:
        >>> described(len), described(described)
        ('the loss len', 'the loss described (...contract.py:...)')
    """
    return f"the loss {place_of(fn)}"


def without_nan_gradients(output: Tensor, weightless: Tensor) -> Tensor:
    """Returns the same output, whose gradient is 0 instead of nan where it has no weight.

    The derivative of a function of such an output can be infinite, as a square root's is at 0, and its product
    with the weight 0 is nan. Finite gradients pass, since the values of other tokens may depend on the output.

    Args:
        output: an output of the model, per token or per row.
        weightless: a mask of the tokens or rows without weight, with as many dimensions as the output.

    Example:
        >>> x = torch.zeros(2, requires_grad=True)
        >>> guarded = without_nan_gradients(x, torch.tensor([True, False]))
        >>> guarded.backward(torch.tensor([float("nan"), 3.0]))
        >>> x.grad
        tensor([0., 3.])
    """
    return _Guard.apply(output, weightless)


class _Guard(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, weightless: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weightless,) = ctx.saved_tensors
        return torch.where(weightless & gradient.isnan(), 0.0, gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()
