"""Immutable values: nodes, read-only dictionaries, and keys, of which all randomness is a function.

Nodes are frozen attrs classes registered with ``torch.utils._pytree``. Every value of the engine is a node, so the
same ``tree.map`` works on parameters, batches and algorithm states. Unflattening calls ``object.__new__`` instead of
the constructor: converters and validators run when user code makes a value, but not when a transformation rebuilds
one around tracers or placeholders.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, cast, dataclass_transform

import attrs
import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.errors import ArgumentError

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
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


class DonatedError(RuntimeError):
    """Raised when a value is used after it was donated."""


class Node:
    """Base class of all values. A node that was donated has no fields, and reading one raises ``DonatedError``."""

    __slots__ = ("_fate", "_names")

    def __init__(self, *args: Any, **fields: Any) -> None:
        name = type(self).__name__
        raise ArgumentError(f"{name} has no fields yet: write @node, of verl_fn, above class {name}(Node)")

    def __getattr__(self, name: str) -> Any:
        # Python calls this only if the normal lookup fails, so the check costs other nodes nothing.
        if not name.startswith("_"):
            try:
                fate = object.__getattribute__(self, "_fate")
            except AttributeError:
                fate = None
            if fate is not None:
                raise DonatedError(fate)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


def static(**kwargs: Any) -> Any:
    """Declares a field that is part of a node's structure and not one of its leaves."""
    return attrs.field(metadata={"static": True}, **kwargs)


def child(**kwargs: Any) -> Any:
    """Declares a field of a ``named`` class that is a node of its own, beside the leaves."""
    return attrs.field(metadata={"child": True}, **kwargs)


def mapping(*, converter: Callable[[Any], FrozenDict[Any, Any]] = frozen_dict, **kwargs: Any) -> Any:
    """Declares a field that holds a mapping by name, of which the node keeps a read-only copy."""
    return attrs.field(converter=converter, metadata={"mapping": True}, **kwargs)


def _cached(fn: F) -> F:
    return cast(F, functools.cache(fn))


@_cached
def field_names(cls: type) -> tuple[str, ...]:
    """Returns the names of all fields of a node class."""
    return tuple(f.name for f in attrs.fields(cls))


def _fields_where(cls: type, key: str, holds: bool) -> tuple[str, ...]:
    return tuple(f.name for f in attrs.fields(cls) if bool(f.metadata.get(key)) == holds)


def rebuild(cls: type, values: Mapping[str, Any]) -> Any:
    """Makes a node of ``cls`` with these fields without running its constructor."""
    new: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static, mapping))
def node(cls: C) -> C:
    """Makes ``cls`` a frozen attrs class and registers it as a pytree node.

    Example:
        >>> @node
        ... class Pair(Node):
        ...     left: int
        ...     right: int
        >>> pytree.tree_map(lambda x: x + 1, Pair(1, 2))
        Pair(left=2, right=3)
    """
    frozen: C = attrs.frozen(eq=False, slots=True)(cls)
    return _registered(frozen, _fields_where(frozen, "static", False), _fields_where(frozen, "static", True))


class Named(Node, Mapping[str, torch.Tensor]):
    """A node that is a mapping from canonical name to tensor, such as parameters or gradients.

    Subclasses are decorated with ``@named``; their field ``leaves`` holds the mapping.
    """

    __slots__ = ()
    leaves: Mapping[str, torch.Tensor]

    def written(self) -> Iterable[str]:
        """Returns the names of the leaves that an update may write to; the others can be shared between values."""
        return self.leaves

    # Mapping compares its items, and that fails for tensors. Nodes are compared by identity, or with tree.equal.
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


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static, child, mapping))
def named(cls: C) -> C:
    """Makes ``cls`` a frozen attrs class and registers it as a pytree node whose children are its tensors, by name.

    Other fields are part of its structure, except the ones that are declared with ``child``.

    Example:
        >>> @named
        ... class Moments(Named):
        ...     leaves: Mapping[str, torch.Tensor]
        >>> pytree.tree_map(lambda t: t * 2, Moments({"w": torch.ones(2)}))["w"]
        tensor([2., 2.])
    """
    frozen: C = attrs.frozen(eq=False, slots=True, repr=False, field_transformer=_with_frozen_leaves)(cls)
    fixed = tuple(name for name in _fields_where(frozen, "child", False) if name != "leaves")
    return _registered(frozen, _fields_where(frozen, "child", True), fixed, inline=True)


