"""Donation: a function takes over the buffers of an argument; using the argument afterwards is an error.

Each buffer is handled separately, like Swift's copy-on-write. A tensor that only the donated value references is
moved out of it. A tensor with other references is copied first: a reference policy that shares it, a second state
made with ``attrs.evolve``, a local variable or a view may still read it. Donation therefore never changes a value
that is still in use, and copies nothing if there are no other references. Leaves that no update writes to, such as
parameters that are not trained, are shared without a copy.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from . import tree
from .node import FrozenDict, Named, Node, field_names, rebuild

N = TypeVar("N", bound=Node)
M = TypeVar("M", bound=Named)

# The reference count of an item that only a list references: the list's reference and getrefcount's argument.
_ONLY_LIST = 2

# The same for the Python object of a storage, since its tensor keeps one too.
_ONLY_LIST_AND_TENSOR = 3

# The use count of a storage that one tensor uses: one by the tensor, one by the Python object that is asked.
_ONLY_TENSOR = 2

_STORAGE, _CDATA = torch._C.TensorBase.untyped_storage, operator.attrgetter("_cdata")
# No version of an inference tensor equals another one.
_UNCOUNTED = itertools.count(-1, -1)
_RESIZABLE = torch._C.StorageBase.resizable  # type: ignore[attr-defined]  # torch's stubs lack it


def donate(value: N, to: str) -> tuple[N, int]:
    """Moves ``value`` into a new node; using the old one raises ``DonatedError`` from then on.

    Args:
        to: the name of the function that takes the value, for the error message.

    Returns:
        The new node, and the number of leaves that were copied because something else references them.

    Raises:
        DonatedError: the value was donated before.

    Example:
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
    """Moves the fields of ``value`` into a new node and copies nothing, even if other references to leaves exist.

    Args:
        to: the name of the function that takes the value, for the error message.

    Raises:
        DonatedError: the value was donated before.
    """
    cls = type(value)
    names = field_names(cls)
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
    """Takes a value out of a list and makes it the only user of its buffers.

    Args:
        box: a list with the value as its only item. The list has the only reference to the value and is emptied:
            a variable of the caller would count as another user.

    Returns:
        The value, and the number of leaves that were copied because something else references them.
    """
    copies = [0]
    return _take(box, copies), copies[0]


def opened(value: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]] | None:
    """Returns what a container holds, and a function that makes one like it of other contents; None for a leaf.

    The function does not refer to the container.

    Example:
        >>> held, made = opened({"a": 1, "b": 2})
        >>> held, made([3, 4])
        ([1, 2], {'a': 3, 'b': 4})
    """
    kind = type(value)
    if isinstance(value, Node):
        fields = field_names(kind)
        held = [getattr(value, name) for name in fields]
        return held, lambda parts: rebuild(kind, dict(zip(fields, parts, strict=True)))
    if kind in (dict, FrozenDict):
        names = list(value)
        return list(value.values()), lambda parts: kind(zip(names, parts, strict=True))
    return (list(value), kind) if kind in (tuple, list) else None


def divisible(value: Any, names: list[str]) -> bool:
    """Returns whether all tensors of a value are in mappings with exactly these names.

    Example:
        >>> from .train import Params
        >>> divisible((Params({"w": torch.ones(1)}), 3), ["w"]), divisible(torch.ones(1), ["w"])
        (True, False)
    """
    if isinstance(value, Named):
        return not value.leaves or (list(value.leaves) == names and list(value.written()) == names)
    if (inside := opened(value)) is not None:
        return all(divisible(part, names) for part in inside[0])
    return not any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(value))


def divided(box: list[N], groups: Iterable[list[str]]) -> Iterator[list[N]]:
    """Yields a value in parts of the same structure, one for each group of names, with the leaves of these names.

    A part is made when it is asked for, and nothing here refers to it afterwards.

    Args:
        box: a list with the value as its only item; it is emptied.

    Returns:
        An iterator over lists with one part each, to pass to ``owned``.

    Example:
        >>> from .train import Grads
        >>> [list(part[0]) for part in divided([Grads({"a": torch.ones(1), "b": torch.ones(1)})], [["a"], ["b"]])]
        [['a'], ['b']]
    """
    part_of = _divider(box.pop())
    for names in groups:
        yield [part_of(names)]


