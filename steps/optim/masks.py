"""Which parameters weight decay pulls on, by canonical name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
from torch import Tensor

Mask: TypeAlias = Callable[[str, Tensor], bool]


@attrs.frozen
class NoDecay:
    """What ``no_decay`` makes."""

    parts: tuple[str, ...]

    def __call__(self, name: str, tensor: Tensor) -> bool:
        return not any(part in name for part in self.parts)


def no_decay(*parts: str) -> NoDecay:
    """Makes the mask that decays all parameters but those whose canonical name contains one of ``parts``.

    Example:
        >>> import torch
        >>> mask = no_decay("bias", "norm")
        >>> mask, mask("model.norm.weight", torch.zeros(1)), mask("lm_head.weight", torch.zeros(1))
        (NoDecay(parts=('bias', 'norm')), False, True)
    """
    return NoDecay(parts)


@attrs.frozen
class ByName:
    """A mask that lists every parameter; ``as_mask`` makes it of a mapping."""

    decays: tuple[tuple[str, bool], ...]

    def __call__(self, name: str, tensor: Tensor) -> bool:
        listed = dict(self.decays)
        if name not in listed:
            raise ValueError(f"weight_decay_mask says nothing of {name}; give it a value for every trained parameter")
        return listed[name]


def as_mask(mask: Mask | Mapping[str, bool] | None) -> Mask | None:
    """Converts what a user gives for a mask: a function of name and tensor, a mapping by name, or None for all.

    On sharded backends the tensor is this process's shard: its number of dimensions is the whole tensor's, its first
    size is not.

    Example:
        >>> as_mask({"w": True, "b": False}) == as_mask({"b": False, "w": True})
        True
    """
    if isinstance(mask, Mapping):
        return ByName(tuple(sorted((name, bool(decays)) for name, decays in mask.items())))
    return mask
