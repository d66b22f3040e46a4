"""The laws of a loss: ``check_loss``."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.state import PER_ROW, Batch, Key, Metrics, TokenOutputs, metrics, tree
from verl_fn.steps import Loss, Term, check_weights
from verl_fn.steps.losses.contract import WEIGHTS, LossError, check_shape

from .builders import beside, reads, scrambled, some_splits, tiny_batch, tiny_outputs, tiny_pairs, with_longer_prompts
from .violation import LawViolation, repeatable, require, require_close, require_equal, require_full_precision

KNOWN_OUTPUTS = frozenset({"logprobs", "entropy", "values", "row_values", "candidate_logprobs"})
EXTREME = 100.0
CARRIED = "output of the model: "


def check_loss(
    loss: Loss,
    batch: Batch | None = None,
    *,
    together: str | None = None,
    zero_advantages: bool = True,
    tolerance: float = 1e-5,
    key: Key | None = None,
) -> None:
    """Checks a loss against the laws, with random outputs of a model; it takes some milliseconds.

    * Signature: one float32 number per token, or per row, as each term declares, metrics that add up, and outputs
      that backends serve. Each term has a gradient, and its values do not depend on ``loss_weight`` or
      ``row_weight``; the backend applies it.
    * Purity: twice the same, inputs as they were, no output read that ``needs`` does not name.
    * Split invariance: the weighted sum, its gradient with respect to the outputs, and every metric are the same
      for other splits and orders of the rows. Neither this check nor a backend splits rows that the loss keeps
      ``together``.
    * Zero: tokens without ``response_mask`` take no part, whatever their fields hold (nan and infinities too) and
      however many of them a prompt has; zero advantages give a zero gradient.
    * Finite: so is everything if log-probs lie 100 nats apart.
    * Precision: no operation has a result in bfloat16 or float16.

    A wrong formula can obey all of these; ``compare_loss`` compares with one that you write.

    Args:
        loss: the loss.
        batch: by default ``tiny_batch()``, or ``tiny_pairs()`` for a loss that keeps pairs together; add missing
            fields with ``tiny_batch().with_tokens(...)`` or ``with_rows``.
        together: the field that the loss is meant to keep rows together by. A loss that declares another, or none,
            breaks the law: backends only know what it declares.
        zero_advantages: whether zero advantages must give a zero gradient, if the loss reads them. Turn it
            off for sums with a term that has a gradient of its own, such as an entropy bonus.
        tolerance: how far splits may differ, relative to the largest value.
        key: other keys give other outputs and splits.

    Raises:
        LawViolation: a law is broken.

    Example:
        >>> from verl_fn.steps import ppo_clip, loss
        >>> check_loss(ppo_clip())
        >>> @loss(needs=["logprobs"])
        ... def mean_inside(outputs, batch):
        ...     return -outputs.logprobs * batch["advantages"] / batch["response_mask"].sum(), {}
        >>> check_loss(mean_inside)
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Split invariance: one batch against ... ['total'] by ...
    """
    _check_declared(loss, together)
    if batch is None:
        batch = tiny_pairs() if loss.together == "pair" else tiny_batch()
    check_weights(loss, batch)
    _check_laws(loss, batch, zero_advantages, tolerance, key or Key.from_seed(0))


def _check_declared(loss: Loss, together: str | None) -> None:
    if not isinstance(loss, Loss):
        raise TypeError(
            f"check_loss takes a Loss, not a {type(loss).__name__}: decorate a function of outputs and batch with "
            "@loss(needs=[...]), or call a function that makes a loss: check_loss(mine())"
        )
    require(
        together in (None, loss.together),
        "Split invariance",
        f"rows are to stay together by {together!r}, and the loss declares together={loss.together!r}, so that every "
        "backend may split them",
        "a missing @loss(..., together=...)",
    )
    unknown = sorted(loss.needs - KNOWN_OUTPUTS)
    require(
        not unknown,
        "Signature",
        f"the loss needs {unknown}, and backends serve {sorted(KNOWN_OUTPUTS)}",
        "the name of a field of the batch, or of something inside the model, in needs=[...]",
    )


@attrs.frozen(eq=False)
class _Case:
    """A loss under test, with the outputs that it declares.

    Attributes:
        result: what ``evaluate`` returns for these.
        tolerance: the largest relative difference of results that should be equal.
        key: other keys give other batches.
    """

    loss: Loss
    batch: Batch
    outputs: TokenOutputs
    result: dict[str, Any]
    tolerance: float
    key: Key

    def require_same(
        self,
        law: str,
        what: str,
        actual: dict[str, Any],
        cause: str = "a mean, a count or a maximum over the batch inside the loss; denominators belong in "
        "loss_weight, which steps.aggregate writes over the whole update batch, and metrics need Weighted or Sum",
    ) -> None:
        """Requires that another result is the same within the tolerance."""
        expected_numbers, numbers = (
            {"total": one["total"], "metrics": metrics.to_floats(one["metrics"])} for one in (self.result, actual)
        )
        require_close(law, what, expected_numbers, numbers, cause, tolerance=self.tolerance, floor=1.0)
        expected_gradient, gradient = ({"gradient": one["gradient"]} for one in (self.result, actual))
        require_close(law, what, expected_gradient, gradient, cause, tolerance=self.tolerance)


def _check_laws(loss: Loss, batch: Batch, zero_advantages: bool, tolerance: float, key: Key) -> None:
    outputs = tiny_outputs(batch, KNOWN_OUTPUTS, key)
    declared = TokenOutputs({name: t for name, t in outputs.by_name.items() if name in loss.needs})
    case = _Case(loss, batch, declared, _pure(loss, outputs, declared, batch), tolerance, key)
    _require_finite(case.result, "on an ordinary batch", "a division by the length of a row without response")
    _splits(case)
    _live(case)
    _weights_apart(case)
    _holes(case)
    _prompts(case)
    if zero_advantages and reads("advantages", batch, lambda fewer: evaluate(loss, declared, fewer)):
        _zero(case)
    _extremes(case)
    require_full_precision("the loss", lambda: evaluate(loss, declared, batch))


def _pure(loss: Loss, outputs: TokenOutputs, declared: TokenOutputs, batch: Batch) -> dict[str, Any]:
    """Returns what the loss gives for the outputs that it declares; more outputs must make no difference."""
    more = repeatable("Purity", "the loss", lambda: evaluate(loss, outputs, batch), outputs=outputs, batch=batch)
    cause = "needs=[...] of the loss does not name all that it reads"
    try:
        whole = evaluate(loss, declared, batch)
    except (AttributeError, KeyError) as error:
        raise LawViolation("Purity", f"the loss reads an output that it does not declare: {error}", cause) from error
    more["gradient"] = {name: more["gradient"][name] for name in whole["gradient"]}
    require_equal("Purity", "with more outputs than the loss declares, it", whole, more, cause)
    return whole


def _require_finite(result: dict[str, Any], where: str, cause: str) -> None:
    for name, value in {"sum": result["total"], **result["gradient"]}.items():
        what = name if name == "sum" else f"gradient of {name}"
        require(bool(value.isfinite().all()), "Finite", f"the {what} is not finite {where}", cause)


def _splits(case: _Case) -> None:
    """Adds up the results of the parts as a backend does."""
    carried = carrying(case.batch, case.outputs)
    for name, split in some_splits(case.batch, case.key, case.loss.together).items():
        parts = [evaluate(case.loss, *apart(carried.take(rows), case.outputs)) for rows in split.rows]
        joined = {
            "total": torch.stack([part["total"] for part in parts]).sum(),
            "gradient": split.join_outputs([TokenOutputs(part["gradient"]) for part in parts]).by_name,
            "metrics": metrics.merge(*(part["metrics"] for part in parts)),
        }
        case.require_same("Split invariance", f"one batch against {name}:", joined)


def _live(case: _Case) -> None:
    """Checks that each term has a gradient for some of a few random outputs."""
    draws = [tiny_outputs(case.batch, case.loss.needs, case.key.fold_in(i)) for i in range(3)]
    for number, term in enumerate(case.loss.terms):
        if term.factor == 0.0:
            continue
        alone = Loss((attrs.evolve(term, factor=1.0),))
        gradients = [evaluate(alone, outputs, case.batch)["gradient"].values() for outputs in draws]
        require(
            any(bool(g.any()) for of_draw in gradients for g in of_draw),
            "Signature",
            f"the gradient of term {number} ({term.fn.__name__}) is zero with respect to every output",
            "a detach() too many, or a function that is constant, such as sign() or a comparison",
        )


def _weights_apart(case: _Case) -> None:
    """Checks that values stay the same with other weights, since a backend multiplies by the weights."""
    batch = other = case.batch
    for name in (WEIGHTS[level] for level in case.loss.levels):
        weight = batch[name] * torch.linspace(1.5, 2.5, len(batch[name]))
        other = (other.with_rows if name in batch.per_row else other.with_tokens)(**{name: weight})
    for term in case.loss.terms:
        expected, actual = (_values(term, case.outputs, one) for one in (batch, other))
        cause = f"{WEIGHTS[term.level]} applied inside the loss; the backend applies it to the values"
        require_equal("Signature", f"with another {WEIGHTS[term.level]}, the value", expected, actual, cause)


def _values(term: Term, outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Returns the values of a term, 0 where their weight is 0."""
    leaves = TokenOutputs({name: t.detach().clone().requires_grad_() for name, t in outputs.by_name.items()})
    values = computed(term, leaves, batch)[0].detach()
    return torch.where(batch[WEIGHTS[term.level]] == 0, 0.0, values)


