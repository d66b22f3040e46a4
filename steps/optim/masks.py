"""Masks that select the parameters to which weight decay applies, by canonical name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import attrs
from torch import Tensor

Mask: TypeAlias = Callable[[str, Tensor], bool]


@attrs.frozen
class NoDecay:
    """A mask that excludes parameters by parts of their names; ``no_decay`` makes it."""

    parts: tuple[str, ...]

    def __call__(self, name: str, tensor: Tensor) -> bool:
        return not any(part in name for part in self.parts)


def no_decay(*parts: str) -> NoDecay:
    """Makes a mask that decays each parameter unless its canonical name contains one of ``parts``.

    Example:
        >>> import torch
        >>> mask = no_decay("bias", "norm")
        >>> mask, mask("model.norm.weight", torch.zeros(1)), mask("lm_head.weight", torch.zeros(1))
        (NoDecay(parts=('bias', 'norm')), False, True)
    """
    return NoDecay(parts)


def matrices(name: str, tensor: Tensor) -> bool:
    """Decays parameters of two and more dimensions: no biases and no weights of norms.

    Example:
        >>> import torch
        >>> matrices("model.norm.weight", torch.zeros(4)), matrices("lm_head.weight", torch.zeros(4, 4))
        (False, True)

    Source: Megatron-LM exempts the same parameters from weight decay.
    """
    return tensor.ndim > 1


@attrs.frozen
class ByName:
    """A mask that lists all parameters; ``as_mask`` makes it from a mapping."""

    decays: tuple[tuple[str, bool], ...]

    @functools.cached_property
    def _listed(self) -> dict[str, bool]:
        return dict(self.decays)

    def __call__(self, name: str, tensor: Tensor) -> bool:
        return self._listed[name]

    def check(self, names: Iterable[str]) -> None:
        """Raises an error for a trained parameter that the mapping lacks.

        Raises:
            ValueError: there is one.
        """
        for name in names:
            if name not in self._listed:
                raise ValueError(
                    f"weight_decay_mask has no value for {name}; give it one for every trained parameter"
                )


def as_mask(mask: Mask | Mapping[str, bool] | None) -> Mask | None:
    """Converts a mapping by name to a mask; a function of name and tensor, or None for all, stays as it is.

    On sharded backends the function gets this process's shard of a tensor. It has as many dimensions as the whole
    tensor, but another first size.

    Example:
        >>> as_mask({"w": True, "b": False}) == as_mask({"b": False, "w": True})
        True
    """
    if isinstance(mask, Mapping):
        return ByName(tuple(sorted((name, bool(decays)) for name, decays in mask.items())))
    return mask