def _with_frozen_leaves(cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    return [f.evolve(converter=frozen_dict) if f.name == "leaves" else f for f in fields]


def _registered(cls: C, children: tuple[str, ...], fixed: tuple[str, ...], *, inline: bool = False) -> C:
    """Registers a class as a pytree node; ``inline`` makes what its field ``leaves`` holds children by name."""
    mappings = _fields_where(cls, "mapping", True)

    def flatten(value: Any) -> tuple[list[Any], Any]:
        leaves = value.leaves if inline else {}
        # Ordinary dictionaries in the structure, so that a node made around others has an equal structure.
        fields = [dict(getattr(value, n)) if n in mappings else getattr(value, n) for n in children]
        return [*leaves.values(), *fields], (tuple(leaves), tuple(getattr(value, n) for n in fixed))

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parts, context = flatten(value)
        keys = [*map(pytree.MappingKey, context[0]), *map(pytree.GetAttrKey, children)]
        return list(zip(keys, parts, strict=True)), context

    def unflatten(parts: Any, context: Any) -> Any:
        (names, statics), parts = context, list(parts)
        fields = dict(zip((*children, *fixed), (*parts[len(names) :], *statics), strict=True))
        fields |= {n: FrozenDict(fields[n]) for n in mappings if type(fields[n]) is dict}
        return rebuild(cls, {"leaves": FrozenDict(zip(names, parts, strict=False))} | fields if inline else fields)

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"verl_fn.{cls.__qualname__}",
    )
    return cls


@node
class Key(Node):
    """A pseudo-random key: every random number is a function of a key and a counter.

    Keys are derived by name or number. A sampling seed therefore depends on its purpose, never on a position in a
    batch or on a rank.

    Example:
        >>> key = Key.from_seed(0)
        >>> key.fold_in("rollout").seed() == key.fold_in("rollout").seed() != key.fold_in("data").seed()
        True
    """

    bits: int

    @classmethod
    def from_seed(cls, seed: int) -> Key:
        """Makes the key of an integer seed of any size."""
        return cls(_hash(b"seed", str(int(seed)).encode()))

    def fold_in(self, data: int | str) -> Key:
        """Derives the key for ``data``; a number and a string never give the same key, not even 1 and "1"."""
        kind = b"s" if isinstance(data, str) else b"i"
        return Key(_hash(self.bits.to_bytes(16, "little"), kind + str(data).encode()))

    def split(self, num: int = 2) -> tuple[Key, ...]:
        """Derives ``num`` independent keys.

        Example:
            >>> len(set(k.bits for k in Key.from_seed(0).split(5)))
            5
        """
        return tuple(Key(_hash(self.bits.to_bytes(16, "little"), b"p" + str(i).encode())) for i in range(num))

    def seed(self) -> int:
        """Returns a non-negative 63-bit seed, for engines and generators that take an integer."""
        return self.bits & (2**63 - 1)

    def generator(self, device: str | torch.device = "cpu") -> torch.Generator:
        """Makes a ``torch.Generator``; every call gives a generator of the same stream."""
        return torch.Generator(device=device).manual_seed(self.seed())


def uniform_at(seeds: Int64[Tensor, " n"], positions: Int64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Returns a number in [0, 1) for every pair of seed and position, independent of the other pairs.

    This is SplitMix64 as a counter-based generator. It runs on the tensors' device.

    Args:
        seeds: one seed for each number.
        positions: one counter for each number, such as the position of a token in its response.

    Example:
        >>> a = uniform_at(torch.tensor([1, 2]), torch.tensor([5, 5]))
        >>> b = uniform_at(torch.tensor([2]), torch.tensor([5]))
        >>> bool(a[1] == b[0])
        True

    Source: Steele et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    z = seeds + (positions + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    z = (z ^ _shift_right(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift_right(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).to(torch.float64) * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts in zeros; torch's own shift copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"\0".join(parts), digest_size=16).digest(), "little")
