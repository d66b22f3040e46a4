"""Keeps derivatives that are not a number away from tokens and rows that have no weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
