"""Optimizers for leaves: masks of weight decay speak of canonical names, and a leaf may hold several tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron.names import Canonical
from verl_fn.state import Named
from verl_fn.steps import Chain


def for_leaves(optimizer: Any, leaves: Iterable[str], canonical: Canonical) -> Any:
    """Returns the same optimizer with masks that list leaves.

    Args:
        optimizer: from ``verl_fn.steps``; its masks take canonical names and whole tensors.
        leaves: the names of this rank's leaves.
        canonical: the canonical names.

    Raises:
        LayoutError: a mask treats two tensors of one leaf differently.

    Example:
        >>> from verl_fn.steps import adamw, no_decay
        >>> canonical = Canonical({"q.weight": torch.empty(1), "k.weight": torch.empty(1)})
        >>> decayed = adamw(1e-3, weight_decay_mask=no_decay("bias"))
        >>> for_leaves(decayed, ["q.weight+k.weight"], canonical).weight_decay_mask
        ByName(decays=(('q.weight+k.weight', True),))
        >>> for_leaves(adamw(1e-3, weight_decay_mask=no_decay("q")), ["q.weight+k.weight"], canonical)
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: weight_decay_mask decays only some of q.weight, k.weight, which ...
    """
    if isinstance(optimizer, Chain):
        return attrs.evolve(optimizer, parts=tuple(for_leaves(part, leaves, canonical) for part in optimizer.parts))
    mask = getattr(optimizer, "weight_decay_mask", None)
    if mask is None:
        return optimizer
    decays: dict[str, bool] = {}
    for leaf in leaves:
        names = [canonical.place(hub).name for hub in leaf.split("+")]
        answers = {bool(mask(name, canonical.shapes[name])) for name in names}
        if len(answers) > 1:
            raise LayoutError(
                f"weight_decay_mask decays only some of {', '.join(names)}, which Megatron holds as one parameter; "
                "let it treat them alike"
            )
        decays[leaf] = answers.pop()
    return attrs.evolve(optimizer, weight_decay_mask=decays)


def check_slots(optimizer: Any) -> None:
    """Raises an error for an optimizer's state that has tensors outside of ``Slots``: they belong to no parameter.

    Raises:
        LayoutError: the state has such tensors.

    Example:
        >>> check_slots({"momentum": torch.zeros(8)})
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: the optimizer's state has a tensor of shape [8] outside of Slots: ...
    """
    for part in pytree.tree_leaves(optimizer, is_leaf=lambda part: isinstance(part, Named)):
        if isinstance(part, torch.Tensor):
            raise LayoutError(
                f"the optimizer's state has a tensor of shape {list(part.shape)} outside of Slots: put tensors of "
                "the parameters' shapes into Slots under their names, so that they are divided as the parameters are"
            )
