"""Splitting a batch into parts, by a strict token budget or by count, and putting the results back."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from .batch import Batch
from .outputs import PER_ROW, TokenOutputs


@attrs.frozen(eq=False)
class Split:
    """The parts of a batch, and the way back.

    Attributes:
        batch: the whole.
        rows: for each part, the indices of its rows in the whole.
    """

    batch: Batch
    rows: tuple[Int[Tensor, " b"], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):
        return (self.batch.take(index) for index in self.rows)

    @property
    def inverse(self) -> Int[Tensor, " B"]:
        """The permutation that brings the parts' concatenated rows back into the order of the whole."""
        return torch.cat(self.rows).argsort()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Per-token results of the parts, in the order of the whole.

        >>> split = split_by_tokens(Batch.from_rows([[1, 2], [3, 4, 5], [6]]), 3)
        >>> split.join([part.tokens for part in split]).tolist()
        [1, 2, 3, 4, 5, 6]
        """
        lengths = self.batch.lengths[torch.cat(self.rows)].tolist()
        rows = torch.cat(list(parts)).split(lengths)
        return torch.cat([rows[i] for i in self.inverse.tolist()])

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Per-row results of the parts, in the order of the whole.

        >>> split = split_by_tokens(Batch.from_rows([[1, 2], [3, 4, 5], [6]]), 3)
        >>> split.join_rows([part.lengths for part in split]).tolist()
        [2, 3, 1]
        """
        return torch.cat(list(parts))[self.inverse]

    def join_outputs(self, parts: Sequence[TokenOutputs]) -> TokenOutputs:
        """What a model says of the parts, per token and per row, in the order of the whole."""
        return TokenOutputs(
            {
                name: (self.join_rows if name in PER_ROW else self.join)([part.by_name[name] for part in parts])
                for name in parts[0].by_name
            }
        )


def split_by_tokens(batch: Batch, max_tokens: int, together: str | None = None) -> Split:
    """Splits a batch into as few parts as fit under ``max_tokens`` each, balanced by tokens.

    Args:
        max_tokens: the budget, which is strict; rows are never cut.
        together: a per-row field of integers; rows with one value of it stay in one part. A loss declares it.

    Raises:
        ValueError: one row, or one group, is longer than the budget, or the batch lacks the field.

    Example:
        >>> batch = Batch.from_rows([[1] * 3, [2] * 3, [3]])
        >>> [part.num_tokens for part in split_by_tokens(batch, 4)]
        [4, 3]
        >>> split_by_tokens(batch.with_rows(pair=[7, 7, 8]), 4, together="pair")
        Traceback (most recent call last):
        ValueError: the group pair = 7 (2 rows from row 0 on) has 6 tokens, more than the budget of 4 a micro-batch; ...
    """
    units = _units(batch, max_tokens, together)
    bins = _under_budget([units.sizes], max_tokens)[0]
    return Split(batch, tuple(torch.tensor(units.rows_of(part)) for part in bins if part))


def deal(batch: Batch, shares: int, max_tokens: int, together: str | None = None) -> list[list[list[int]]]:
    """Deals the rows of a batch to ``shares`` ranks, each into equally many micro-batches under the budget.

    Balanced by tokens. A function of the batch alone, so ranks agree without asking each other.

    Args:
        together: a per-row field of integers; rows with one value of it go to one micro-batch of one rank.

    Returns:
        For each rank, for each micro-batch, the rows; a micro-batch may be empty.

    Raises:
        ValueError: one row, or one group, is longer than the budget, or the batch lacks the field.

    Example:
        >>> batch = Batch.from_rows([[1] * 3, [2] * 2, [3]], per_row={"pair": [1, 0, 1]})
        >>> deal(batch, 2, 4), deal(batch, 2, 4, together="pair")
        ([[[0]], [[1, 2]]], [[[0, 2]], [[1]]])
    """
    units = _units(batch, max_tokens, together)
    shared = [sorted(share) for share in _balance(units.sizes, shares)]
    dealt = _under_budget([[units.sizes[unit] for unit in share] for share in shared], max_tokens)
    return [
        [units.rows_of([share[i] for i in part]) for part in parts]
        for share, parts in zip(shared, dealt, strict=True)
    ]


