"""Donation: the value that is passed in is spent, and its buffers are reused.

Ownership is per leaf buffer, in the manner of Swift's copy-on-write: a tensor that only the donated value
holds is moved out of it; a tensor that anything else still holds (a reference policy taken from the actor,
a second state made with ``attrs.evolve``, a tensor in a local variable, a view) is copied first. So donation
never changes a value under its holder, and without other holders it costs nothing. Leaves that no update writes
(parameters that are not trained) pass on as they are, whoever else holds them.
"""

from __future__ import annotations

import itertools
import operator
import sys
from typing import Any, TypeVar

import attrs
import torch

from . import tree
from .node import Named, Node, rebuild

N = TypeVar("N", bound=Node)

# Python references to an item that only a list holds: the list's own, and the argument of getrefcount.
_ALONE = 2

_STORAGE, _CDATA = torch._C.TensorBase.untyped_storage, operator.attrgetter("_cdata")
_RESIZABLE = torch._C.StorageBase.resizable


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
    return owned([taken(value, to)])


def taken(value: N, to: str) -> N:
    """Moves the fields of ``value`` into a new node and leaves a husk; who else holds the leaves is not looked at.

    Raises:
        DonatedError: the value was donated before.
    """
    cls = type(value)
    names = [f.name for f in attrs.fields(cls)]
    step = getattr(value, "step", None)
    at = f" of step {step}" if isinstance(step, int) else ""
    moved = rebuild(cls, {name: getattr(value, name) for name in names})
    for name in names:
        object.__delattr__(value, name)
    fate = (
        f"this {cls.__name__}{at} was donated to {to}. Use the value that {to} returned; to keep the old one, "
        f"pass donate=False or take snapshot(value) before the call."
    )
    object.__setattr__(value, "_fate", fate)
    return moved


def owned(box: list[N]) -> tuple[N, int]:
    """Empties ``box`` of a value that nothing else holds; leaves that something does hold are copied.

    Returns:
        The value, and how many leaves were copied.
    """
    copies = [0]
    return _take(box, copies), copies[0]


def divisible(value: Any, names: list[str]) -> bool:
    """Tells whether all tensors of a value lie in mappings over exactly these names.

    Example:
        >>> from .train import Params
        >>> divisible((Params({"w": torch.ones(1)}), 3), ["w"]), divisible(torch.ones(1), ["w"])
        (True, False)
    """
    if isinstance(value, Named):
        return not value.leaves or (list(value.leaves) == names and list(value.written()) == names)
    if isinstance(value, Node):
        return all(divisible(getattr(value, f.name), names) for f in attrs.fields(type(value)))
    if isinstance(value, dict):
        return all(divisible(inner, names) for inner in value.values())
    if type(value) in (tuple, list):
        return all(divisible(inner, names) for inner in value)
    return not isinstance(value, torch.Tensor) and not any(
        isinstance(leaf, torch.Tensor) for leaf in tree.leaves(value)
    )


