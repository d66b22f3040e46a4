"""A model and its adapters to publish apart: the model once, and the adapters whenever they change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import attrs
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from verl_fn.backends.protocol.weights import TensorSpec, WeightSource

from .cut import Cut
from .intake import checksum
from .source import Weights, specs_of

# Checksums of tensors that are alive; the weights that adapters are added to do not change in a run.
_CHECKSUMS = WeakTensorKeyDictionary()


@attrs.frozen(eq=False)
class Apart:
    """A model and its adapters, not merged.

    Attributes:
        whole: the model without adapters, followed by the adapters.
        adapters: the adapters alone, for an engine that has the model.
        identify: returns a string that differs where the model without adapters differs.
    """

    whole: WeightSource
    adapters: WeightSource
    identify: Callable[[], str]


def apart(
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    *,
    rows: Callable[[Tensor], Tensor] = lambda t: t,
    cut: Callable[[tuple[TensorSpec, ...]], Cut | None] = lambda specs: None,
    local: Callable[[Tensor], Tensor] = lambda t: t,
) -> Apart | None:
    """Returns the sources of a model and its adapters; None for a model without adapters.

    Args:
        base: the model's tensors without adapters.
        adapters: the tensors of the adapters.
        rows: returns the rows of a tensor to send.
        cut: returns which rows these are, of several senders.
        local: returns what this process holds of a tensor, which identifies it.

    Example:
        >>> import torch
        >>> base = {"m.weight": torch.ones(2, 2)}
        >>> first, second = (apart(base, {"m.lora_A.weight": torch.full((1, 2), x)}) for x in (1.0, 2.0))
        >>> [spec.name for spec in first.whole.specs], [spec.name for spec in first.adapters.specs]
        (['m.weight', 'm.lora_A.weight'], ['m.lora_A.weight'])
        >>> first.identify() == second.identify()
        True
    """
    if not adapters:
        return None

    def source(tensors: Mapping[str, Tensor]) -> Weights:
        specs = specs_of(tensors)
        return Weights(specs, lambda: ((name, rows(t)) for name, t in tensors.items()), cut(specs))

    def identify() -> str:
        held = [(name, t.dtype, tuple(t.shape), _checksum(local(t))) for name, t in base.items()]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    return Apart(source({**base, **adapters}), source(adapters), identify)


def apart_of(source: WeightSource) -> Apart | None:
    """Returns the unmerged form of a source; None where it has no adapters."""
    found: Apart | None = getattr(source, "apart", None)
    return found


def _checksum(t: Tensor) -> int:
    if t not in _CHECKSUMS:
        _CHECKSUMS[t] = checksum(t)
    value: int = _CHECKSUMS[t]
    return value