def split_by_count(batch: Batch, max_rows: int, together: str | None = None) -> Split:
    """Splits a batch into consecutive parts of at most ``max_rows`` rows.

    Args:
        together: a per-row field of integers; rows with one value of it stay in one part, at the first one's place.

    Raises:
        ValueError: one group has more rows than ``max_rows``, or the batch lacks the field.

    Example:
        >>> [len(part) for part in split_by_count(Batch.from_rows([[1], [2], [3]]), 2)]
        [2, 1]
    """
    parts: list[list[int]] = []
    for group in groups_of(batch, together):
        if len(group) > max_rows:
            raise ValueError(
                f"{_called(batch, group, together)} has more rows than the {max_rows} of a part; raise "
                "ppo_mini_batch_size, or make its groups smaller"
            )
        if parts and len(parts[-1]) + len(group) <= max_rows:
            parts[-1].extend(group)
        else:
            parts.append(list(group))
    return Split(batch, tuple(torch.tensor(part) for part in parts))


def groups_of(batch: Batch, together: str | None) -> list[list[int]]:
    """Returns the rows of each group, groups in the order of their first row; without a field, every row alone.

    Raises:
        ValueError: ``together`` names no per-row field of integers.

    Example:
        >>> groups_of(Batch.from_rows([[1], [2], [3]], per_row={"pair": [5, 0, 5]}), "pair")
        [[0, 2], [1]]
    """
    if together is None:
        return [[row] for row in range(len(batch))]
    if together not in batch.per_row:
        raise ValueError(
            f"rows with one {together!r} are to stay together, and the batch has no per-row field of that name; it has "
            f"{sorted(batch.per_row)}"
        )
    ids = batch.per_row[together]
    if ids.ndim != 1 or ids.dtype.is_floating_point:
        raise ValueError(f"{together!r} must be one integer a row, to keep rows together by; it is {ids.dtype}")
    groups: dict[int, list[int]] = {}
    for row, name in enumerate(ids.tolist()):
        groups.setdefault(name, []).append(row)
    return list(groups.values())


@attrs.frozen
class _Units:
    """What is never split: rows, or groups of rows, and the tokens of each."""

    rows: list[list[int]]
    sizes: list[int]

    def rows_of(self, units: Sequence[int]) -> list[int]:
        return sorted(row for unit in units for row in self.rows[unit])


def _units(batch: Batch, max_tokens: int, together: str | None) -> _Units:
    groups, lengths = groups_of(batch, together), batch.lengths.tolist()
    sizes = [sum(lengths[row] for row in group) for group in groups]
    longest = max(range(len(groups)), key=sizes.__getitem__)
    if sizes[longest] > max_tokens:
        raise ValueError(
            f"{_called(batch, groups[longest], together)} has {sizes[longest]} tokens, more than the budget of "
            f"{max_tokens} a micro-batch; raise ppo_max_token_len_per_gpu or shorten prompts and responses"
        )
    return _Units(groups, sizes)


def _called(batch: Batch, group: list[int], together: str | None) -> str:
    if together is None:
        return f"row {group[0]}"
    return f"the group {together} = {int(batch[together][group[0]])} ({len(group)} rows from row {group[0]} on)"


def _under_budget(shares: list[list[int]], limit: int) -> list[list[list[int]]]:
    """The sizes of each share in bins of at most ``limit``, as few as let every share have equally many."""
    parts = max(1, *(-(-sum(sizes) // limit) for sizes in shares))
    while True:
        dealt = [_balance(sizes, parts) for sizes in shares]
        if all(
            sum(sizes[i] for i in part) <= limit for sizes, bins in zip(shares, dealt, strict=True) for part in bins
        ):
            return dealt
        parts += 1


def _balance(sizes: list[int], parts: int) -> list[list[int]]:
    """Longest first, each to the lightest part."""
    bins: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = min(range(parts), key=load.__getitem__)
        load[lightest] += sizes[item]
        bins[lightest].append(item)
    return bins
