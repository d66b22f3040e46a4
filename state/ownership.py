"""Donation: the value that is passed in is spent, and its buffers are reused.

Ownership is per leaf buffer, in the manner of Swift's copy-on-write: a tensor that only the donated value
holds is moved out of it; a tensor that anything else still holds (a reference policy taken from the actor,
a second state made with ``attrs.evolve``, a tensor in a local variable, a view) is copied first. So donation
never changes a value under its holder, and without other holders it costs nothing.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import attrs
import torch

from .node import Named, Node, rebuild

N = TypeVar("N", bound=Node)

# Python references to the only item of a list that a function received: the list's own, and
# the argument of getrefcount.
_ALONE = 2


def donate(value: N, to: str) -> tuple[N, int]:
    """Move ``value`` into a new node and leave a husk that raises ``DonatedError``.

    Returns the new node and the number of leaves that had to be copied because something else holds them.
    ``to`` names the function that takes the value, for the error's text.

    Raises:
        DonatedError: the value was donated before.

    >>> from .train import Grads
    >>> old = Grads({"w": torch.ones(2)})
    >>> new, copies = donate(old, "apply_update")
    >>> copies, len(new)
    (0, 1)
    >>> len(old)
    Traceback (most recent call last):
    verl_fn.state.node.DonatedError: this Grads was donated to apply_update. Use the value ...
    """
    cls = type(value)
    names = [f.name for f in attrs.fields(cls)]
    step = getattr(value, "step", None)
    at = f" of step {step}" if isinstance(step, int) else ""
    fields = [[getattr(value, name)] for name in names]
    for name in names:
        object.__delattr__(value, name)
    fate = (
        f"this {cls.__name__}{at} was donated to {to}. Use the value that {to} returned; to keep the old one, "
        f"pass donate=False or take snapshot(value) before the call."
    )
    object.__setattr__(value, "_fate", fate)
    copies = [0]
    return rebuild(cls, {name: _take(box, copies) for name, box in zip(names, fields, strict=True)}), copies[0]


def is_donated(value: Node) -> bool:
    """Whether this node has been donated.

    >>> from .train import Grads
    >>> grads = Grads({"w": torch.ones(2)})
    >>> is_donated(grads), donate(grads, "apply_update")[1], is_donated(grads)
    (False, 0, True)
    """
    try:
        return object.__getattribute__(value, "_fate") is not None
    except AttributeError:
        return False


def _take(box: list[Any], copies: list[int]) -> Any:
    """Empty ``box``: what it holds, with every tensor that somebody else holds too replaced by a copy.

    A container is opened and then let go: if nobody else holds it, it dies here and its items are left with
    one owner; otherwise it keeps holding them, and they are found shared. No holder needs to be registered.
    """
    kind = type(box[0])
    if issubclass(kind, torch.Tensor):
        if sys.getrefcount(box[0]) == _ALONE and not _has_alias(box[0]):
            return box.pop()
        copies[0] += 1
        return box.pop().clone()
    if issubclass(kind, Named):
        names = list(box[0].leaves)
        fixed = {f.name: getattr(box[0], f.name) for f in attrs.fields(kind) if f.name != "leaves"}
        items = [[tensor] for tensor in box.pop().leaves.values()]
        return rebuild(kind, {"leaves": _refill(names, items, copies)} | fixed)
    if issubclass(kind, Node):
        names = [f.name for f in attrs.fields(kind)]
        items = [[getattr(box[0], name)] for name in names]
        box.pop()
        return rebuild(kind, _refill(names, items, copies))
    if kind is dict:
        names = list(box[0])
        items = [[item] for item in box.pop().values()]
        return _refill(names, items, copies)
    if kind in (tuple, list):
        items = [[item] for item in box.pop()]
        return kind(_take(item, copies) for item in items)
    return box.pop()


def _refill(names: list[str], items: list[list[Any]], copies: list[int]) -> dict[str, Any]:
    return {name: _take(item, copies) for name, item in zip(names, items, strict=True)}


def _has_alias(t: torch.Tensor) -> bool:
    """Whether another tensor (a view, ``detach()``) shares the storage."""
    # Two uses are the tensor itself and the Python storage object made by this very call.
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) > 2
