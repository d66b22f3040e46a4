"""Keys: randomness as a value. New keys are derived from a key, and using a key does not change it."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from .node import Node, node


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
