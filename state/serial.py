"""Values as named tensors and scalars, and back: what a file holds, without the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from . import tree

T = TypeVar("T")
Scalar: TypeAlias = "int | float | str | bool"


def flatten(value: Any) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """Every tensor and every scalar of a value, each under its path; None is part of the structure.

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
            raise TypeError(f"{path} is a {type(leaf).__name__}; only tensors, numbers and texts can be saved")
    return tensors, scalars


def unflatten(like: T, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> T:
    """A value of the structure of ``like`` with these leaves; tensors go to the devices of ``like``'s.

    Raises:
        ValueError: a name is missing or left over, or a tensor has another shape or dtype.

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
    found = given[path]
    if isinstance(leaf, Tensor) != isinstance(found, Tensor):
        raise ValueError(f"{path} is a {type(found).__name__} in the saved state, not a {type(leaf).__name__}")
    if not isinstance(leaf, Tensor):
        return type(leaf)(found)
    if leaf.shape != found.shape or leaf.dtype != found.dtype:
        raise ValueError(
            f"{path} is {found.dtype}{tuple(found.shape)} in the saved state, not {leaf.dtype}{tuple(leaf.shape)}"
        )
    # A copy: what a file gave may share a storage or lie where kernels round otherwise.
    return found.to(leaf.device, copy=True)
