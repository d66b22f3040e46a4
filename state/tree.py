"""Functions of whole values: ``map``, ``leaves``, ``paths``, ``equal``, ``digest``, ``snapshot``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from .node import FrozenDict

T = TypeVar("T")


def map(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Applies ``fn`` to every leaf of trees that have the same structure.

    Example:
        >>> map(lambda a, b: a + b, {"x": 1}, {"x": 2})
        {'x': 3}
    """
    return pytree.tree_map(fn, tree, *rest)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: T) -> T:
    """Applies ``fn`` to every tensor; other leaves, such as counts, stay as they are."""
    return pytree.tree_map(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaves(tree: Any) -> list[Any]:
    """Returns all leaves in the order of the structure.

    Example:
        >>> leaves({"a": (1, 2), "b": 3})
        [1, 2, 3]
    """
    return pytree.tree_leaves(tree)


def paths(tree: Any) -> dict[str, Any]:
    """Returns all leaves by path; a path is written like the Python expression that reads the leaf.

    Example:
        >>> paths({"a": (1, 2)})
        {"['a'][0]": 1, "['a'][1]": 2}
    """
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return {pytree.keystr(path): leaf for path, leaf in pairs}


def first_difference(a: Any, b: Any) -> str | None:
    """Returns the path of the first leaf that differs bitwise, or None if the values are equal.

    A NaN equals a NaN with the same bits. If only the structures differ, the result is ``"structure"``.
    """
    a, b = (dict(value) if isinstance(value, FrozenDict) else value for value in (a, b))
    left, right = paths(a), paths(b)
    if list(left) != list(right):
        only = [p for p in (*left, *right) if (p in left) != (p in right)]
        return only[0] if only else "structure"
    difference = next((path for path in left if not _same(left[path], right[path])), None)
    if difference is None and pytree.tree_structure(a) != pytree.tree_structure(b):
        return "structure"
    return difference


def equal(a: Any, b: Any) -> bool:
    """Returns whether two values have the same structure and bitwise equal leaves.

    Example:
        >>> equal({"w": torch.zeros(2)}, {"w": torch.zeros(2)}), equal({"w": 1}, {"v": 1})
        (True, False)
    """
    return first_difference(a, b) is None


def digest(tree: Any) -> str:
    """Returns a hash of all paths, dtypes, shapes and bytes; it is the same on every machine.

    Example:
        >>> digest({"w": torch.zeros(2)}) == digest({"w": torch.zeros(2)}) != digest({"w": torch.zeros(3)})
        True
    """
    h = hashlib.sha256()
    for path, leaf in paths(tree).items():
        h.update(path.encode())
        if isinstance(leaf, torch.Tensor):
            h.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            # ``.numpy()`` adds a reference to the storage, so donation would copy it; hash a clone.
            h.update(_bytes(leaf).clone().numpy().data)
        else:
            h.update(f"{type(leaf).__name__}{leaf!r}".encode())
    return h.hexdigest()


def snapshot(tree: T) -> T:
    """Returns an independent copy: it stays valid when the original is donated.

    Raises:
        TypeError: the tree contains a handle to a value on other workers; the message explains how to copy it.
    """
    for leaf in leaves(tree):
        if hasattr(leaf, "snapshot"):
            leaf.snapshot()
    return map_tensors(torch.clone, tree)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    # Only the part of a sharded tensor that this process holds.
    t = t.to_local() if hasattr(t, "to_local") else t
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        alike = x.dtype == y.dtype and x.shape == y.shape and x.device == y.device
        return alike and torch.equal(_bytes(x), _bytes(y))
    return type(x) is type(y) and (x == y or repr(x) == repr(y))