def _divider(value: Any) -> Callable[[list[str]], Any]:
    """Returns a function that takes the leaves of some names out of a copy of ``value``."""
    kind = type(value)
    if isinstance(value, Named):
        leaves, fixed = dict(value.leaves), _fixed(value)
        return lambda names: rebuild(
            kind, {"leaves": {name: leaves.pop(name) for name in names} if leaves else {}, **fixed}
        )
    if (inside := opened(value)) is not None:
        dividers, made = [_divider(part) for part in inside[0]], inside[1]
        return lambda names: made(part_of(names) for part_of in dividers)
    return lambda names: value


def owned_parts(box: list[M], groups: Iterable[list[str]]) -> Iterator[tuple[M, int]]:
    """Yields a mapping in parts, each of them made the only user of its buffers, as ``owned`` does.

    Leaves can be views of one buffer. So once a group has leaves that share their storage, all later groups are
    checked together with it: views in another group would count as other users.

    Args:
        box: a list with the mapping as its only item; it is emptied. The list has the only reference to it.

    Returns:
        An iterator over parts and the number of leaves that were copied for each.
    """
    kind, fixed = type(box[0]), _fixed(box[0])
    leaves, checked = dict(box.pop().leaves), False
    for names in groups:
        tensors, copies = [leaves.pop(name) for name in names], 0
        if not checked and not _none_shared(tensors):
            later, checked = list(leaves), True
            tensors += [leaves.pop(name) for name in later]
            copies = _copy_shared(tensors)
            leaves = dict(zip(later, tensors[len(names) :], strict=True))
            del tensors[len(names) :]
        yield rebuild(kind, {"leaves": dict(zip(names, tensors, strict=True)), **fixed}), copies


def joined(parts: list[Any]) -> Any:
    """Joins the parts of a divided value; leaves that are not tensors come from the last part.

    Example:
        >>> from .train import Grads
        >>> list(joined([Grads({"a": torch.ones(1)}), Grads({"b": torch.ones(1)})]))
        ['a', 'b']
    """
    last = parts[-1]
    if isinstance(last, Named):
        leaves: dict[str, torch.Tensor] = {}
        for part in parts:
            leaves |= part.leaves
        return with_leaves(last, leaves)
    inside = [found for part in parts if (found := opened(part)) is not None]
    if not inside:
        return last
    columns = zip(*(held for held, _ in inside), strict=True)
    return inside[-1][1](joined(list(column)) for column in columns)


def spare(value: N) -> N:
    """Returns a copy that can be donated instead of ``value``; it shares only the leaves that no update writes to.

    Example:
        >>> from .train import Params
        >>> params = Params({"a": torch.ones(1), "b": torch.ones(1)}, trainable=frozenset({"a"}))
        >>> copy = spare(params)
        >>> copy["a"] is params["a"], copy["b"] is params["b"]
        (False, True)
    """

    def copied(part: Any) -> Any:
        if isinstance(part, Named):
            written = set(part.written())
            return with_leaves(part, ((n, t.clone() if n in written else t) for n, t in part.leaves.items()))
        return part.clone() if isinstance(part, torch.Tensor) else part

    return torch.utils._pytree.tree_map(copied, value, is_leaf=lambda part: isinstance(part, Named))


def is_donated(value: Node) -> bool:
    """Returns whether this node was donated.

    Example:
        >>> from .train import Grads
        >>> grads = Grads({"w": torch.ones(2)})
        >>> is_donated(grads), donate(grads, "apply_update")[1], is_donated(grads)
        (False, 0, True)
    """
    try:
        return object.__getattribute__(value, "_fate") is not None
    except AttributeError:
        return False


def with_leaves(value: Named, leaves: Any) -> Any:
    """Returns a mapping like ``value``, with other leaves, as pairs or by name, and the same other fields."""
    return rebuild(type(value), {"leaves": FrozenDict(leaves), **_fixed(value)})


def _fixed(value: Named) -> dict[str, Any]:
    """Returns the fields of a mapping besides its leaves."""
    return {name: getattr(value, name) for name in field_names(type(value)) if name != "leaves"}


