"""Immutable tree nodes: frozen attrs classes that ``torch.utils._pytree`` sees through.

Every value of the engine is a node, so one ``tree.map`` serves parameters, batches and algorithm states
alike. Unflattening goes through ``object.__new__``: converters and validators run when a person builds a
value, never when a transformation rebuilds one around tracers or placeholders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, dataclass_transform

import attrs
import torch
from torch.utils import _pytree as pytree

C = TypeVar("C", bound=type)


class DonatedError(RuntimeError):
    """A value was used after it had been donated."""


class Node:
    """Base of all values. A donated node has lost its fields, and says so when one is read."""

    __slots__ = ("_fate", "_names")

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal lookup fails: live nodes pay nothing for the check.
        if not name.startswith("_"):
            try:
                fate = object.__getattribute__(self, "_fate")
            except AttributeError:
                fate = None
            if fate is not None:
                raise DonatedError(fate)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


def static(**kwargs: Any) -> Any:
    """A field that belongs to the structure of a node, not to its leaves."""
    return attrs.field(metadata={"static": True}, **kwargs)


def field_names(cls: type, is_static: bool) -> tuple[str, ...]:
    return tuple(f.name for f in attrs.fields(cls) if bool(f.metadata.get("static")) == is_static)


def rebuild(cls: type, values: Mapping[str, Any]) -> Any:
    """A node of ``cls`` with these fields, without running its constructor."""
    made = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static))
def node(cls: C) -> C:
    """Make ``cls`` a frozen attrs class and a registered pytree node.

    >>> @node
    ... class Pair(Node):
    ...     left: int
    ...     right: int
    >>> pytree.tree_map(lambda x: x + 1, Pair(1, 2))
    Pair(left=2, right=3)
    """
    made = attrs.frozen(eq=False, slots=True)(cls)
    children, fixed = field_names(made, False), field_names(made, True)

    def flatten(value: Any) -> tuple[list[Any], Any]:
        return [getattr(value, n) for n in children], tuple(getattr(value, n) for n in fixed)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(value)
        return [(pytree.GetAttrKey(n), x) for n, x in zip(children, leaves, strict=True)], context

    def unflatten(leaves: Any, context: Any) -> Any:
        return rebuild(made, dict(zip(children, leaves, strict=True)) | dict(zip(fixed, context, strict=True)))

    _register(made, flatten, unflatten, flatten_with_keys)
    return made  # type: ignore[return-value]


class Named(Node, Mapping[str, torch.Tensor]):
    """A node that is a mapping from canonical name to tensor: parameters, gradients, moments.

    Subclasses are made with ``@named``; their field ``leaves`` holds the mapping.
    """

    __slots__ = ()
    leaves: dict[str, torch.Tensor]

    def written(self) -> Iterable[str]:
        """Names of the leaves that an update may write; the others may be shared for ever."""
        return self.leaves

    # Identity, not Mapping's item-wise comparison, which tensors do not support; see tree.equal.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __repr__(self) -> str:
        total = sum(t.numel() for t in self.leaves.values())
        return f"{type(self).__name__}({len(self)} tensors, {total:,} elements)"


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static))
def named(cls: C) -> C:
    """Like ``node`` for a ``Named`` mapping: its tensors are the children, under their own names.

    >>> @named
    ... class Moments(Named):
    ...     leaves: dict[str, torch.Tensor]
    >>> pytree.tree_map(lambda t: t * 2, Moments({"w": torch.ones(2)}))["w"]
    tensor([2., 2.])
    """
    made = attrs.frozen(eq=False, slots=True, repr=False)(cls)
    fixed = tuple(n for n in (f.name for f in attrs.fields(made)) if n != "leaves")

    def flatten(value: Any) -> tuple[list[Any], Any]:
        return list(value.leaves.values()), (tuple(value.leaves), tuple(getattr(value, n) for n in fixed))

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(value)
        return [(pytree.MappingKey(n), x) for n, x in zip(context[0], leaves, strict=True)], context

    def unflatten(leaves: Any, context: Any) -> Any:
        names, statics = context
        return rebuild(
            made, {"leaves": dict(zip(names, leaves, strict=True))} | dict(zip(fixed, statics, strict=True))
        )

    _register(made, flatten, unflatten, flatten_with_keys)
    return made  # type: ignore[return-value]


def _register(cls: type, flatten: Any, unflatten: Any, flatten_with_keys: Any) -> None:
    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"verl_fn.{cls.__qualname__}",
    )
