"""Moves trees of tensors, and gradients to the device of the state that they update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from verl_fn.state import Grads, Named, Node, TrainState, tree
from verl_fn.state.node import field_names

T = TypeVar("T")


def moved(value: T, device: str | None) -> T:
    """Returns a tree with its tensors on ``device``, or as it is where that is None."""
    return value if device is None else tree.map_tensors(lambda t: t.to(device), value)


def beside(state: TrainState, grads: Grads, move: Callable[[Tensor, torch.device], Tensor] = Tensor.to) -> Grads:
    """Returns the gradients on the device of the parameters: on the CPU, if the state was placed there.

    Args:
        state: the state to update.
        grads: its gradients, on any device.
        move: copies one gradient to a device.

    Raises:
        ValueError: parameters and optimizer lie on different devices.

    Example:
        >>> from verl_fn.state import Key, Params
        >>> meta = TrainState(Params({"w": torch.zeros(1, device="meta")}), None, 0, Key.from_seed(0), 0)
        >>> beside(meta, Grads({"w": torch.zeros(1)}))["w"].device
        device(type='meta')
    """
    # The first tensor of each tree is enough, since `place` moves whole trees; reading every device takes longer
    # than donation does.
    params, moments, gradients = (_device(part) for part in (state.params, state.optimizer, grads))
    if moments not in (None, params):
        raise ValueError(f"parameters lie on {params}, the optimizer on {moments}; place them together to update")
    if params is None or gradients in (None, params):
        return grads
    device = params
    return tree.map_tensors(lambda gradient: move(gradient, device), grads)


def _device(part: object) -> torch.device | None:
    """Returns the device of the first tensor of a tree, None for a tree without tensors."""
    if isinstance(part, Tensor):
        return part.device
    if isinstance(part, Named):
        return next((t.device for t in part.leaves.values()), None)
    children: Iterable[object] = ()
    if isinstance(part, Node):
        children = [getattr(part, name) for name in field_names(type(part))]
    elif isinstance(part, dict):
        children = part.values()
    elif isinstance(part, (tuple, list)):
        children = part
    return next((device for device in map(_device, children) if device is not None), None)
