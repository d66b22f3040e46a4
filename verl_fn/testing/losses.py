"""The laws of a loss: ``check_loss``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.state import (
    PER_ROW,
    Batch,
    Key,
    Max,
    Metrics,
    Min,
    Moments,
    Split,
    Sum,
    TokenOutputs,
    Weighted,
    metrics,
    tree,
)
from verl_fn.steps import Loss, Term, check_weights
from verl_fn.steps.losses.contract import WEIGHTS

from .builders import beside, scrambled, some_splits, tiny_batch, tiny_outputs, tiny_pairs, with_longer_prompts
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
            f"a {type(loss).__name__} is no Loss; decorate the function with verl_fn.steps.loss(needs=[...])"
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


def _check_laws(loss: Loss, batch: Batch, zero_advantages: bool, tolerance: float, key: Key) -> None:
    outputs = tiny_outputs(batch, KNOWN_OUTPUTS, key)
    declared = TokenOutputs({name: t for name, t in outputs.by_name.items() if name in loss.needs})
    whole = _pure(loss, outputs, declared, batch)
    _require_finite(whole, "on an ordinary batch", "a division by the length of a row without response")
    _splits(loss, declared, batch, whole, some_splits(batch, key, loss.together), tolerance)
    _live(loss, batch, key)
    _weights_apart(loss, declared, batch)
    _holes(loss, declared, batch, whole, key, tolerance)
    _prompts(loss, declared, batch, whole, key, tolerance)
    if zero_advantages and _reads_advantages(loss, declared, batch):
        _zero(loss, declared, batch)
    _extremes(loss, declared, batch)
    require_full_precision("the loss", lambda: evaluate(loss, declared, batch))


def _pure(loss: Loss, outputs: TokenOutputs, declared: TokenOutputs, batch: Batch) -> dict[str, Any]:
    """Returns what the loss gives for the outputs that it declares; more outputs must make no difference."""
    more = repeatable(
        "Purity", "the loss", lambda: _flat(evaluate(loss, outputs, batch)), outputs=outputs, batch=batch
    )
    cause = "needs=[...] of the loss does not name all that it reads"
    try:
        whole = _flat(evaluate(loss, declared, batch))
    except (AttributeError, KeyError) as error:
        raise LawViolation("Purity", f"the loss reads an output that it does not declare: {error}", cause) from error
    more["gradient"] = {name: more["gradient"][name] for name in whole["gradient"]}
    require_equal("Purity", "with more outputs than the loss declares, it", whole, more, cause)
    return whole


def _require_finite(result: dict[str, Any], where: str, cause: str) -> None:
    for name, value in {"sum": result["total"], **result["gradient"]}.items():
        what = name if name == "sum" else f"gradient of {name}"
        require(bool(value.isfinite().all()), "Finite", f"the {what} is not finite {where}", cause)


def _splits(
    loss: Loss,
    outputs: TokenOutputs,
    batch: Batch,
    whole: dict[str, Any],
    splits: dict[str, Split],
    tolerance: float,
) -> None:
    carried = carrying(batch, outputs)
    for name, split in splits.items():
        parts = [evaluate(loss, *apart(carried.take(rows), outputs)) for rows in split.rows]
        _compare("Split invariance", f"one batch against {name}:", whole, _joined(split, parts), tolerance)


def _joined(split: Split, parts: Sequence[tuple[dict[str, Any], Metrics]]) -> dict[str, Any]:
    """Adds up the results of the parts as a backend does."""
    gradient = split.join_outputs([TokenOutputs(result["gradient"]) for result, _ in parts]).by_name
    total = torch.stack([result["total"] for result, _ in parts]).sum()
    return _flat(({"total": total, "gradient": gradient}, metrics.merge(*(reported for _, reported in parts))))


def _live(loss: Loss, batch: Batch, key: Key) -> None:
    """Checks that each term has a gradient for some of a few random outputs."""
    draws = [tiny_outputs(batch, loss.needs, key.fold_in(i)) for i in range(3)]
    for number, term in enumerate(loss.terms):
        if term.factor == 0.0:
            continue
        alone = Loss((attrs.evolve(term, factor=1.0),))
        gradients = [evaluate(alone, outputs, batch)[0]["gradient"].values() for outputs in draws]
        require(
            any(bool(g.any()) for of_draw in gradients for g in of_draw),
            "Signature",
            f"the gradient of term {number} ({term.fn.__name__}) is zero with respect to every output",
            "a detach() too many, or a function that is constant, such as sign() or a comparison",
        )


def _weights_apart(loss: Loss, outputs: TokenOutputs, batch: Batch) -> None:
    """Checks that values stay the same with other weights, since a backend multiplies by the weights."""
    other = batch
    for name in (WEIGHTS[level] for level in loss.levels):
        weight = batch[name] * torch.linspace(1.5, 2.5, len(batch[name]))
        other = (other.with_rows if name in batch.per_row else other.with_tokens)(**{name: weight})
    for term in loss.terms:
        expected, actual = (_values(term, outputs, one) for one in (batch, other))
        cause = f"{WEIGHTS[term.level]} applied inside the loss; the backend applies it to the values"
        require_equal("Signature", f"with another {WEIGHTS[term.level]}, the value", expected, actual, cause)


def _values(term: Term, outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Returns the values of a term, 0 where their weight is 0."""
    leaves = TokenOutputs({name: t.detach().clone().requires_grad_() for name, t in outputs.by_name.items()})
    values = computed(term, leaves, batch)[0].detach()
    return torch.where(batch[WEIGHTS[term.level]] == 0, 0.0, values)


