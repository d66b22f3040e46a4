"""Laws of gradients, a part of ``check_backend``: they are the derivative of what ``forward`` computes."""

from __future__ import annotations

from functools import partial
from typing import cast

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import Handle
from verl_fn.state import PER_ROW, Batch, Grads, Metrics, Params, TokenOutputs, TrainState
from verl_fn.steps import Loss, total_loss
from verl_fn.steps import loss as as_loss

from .backend_case import BackendCase, require_agreement
from .builders import in_float64
from .violation import require, require_close, untouched

LAW = "Derivative"
# The largest tolerance of a backend that computes in float32.
PRECISE = 1e-3
# The change of the loss in a step, relative to its size, and how far a slope may be off. Steps exceed rounding, and
# the loss is nearly linear in them. In bfloat16 the slope along a random direction drowns in rounding.
STEP, TOLERANCE = 3e-4, 0.01
STEP_BF16, TOLERANCE_BF16 = 0.03, 0.2


def check_gradients(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks gradients against differences of ``forward``'s outputs, and against ``loss_fn`` where there is one.

    Raises:
        LawViolation: Derivative is broken.
    """
    _differences(case, state)
    _loss_fn(case, state)


def _differences(case: BackendCase, state: Handle[TrainState]) -> None:
    """Compares the gradient of a smooth loss with the change of its value, along the gradient and another direction.

    Weights of both signs show a backend that takes them for magnitudes.
    """
    probe, batch = _sum_of_outputs(case.loss.needs), _with_signed_weights(case)
    grads, _ = case.gradients(state, batch, probe)
    gradient = {name: g.double() for name, g in case.read(grads).items()}
    params = case.read(state).params
    outputs = case.outputs(state.params, batch)
    scale = _magnitude(outputs, batch)
    norm = float(sum(g.square().sum() for g in gradient.values())) ** 0.5
    require(norm > 0, LAW, "the gradient of the sum of all outputs is 0", "a pass that is not differentiated")

    slope = partial(_slope, case, state, grads, batch, probe)
    precise = case.tolerance <= PRECISE
    require_close(
        LAW,
        "the change of the loss along its gradient, against the squared norm of the gradient,",
        norm**2,
        slope(pattern=False, step=(STEP if precise else STEP_BF16) * scale / norm**2),
        "a gradient that is scaled, transposed, of the other sign, of a part, or of the magnitudes of weights",
        tolerance=TOLERANCE if precise else TOLERANCE_BF16,
    )
    if not precise:
        return
    directions = {name: _pattern(params[name]).double() for name in gradient}
    expected = float(sum((g * directions[name]).sum() for name, g in gradient.items()))
    size = sum(d.numel() for d in directions.values())
    length = float(sum(d.square().sum() for d in directions.values())) ** 0.5
    typical = norm * length / size**0.5
    require_close(
        LAW,
        "the change of the loss along another direction, against the gradient in that direction,",
        expected,
        slope(pattern=True, step=STEP * scale / typical),
        "a parameter whose gradient is missing or belongs to another one",
        tolerance=TOLERANCE,
        floor=typical,
    )


def _slope(
    case: BackendCase,
    state: Handle[TrainState],
    grads: Handle[Grads],
    batch: Batch,
    loss: Loss,
    *,
    pattern: bool,
    step: float,
) -> float:
    """Returns the derivative of the loss along a direction, by differences."""

    def value(step: float) -> float:
        moved = case.made(partial(_moved, pattern=pattern, step=step), state, grads)
        return _value(loss, case.outputs(moved, batch), batch)

    def central(step: float) -> float:
        return (value(step) - value(-step)) / (2.0 * step)

    # Richardson extrapolation: the error that grows with the square of the step cancels.
    return (4.0 * central(step) - central(2.0 * step)) / 3.0


def _sum_of_outputs(needs: frozenset[str]) -> Loss:
    """Makes a loss whose values are the sums of the outputs."""

    def sums(names: list[str]) -> object:
        def values(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
            return torch.stack([outputs.by_name[name] for name in names]).sum(0), {}

        return values

    terms: list[Loss] = []
    if tokens := sorted(needs - PER_ROW):
        terms.append(as_loss(needs=tokens)(sums(tokens)))  # type: ignore[arg-type]
    if rows := sorted(needs & PER_ROW):
        terms.append(as_loss(needs=rows, level="row")(sums(rows)))  # type: ignore[arg-type]
    return Loss(tuple(term for one in terms for term in one.terms))


def _with_signed_weights(case: BackendCase) -> Batch:
    """Returns the batch with weights of both signs, and without token 0.

    Token 0 is often the padding token, whose embedding has no gradient in models of transformers.
    """
    batch, stream = case.batch, case.key.fold_in("weights").generator()
    weights = torch.randn(batch.num_tokens, generator=stream) / batch.num_tokens
    row_weights = torch.randn(len(batch), generator=stream) / len(batch)
    tokens = batch.tokens.clamp(min=int(batch.tokens[batch.tokens > 0].min()))
    signed = batch.with_tokens(loss_weight=weights * batch["response_mask"]).with_rows(row_weight=row_weights)
    return attrs.evolve(signed, tokens=tokens)


def _magnitude(outputs: TokenOutputs, batch: Batch) -> float:
    """Returns the sum of the magnitudes of all weighted outputs."""
    weights = {True: batch["row_weight"], False: batch["loss_weight"]}
    return float(sum((weights[name in PER_ROW] * t).double().abs().sum() for name, t in outputs.by_name.items()))


def _value(loss: Loss, outputs: TokenOutputs, batch: Batch) -> float:
    return float(total_loss(loss, in_float64(outputs), in_float64(batch))[0])


def _moved(state: TrainState, grads: Grads, *, pattern: bool, step: float) -> Params:
    """Returns the parameters after a step along the gradient, or along a direction made of the parameters."""
    leaves = {
        name: t + step * (_pattern(t) if pattern else grads[name]) if name in grads else t
        for name, t in state.params.items()
    }
    return attrs.evolve(state.params, leaves=leaves)


def _pattern(t: Tensor) -> Tensor:
    """Returns a direction that looks random but depends only on each element, so that shards have the same one."""
    return (t.abs() + 1e-3) * torch.cos(997.0 * t)


def _loss_fn(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks the gradients against ``torch.func`` gradients of the loss as a pure function of the parameters."""
    if not hasattr(case.backend, "loss_fn"):
        return
    fn = case.backend.loss_fn(case.batch, case.loss)
    grads, reported = case.gradients(state)
    params = cast(Params, state.params)  # A backend with loss_fn has its parameters in this process.
    with untouched("Purity", "loss_fn", params=params):
        derived, of_fn = torch.func.grad(fn, has_aux=True)(params)
    trained = Grads({name: derived[name] for name in params.trained()})
    cause = "a gradient that is scaled, transposed, of the other sign, or of other parameters than the given ones"
    require_agreement(
        # loss_fn may compute log-probs by other operations, whose rounding differs more than between splits.
        attrs.evolve(case, tolerance=3 * case.tolerance),
        LAW,
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
        LAW,
        "the derivative of loss_fn along its gradient, in forward mode,",
        float(trained.global_norm()) ** 2,
        float(slope),
        "an autograd function whose jvp is not its derivative",
        tolerance=2 * case.tolerance,
    )
