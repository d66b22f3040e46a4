"""Functions of whole values: ``map``, ``leaves``, ``paths``, ``equal``, ``digest``, ``snapshot``, ``flatten``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .node import FrozenDict

T = TypeVar("T")
Scalar: TypeAlias = "int | float | str | bool"


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


def flatten(value: Any) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """Returns the tensors and the scalars of a value, each under its path.

    None counts as structure, so it appears in neither.

    Raises:
        TypeError: a leaf is neither a tensor nor a number nor a string.

    Example:
        >>> import torch
        >>> flatten({"w": torch.zeros(1), "step": 3})[1]
        {"['step']": 3}
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Scalar] = {}
    for path, leaf in paths(value).items():
        if isinstance(leaf, Tensor):
            tensors[path] = leaf
        elif isinstance(leaf, (int, float, str, bool)):
            scalars[path] = leaf
        elif leaf is not None:
            raise TypeError(f"{path} is a {type(leaf).__name__}; only tensors, numbers and strings can be saved")
    return tensors, scalars


def unflatten(like: T, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> T:
    """Makes a value with the structure of ``like`` and the given leaves.

    Args:
        like: gives the structure, and the device, shape and dtype of each tensor.
        tensors: the tensors by path, as ``flatten`` returns them.
        scalars: the scalars by path.

    Raises:
        ValueError: a leaf is missing, an extra one is given, or one has another kind, shape or dtype.

    Example:
        >>> import torch
        >>> unflatten({"w": torch.zeros(1), "step": 0}, {"['w']": torch.ones(1)}, {"['step']": 3})
        {'w': tensor([1.]), 'step': 3}
    """
    wanted = [path for path, leaf in paths(like).items() if leaf is not None]
    given = {**tensors, **scalars}
    if missing := [path for path in wanted if path not in given]:
        raise ValueError(f"saved state lacks {len(missing)} of {len(wanted)} leaves, such as {missing[:3]}")
    if extra := [path for path in given if path not in wanted]:
        raise ValueError(f"saved state has {len(extra)} leaves too many, such as {extra[:3]}")
    return pytree.tree_map_with_path(lambda path, leaf: _checked(pytree.keystr(path), leaf, given), like)


def _checked(path: str, leaf: Any, given: Mapping[str, Any]) -> Any:
    if leaf is None:
        return None
    saved = given[path]
    if isinstance(leaf, Tensor) != isinstance(saved, Tensor):
        raise ValueError(f"{path} is a {type(saved).__name__} in the saved state, not a {type(leaf).__name__}")
    if not isinstance(leaf, Tensor):
        # A number that begins as 0 may be 0.5 when it is saved.
        return saved if type(leaf) is int and type(saved) is float else type(leaf)(saved)
    if leaf.shape != saved.shape or leaf.dtype != saved.dtype:
        raise ValueError(
            f"{path} is {saved.dtype}{tuple(saved.shape)} in the saved state, not {leaf.dtype}{tuple(leaf.shape)}"
        )
    # Tensors read from a file can share a storage, and kernels can round differently at their memory alignment.
    return saved.to(leaf.device, copy=True)
