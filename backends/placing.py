"""Where the parts of a state lie, and gradients beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.state import Grads, Named, Node, TrainState, tree


def beside(state: TrainState, grads: Grads, move: Callable[[Tensor, torch.device], Tensor] = Tensor.to) -> Grads:
    """The gradients where the parameters are: on the CPU, if the state was placed there.

    Args:
        move: how one of them goes to a device.

    Raises:
        ValueError: parameters and optimizer lie on different devices.

    >>> from verl_fn.state import Key, Params
    >>> meta = TrainState(Params({"w": torch.zeros(1, device="meta")}), None, 0, Key.from_seed(0), 0)
    >>> beside(meta, Grads({"w": torch.zeros(1)}))["w"].device
    device(type='meta')
    """
    # One tensor speaks for its tree, since place moves whole trees; a look at all costs more than donation.
    params, moments, gradient = (_device(part) for part in (state.params, state.optimizer, grads))
    if moments not in (None, params):
        raise ValueError(f"parameters lie on {params}, the optimizer on {moments}; place them together to update")
    if gradient in (None, params):
        return grads
    return tree.map_tensors(lambda g: move(g, params), grads)


def _device(part: Any) -> torch.device | None:
    """Where the first tensor of a tree lies."""
    if isinstance(part, Tensor):
        return part.device
    if isinstance(part, Named):
        return next((t.device for t in part.leaves.values()), None)
    if isinstance(part, Node):
        inside = [getattr(part, f.name) for f in attrs.fields(type(part))]
    else:
        inside = list(part.values()) if isinstance(part, dict) else part if isinstance(part, (tuple, list)) else []
    return next((found for found in map(_device, inside) if found is not None), None)
