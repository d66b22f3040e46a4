"""Read-only dictionaries for immutable values."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from torch.utils import _pytree as pytree

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dictionary that cannot be changed. ``|``, ``copy`` and ``dict(...)`` return ordinary dictionaries.

    Example:
        >>> frozen = FrozenDict({"w": 1})
        >>> frozen | {"b": 2}
        {'w': 1, 'b': 2}
        >>> frozen["b"] = 2
        Traceback (most recent call last):
        TypeError: this mapping is part of an immutable value: make a new value, such as ...
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        # Pickle would otherwise set the items of an empty one.
        return FrozenDict, (dict(self),)


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        "this mapping is part of an immutable value: make a new value, such as attrs.evolve(params, "
        "leaves={**params.leaves, name: tensor}) or batch.with_tokens(name=tensor)"
    )


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(FrozenDict, _name, _refuse)


def frozen_dict(mapping: Any) -> FrozenDict[Any, Any]:
    """Returns a read-only copy of a mapping; a ``FrozenDict`` is returned as it is."""
    return mapping if type(mapping) is FrozenDict else FrozenDict(mapping)


pytree.register_pytree_node(
    FrozenDict,
    lambda value: (list(value.values()), list(value)),
    lambda leaves, names: FrozenDict(zip(names, leaves, strict=True)),
    flatten_with_keys_fn=lambda value: ([(pytree.MappingKey(n), x) for n, x in value.items()], list(value)),
    serialized_type_name="verl_fn.FrozenDict",
)
