"""Refuses derivatives of functions that have none."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from verl_fn.errors import UserError

from . import tree


class NotDifferentiable(UserError, RuntimeError):
    """A derivative was taken of a function that has none."""


def refuse_derivatives(function: str, *values: Any) -> None:
    """Raises an error if a derivative with respect to ``values`` is being taken; without it, that would be 0.

    Args:
        function: the name of the function that has no derivative.
        values: its arguments.

    Raises:
        NotDifferentiable: ``torch.func`` or forward-mode differentiation tracks one of their tensors.

    Example:
        >>> def norm(w):
        ...     refuse_derivatives("norm", {"w": w})
        ...     return w.norm()
        >>> torch.func.grad(norm)(torch.ones(2))
        Traceback (most recent call last):
        verl_fn.state.derivatives.NotDifferentiable: norm has no derivative, and torch would return 0; ...
    """
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        return
    if any(_is_tracked(leaf) for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor)):
        raise NotDifferentiable(
            f"{function} has no derivative, and torch would return 0; differentiate the function of parameters that "
            "backend.loss_fn(batch, loss) returns"
        )


def _is_tracked(t: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        if functorch.is_gradtrackingtensor(t):
            return True
        t = functorch.get_unwrapped(t)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None