def _holes(case: _Case) -> None:
    for what, other in scrambled(case.batch, case.key).items():
        case.require_same(
            "Zero",
            f"{what} where response_mask is 0: the loss",
            evaluate(case.loss, case.outputs, other),
            "a mean or a metric that does not weigh with response_mask, or x * response_mask where x may not be "
            "finite; torch.where(mask, x, 0) drops it",
        )


def _prompts(case: _Case) -> None:
    names = [CARRIED + name for name in case.outputs.by_name]
    longer, old = with_longer_prompts(carrying(case.batch, case.outputs), case.key, zeros=names)
    result = evaluate(case.loss, *apart(longer, case.outputs))
    result["gradient"] = {name: g if name in PER_ROW else g[old] for name, g in result["gradient"].items()}
    cause = "batch.lengths or positions also count the prompt; count response_mask"
    case.require_same("Zero", "with longer prompts, the loss", result, cause)


def _zero(case: _Case) -> None:
    still = case.batch.with_tokens(advantages=torch.zeros_like(case.batch["advantages"]))
    for name, gradient in evaluate(case.loss, case.outputs, still)["gradient"].items():
        require(
            not bool(gradient.any()),
            "Zero",
            f"with zero advantages the gradient of {name} reaches {float(gradient.abs().max()):.3g}",
            "an additive term; if it is meant (an entropy bonus, a KL), pass zero_advantages=False",
        )