def _holes(
    loss: Loss, outputs: TokenOutputs, batch: Batch, whole: dict[str, Any], key: Key, tolerance: float
) -> None:
    for what, other in scrambled(batch, key).items():
        _compare(
            "Zero",
            f"{what} where response_mask is 0: the loss",
            whole,
            _flat(evaluate(loss, outputs, other)),
            tolerance,
            "a mean or a metric that does not weigh with response_mask, or x * response_mask where x may not be "
            "finite; torch.where(mask, x, 0) drops it",
        )


def _prompts(
    loss: Loss, outputs: TokenOutputs, batch: Batch, whole: dict[str, Any], key: Key, tolerance: float
) -> None:
    names = [CARRIED + name for name in outputs.by_name]
    longer, old = with_longer_prompts(carrying(batch, outputs), key, zeros=names)
    result = _flat(evaluate(loss, *apart(longer, outputs)))
    result["gradient"] = {name: g if name in PER_ROW else g[old] for name, g in result["gradient"].items()}
    cause = "batch.lengths or positions also count the prompt; count response_mask"
    _compare("Zero", "with longer prompts, the loss", whole, result, tolerance, cause)


def _zero(loss: Loss, outputs: TokenOutputs, batch: Batch) -> None:
    still = batch.with_tokens(advantages=torch.zeros_like(batch["advantages"]))
    for name, gradient in evaluate(loss, outputs, still)[0]["gradient"].items():
        require(
            not bool(gradient.any()),
            "Zero",
            f"with zero advantages the gradient of {name} reaches {float(gradient.abs().max()):.3g}",
            "an additive term; if it is meant (an entropy bonus, a KL), pass zero_advantages=False",
        )


def _extremes(loss: Loss, outputs: TokenOutputs, batch: Batch) -> None:
    """Log-probs of the model far above and far below all others."""
    mask = batch["response_mask"]
    others = [name for name in batch.per_token if "log_prob" in name]
    for gap in (EXTREME, -EXTREME):
        low, high = -0.1 * mask - abs(gap) * mask, -0.1 * mask
        model, data = (high, low) if gap > 0 else (low, high)
        known = {name: beside(model, t) if "logprobs" in name else t for name, t in outputs.by_name.items()}
        given = {name: beside(data, batch[name]).clone() for name in others}
        result, _ = evaluate(loss, TokenOutputs(known), batch.with_tokens(**given))
        side = "above" if gap > 0 else "below"
        where = f"where the model's log-probs lie {abs(gap):.0f} nats {side} all others"
        _require_finite(result, where, "exp() of a log-ratio that is not clamped")


def _reads_advantages(loss: Loss, outputs: TokenOutputs, batch: Batch) -> bool:
    try:
        for term in loss.terms:
            term.fn(outputs, batch.without("advantages"))
    except KeyError:
        return True
    return False


def _flat(result: tuple[dict[str, Any], Metrics]) -> dict[str, Any]:
    return {**result[0], "metrics": metrics.to_floats(result[1])}


def _compare(
    law: str,
    what: str,
    expected: dict[str, Any],
    actual: dict[str, Any],
    tolerance: float,
    cause: str = "a mean, a count or a maximum over the batch inside the loss; denominators belong in loss_weight, "
    "which steps.aggregate writes over the whole update batch, and metrics need Weighted or Sum",
) -> None:
    expected_numbers, numbers = ({n: result[n] for n in ("total", "metrics")} for result in (expected, actual))
    require_close(law, what, expected_numbers, numbers, cause, tolerance=tolerance, floor=1.0)
    expected_gradient, gradient = ({"gradient": result["gradient"]} for result in (expected, actual))
    require_close(law, what, expected_gradient, gradient, cause, tolerance=tolerance)


def evaluate(loss: Loss, outputs: TokenOutputs, batch: Batch) -> tuple[dict[str, Any], Metrics]:
    """Returns the weighted sum with its gradient with respect to every output, and the metrics.

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
    return {"total": total.detach(), "gradient": gradient}, metrics.merge(*reported)


def computed(term: Term, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Returns the values and the metrics of a term, without its factor.

    Raises:
        LawViolation: they are not what the signature of a loss says.
    """
    returned = term.fn(outputs, batch)
    pair = isinstance(returned, tuple) and len(returned) == 2
    require(
        pair,
        "Signature",
        "the loss does not return a pair",
        "losses without metrics",
    )
    values, reported = returned
    count = batch.num_tokens if term.level == "token" else len(batch)
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    require(
        shape == (count,),
        "Signature",
        f"the loss of level {term.level!r} is {shape}, but the batch has {count} {term.level}s",
        "a sum or a mean taken inside the loss, or another level than the one declared",
    )
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
    require(
        isinstance(reported, dict), "Signature", f"the metrics are a {type(reported).__name__}", "a dict was expected"
    )
    for name, metric in reported.items():
        require(
            isinstance(metric, (Weighted, Sum, Max, Min, Moments)),
            "Signature",
            f"the metric {name!r} is a {type(metric).__name__}; it does not add up over micro-batches",
            "a number; take Weighted, Sum, Max, Min or Moments of verl_fn.state",
        )
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