def _take(box: list[Any], copies: list[int]) -> Any:
    """Empties ``box`` and returns its only item, in which every tensor with other references is replaced by a copy.

    Each container is opened, and the reference to it dropped. If that was the only one, the container is freed and
    its items have one reference less; otherwise it still references them, as the reference counts of its tensors
    show. No user of a value therefore needs to be registered.

    Args:
        box: a list with one item.
        copies: a list with one number, to which the number of copied tensors is added.
    """
    kind = type(box[0])
    if issubclass(kind, torch.Tensor):
        copies[0] += _copy_shared(box)
        return box.pop()
    if issubclass(kind, Named):
        names, written, fixed = list(box[0].leaves), list(box[0].written()), _fixed(box[0])
        leaves = dict(box.pop().leaves)
        tensors = [leaves.pop(name) for name in written]
        copies[0] += _copy_shared(tensors)
        leaves |= zip(written, tensors, strict=True)
        if written != names:
            leaves = {name: leaves[name] for name in names}
        return rebuild(kind, {"leaves": FrozenDict(leaves), **fixed})
    if (inside := opened(box[0])) is not None:
        box.pop()
        parts, made = inside
        boxes = [[part] for part in parts]
        # These would be other users of the parts.
        del inside, parts
        return made(_take(one, copies) for one in boxes)
    if any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(box[0])):
        # Other containers, such as named tuples, may not release their items, so all tensors are copied.
        copies[0] += sum(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(box[0]))
        return tree.snapshot(box.pop())
    return box.pop()


def _copy_shared(tensors: list[torch.Tensor]) -> int:
    """Replaces the tensors that are referenced outside this list by copies, and returns the number of copies.

    A GPU may be idle until this loop ends, so the loop makes as few calls as possible.
    """
    if _none_shared(tensors):
        return 0
    references, uses, count = sys.getrefcount, torch._C._storage_Use_Count, 0
    parts: dict[int, list[int]] = {}
    for i in range(len(tensors)):
        if references(tensors[i]) == _ONLY_LIST:
            storage = tensors[i].untyped_storage()
            # Torch did not allocate a storage that is not resizable: it may be the memory of a numpy array or a
            # mapped file that other code may use. Code may also hold the storage itself.
            if storage.resizable() and references(storage) == _ONLY_LIST_AND_TENSOR:
                # Further uses are views.
                if uses(storage._cdata) == _ONLY_TENSOR:
                    continue
                parts.setdefault(storage._cdata, []).append(i)
                continue
        tensors[i] = tensors[i].clone()
        count += 1
    for cdata, indices in parts.items():
        # Views of one buffer, such as FSDP's gradients, need no copies if there are no other views of that buffer.
        if uses(cdata) == len(indices) + 1 and _disjoint([tensors[i] for i in indices]):
            continue
        for i in indices:
            tensors[i] = tensors[i].clone()
            count += 1
    return count


def version_of(t: torch.Tensor) -> int:
    """Returns a number that changes with every write to a tensor, also through a view of it.

    What was computed from a tensor holds as long as the tensor is the same object and has the same version. Torch
    does not count writes to inference tensors, so two calls for one of them return different numbers.

    Example:
        >>> t = torch.zeros(2)
        >>> before = version_of(t)
        >>> t[:1].add_(1)
        tensor([1.])
        >>> version_of(t) == before
        False
    """
    return next(_UNCOUNTED) if t.is_inference() else t._version


def _none_shared(tensors: list[torch.Tensor]) -> bool:
    """Returns whether only this list references these tensors and each has a storage of its own.

    The common case is answered without a loop in Python.
    """
    n = len(tensors)
    if list(map(sys.getrefcount, tensors)).count(_ONLY_LIST) != n:
        return False
    storages = list(map(_STORAGE, tensors))
    if list(map(sys.getrefcount, storages)).count(_ONLY_LIST_AND_TENSOR) != n:
        return False
    if list(map(torch._C._storage_Use_Count, map(_CDATA, storages))).count(_ONLY_TENSOR) != n:
        return False
    return all(map(_RESIZABLE, storages))


def _disjoint(tensors: list[torch.Tensor]) -> bool:
    """Returns whether no two of these views of one storage overlap."""
    spans = sorted((t.storage_offset(), t.numel()) for t in tensors if t.numel())
    dense = all(t.is_contiguous() for t in tensors)
    return dense and all(start + n <= following for (start, n), (following, _) in itertools.pairwise(spans))