def divided(value: Any, groups: list[list[str]]) -> list[Any]:
    """Returns one value of the same structure for each group of names, with the leaves of these names.

    Example:
        >>> from .train import Grads
        >>> [list(part) for part in divided(Grads({"a": torch.ones(1), "b": torch.ones(1)}), [["a"], ["b"]])]
        [['a'], ['b']]
    """
    kind = type(value)
    if isinstance(value, Named):
        fixed = {f.name: getattr(value, f.name) for f in attrs.fields(kind) if f.name != "leaves"}
        leaves = value.leaves
        return [
            rebuild(kind, {"leaves": {name: leaves[name] for name in names} if leaves else {}} | fixed)
            for names in groups
        ]
    if isinstance(value, Node):
        names = [f.name for f in attrs.fields(kind)]
        columns = [divided(getattr(value, name), groups) for name in names]
        return [rebuild(kind, dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
    if kind is dict:
        columns = [divided(inner, groups) for inner in value.values()]
        if not columns:
            return [{} for _ in groups]
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    if kind in (tuple, list):
        columns = [divided(inner, groups) for inner in value]
        return [kind(row) for row in zip(*columns, strict=True)] if columns else [kind() for _ in groups]
    return [value for _ in groups]


def joined(parts: list[Any]) -> Any:
    """Puts the parts of a divided value together again; what is no tensor comes from the last part.

    Example:
        >>> from .train import Grads
        >>> list(joined([Grads({"a": torch.ones(1)}), Grads({"b": torch.ones(1)})]))
        ['a', 'b']
    """
    last = parts[-1]
    kind = type(last)
    if isinstance(last, Named):
        fixed = {f.name: getattr(last, f.name) for f in attrs.fields(kind) if f.name != "leaves"}
        leaves: dict[str, torch.Tensor] = {}
        for part in parts:
            leaves |= part.leaves
        return rebuild(kind, {"leaves": leaves} | fixed)
    if isinstance(last, Node):
        names = [f.name for f in attrs.fields(kind)]
        return rebuild(kind, {name: joined([getattr(part, name) for part in parts]) for name in names})
    if kind is dict:
        return {name: joined([part[name] for part in parts]) for name in last}
    if kind in (tuple, list):
        return kind(joined(list(column)) for column in zip(*parts, strict=True))
    return last


def spare(value: N) -> N:
    """A value that can be donated in place of this one: a copy that shares only what no update writes.

    >>> from .train import Params
    >>> params = Params({"a": torch.ones(1), "b": torch.ones(1)}, trainable=frozenset({"a"}))
    >>> copy = spare(params)
    >>> copy["a"] is params["a"], copy["b"] is params["b"]
    (False, True)
    """

    def own(part: Any) -> Any:
        if isinstance(part, Named):
            written = set(part.written())
            return attrs.evolve(part, leaves={n: t.clone() if n in written else t for n, t in part.leaves.items()})
        return part.clone() if isinstance(part, torch.Tensor) else part

    return torch.utils._pytree.tree_map(own, value, is_leaf=lambda part: isinstance(part, Named))


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
        copies[0] += _copy_shared(box)
        return box.pop()
    if issubclass(kind, Named):
        names, written = list(box[0].leaves), list(box[0].written())
        fixed = {f.name: getattr(box[0], f.name) for f in attrs.fields(kind) if f.name != "leaves"}
        leaves = dict(box.pop().leaves)
        tensors = [leaves.pop(name) for name in written]
        copies[0] += _copy_shared(tensors)
        leaves |= zip(written, tensors, strict=True)
        return rebuild(kind, {"leaves": {name: leaves[name] for name in names}} | fixed)
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
    if any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(box[0])):
        # Another kind of container (a named tuple): who holds its items cannot be told by taking it apart.
        copies[0] += sum(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(box[0]))
        return tree.snapshot(box.pop())
    return box.pop()


def _refill(names: list[str], items: list[list[Any]], copies: list[int]) -> dict[str, Any]:
    return {name: _take(item, copies) for name, item in zip(names, items, strict=True)}


def _copy_shared(tensors: list[torch.Tensor]) -> int:
    """Replace the tensors that anything beside this list holds by copies, and count them.

    Donation waits for this loop while a GPU has nothing to do, so it calls nothing that it need not.
    """
    if _all_ours(tensors):
        return 0
    references, uses, count = sys.getrefcount, torch._C._storage_Use_Count, 0
    parts: dict[int, list[int]] = {}
    for i in range(len(tensors)):
        if references(tensors[i]) == _ALONE:
            storage = tensors[i].untyped_storage()
            # Used by its tensor and by this very object; more uses are views. What torch did not allocate
            # (numpy's memory, a mapped file) is somebody else's.
            if storage.resizable():
                if uses(storage._cdata) == 2:
                    continue
                parts.setdefault(storage._cdata, []).append(i)
                continue
        tensors[i] = tensors[i].clone()
        count += 1
    for cdata, indices in parts.items():
        # Views of one buffer, as FSDP hands out gradients: ours if nobody beside these tensors has one.
        if uses(cdata) == len(indices) + 1 and _apart([tensors[i] for i in indices]):
            continue
        for i in indices:
            tensors[i] = tensors[i].clone()
            count += 1
    return count


def _all_ours(tensors: list[torch.Tensor]) -> bool:
    """Whether nothing beside this list holds any of these tensors, which have a storage each; no loop in Python."""
    n = len(tensors)
    if list(map(sys.getrefcount, tensors)).count(_ALONE) != n:
        return False
    storages = list(map(_STORAGE, tensors))
    if list(map(torch._C._storage_Use_Count, map(_CDATA, storages))).count(2) != n:
        return False
    return all(map(_RESIZABLE, storages))


def _apart(tensors: list[torch.Tensor]) -> bool:
    """Whether no two of these tensors, views of one storage, have memory in common."""
    spans = sorted((t.storage_offset(), t.numel()) for t in tensors if t.numel())
    dense = all(t.is_contiguous() for t in tensors)
    return dense and all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
