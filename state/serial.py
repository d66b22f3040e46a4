"""Converts values to named tensors and scalars for a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from . import tree

T = TypeVar("T")
Scalar: TypeAlias = "int | float | str | bool"


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
    for path, leaf in tree.paths(value).items():
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
    wanted = [path for path, leaf in tree.paths(like).items() if leaf is not None]
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
