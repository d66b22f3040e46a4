"""What a loss gives for outputs and a batch, as ``check_loss`` compares it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_fn.state import PER_ROW, Batch, Max, Metrics, Min, Moments, Sum, TokenOutputs, Weighted, metrics, tree
from verl_fn.steps import Loss, Term
from verl_fn.steps.losses.contract import WEIGHTS

from .builders import beside
from .violation import require, require_equal

CARRIED = "output of the model: "


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
        f"the loss of level {term.level!r} is {shape} where the batch has {count} {term.level}s",
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
            f"the metric {name!r} is a {type(metric).__name__}, which does not add up over micro-batches",
            "a number where verl_fn.state has Weighted, Sum, Max, Min and Moments",
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