def _extremes(case: _Case) -> None:
    """Log-probs of the model far above and far below all others."""
    batch, mask = case.batch, case.batch["response_mask"]
    others = [name for name in batch.per_token if "log_prob" in name]
    high, low = -0.1 * mask, -(0.1 + EXTREME) * mask
    for model, data, side in ((high, low, "above"), (low, high, "below")):
        known = {name: beside(model, t) if "logprobs" in name else t for name, t in case.outputs.by_name.items()}
        given = {name: beside(data, batch[name]).clone() for name in others}
        result = evaluate(case.loss, TokenOutputs(known), batch.with_tokens(**given))
        where = f"where the model's log-probs lie {EXTREME:.0f} nats {side} all others"
        _require_finite(
            result, where, "exp() of a log-ratio that is not clamped: write (logprobs - old).clamp(-20, 20).exp()"
        )


def evaluate(loss: Loss, outputs: TokenOutputs, batch: Batch) -> dict[str, Any]:
    """Returns the weighted sum (``total``), its ``gradient`` with respect to every output, and the ``metrics``.

    The gradient is 0 where ``response_mask`` is 0, since the outputs of a backend are constants there.

    Raises:
        LawViolation: the loss returns something else than its signature says.
    """
    leaves = {name: t.detach().clone().requires_grad_() for name, t in outputs.by_name.items()}
    total, reported = torch.zeros((), dtype=torch.float64), []
    for term in loss.terms:
        values, of_term = computed(term, TokenOutputs(leaves), batch)
        written = "an operation in place on what it was given"
        require_equal("Purity", "after the loss, its argument outputs", outputs.by_name, leaves, written)
        weight = batch[WEIGHTS[term.level]].double() * term.factor
        total = total + torch.where(weight != 0, weight * torch.where(weight != 0, values.double(), 0.0), 0.0).sum()
        reported.append(of_term)
    wrt = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    gradient = {
        name: g if name in PER_ROW else torch.where(beside(batch["response_mask"], g) == 0, 0.0, g)
        for name, g in zip(leaves, wrt, strict=True)
    }
    return {"total": total.detach(), "gradient": gradient, "metrics": metrics.merge(*reported)}


def computed(term: Term, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Returns the values and the metrics of a term, without its factor.

    Raises:
        LawViolation: they are not what the signature of a loss says.
    """
    returned = term.fn(outputs, batch)
    try:
        values, reported = term.checked(returned)
        check_shape(values, batch, term)
    except LossError as error:
        cause = "a sum or a mean taken inside the loss, another level than the one declared, or metrics left out"
        raise LawViolation("Signature", str(error), cause) from error
    require(
        values.requires_grad,
        "Signature",
        "the loss depends on no output of the model",
        "a detach() too many, or outputs that are never read",
    )
    require(
        values.dtype in (torch.float32, torch.float64),
        "Signature",
        f"the values of the loss are {values.dtype}",
        "a cast to the compute dtype of the model; outputs are float32",
    )
    for name, metric in reported.items():
        held = any(x.requires_grad for x in tree.leaves(metric) if isinstance(x, Tensor))
        require(not held, "Signature", f"the metric {name!r} holds on to the graph", "a missing detach()")
    return values, reported


def carrying(batch: Batch, outputs: TokenOutputs) -> Batch:
    """Returns the batch with the outputs as fields, so that they are taken along with its rows."""
    for name, t in outputs.by_name.items():
        batch = (batch.with_rows if name in PER_ROW else batch.with_tokens)(**{CARRIED + name: t})
    return batch


def apart(carried: Batch, like: TokenOutputs) -> tuple[TokenOutputs, Batch]:
    """Returns the outputs that a batch carries, and the batch without them."""
    outputs = {name: carried[CARRIED + name] for name in like.by_name}
    return TokenOutputs(outputs), carried.without(*(CARRIED + name for name in outputs))
