"""Splitting a batch into parts, by a strict token budget or by count, and putting the results back."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from .batch import Batch


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


def split_by_tokens(batch: Batch, max_tokens: int, together: str | None = None) -> Split:
    """As few parts as fit under ``max_tokens`` each, balanced by tokens.

    The budget is strict. Rows are never cut; rows with the same value of the per-row field ``together``
    stay in one part.

    Raises:
        ValueError: one row, or one group, is longer than the budget.

    >>> [part.num_tokens for part in split_by_tokens(Batch.from_rows([[1] * 3, [2] * 3, [3]]), 4)]
    [4, 3]
    """
    groups = _groups(batch, together)
    lengths = batch.lengths.tolist()
    sizes = [sum(lengths[row] for row in group) for group in groups]
    longest = max(range(len(groups)), key=sizes.__getitem__)
    if sizes[longest] > max_tokens:
        what = f"row {groups[longest][0]}" if len(groups[longest]) == 1 else f"the group of row {groups[longest][0]}"
        raise _over_budget(what, sizes[longest], max_tokens)
    bins = _under_budget([sizes], max_tokens)[0]
    return Split(batch, tuple(torch.tensor(sorted(row for g in part for row in groups[g])) for part in bins if part))


def deal(batch: Batch, shares: int, max_tokens: int) -> list[list[list[int]]]:
    """Deal the rows of a batch to ``shares`` ranks, each into equally many micro-batches under the budget.

    Balanced by tokens. A function of the batch alone, so ranks agree without asking each other.

    Returns:
        For each rank, for each micro-batch, the rows; a micro-batch may be empty.

    Raises:
        ValueError: a row is longer than the budget.

    >>> deal(Batch.from_rows([[1] * 3, [2] * 2, [3]]), 2, 4)
    [[[0]], [[1, 2]]]
    """
    lengths = batch.lengths.tolist()
    if (longest := max(lengths)) > max_tokens:
        raise _over_budget(f"row {lengths.index(longest)}", longest, max_tokens)
    mine = [sorted(rows) for rows in _balance(lengths, shares)]
    dealt = _under_budget([[lengths[row] for row in rows] for rows in mine], max_tokens)
    return [[sorted(rows[i] for i in part) for part in parts] for rows, parts in zip(mine, dealt, strict=True)]


def split_by_count(batch: Batch, max_rows: int, together: str | None = None) -> Split:
    """Consecutive parts of at most ``max_rows`` rows; groups stay together.

    Raises:
        ValueError: one group has more rows than ``max_rows``.

    >>> [len(part) for part in split_by_count(Batch.from_rows([[1], [2], [3]]), 2)]
    [2, 1]
    """
    parts: list[list[int]] = []
    for group in _groups(batch, together):
        if len(group) > max_rows:
            raise ValueError(f"the group of row {group[0]} has {len(group)} rows, more than {max_rows} a part")
        if parts and len(parts[-1]) + len(group) <= max_rows:
            parts[-1].extend(group)
        else:
            parts.append(list(group))
    return Split(batch, tuple(torch.tensor(part) for part in parts))


def _groups(batch: Batch, together: str | None) -> list[list[int]]:
    """Rows by group, groups in the order of their first row."""
    if together is None:
        return [[row] for row in range(len(batch))]
    groups: dict[int, list[int]] = {}
    for row, name in enumerate(batch.per_row[together].tolist()):
        groups.setdefault(name, []).append(row)
    return list(groups.values())


def _over_budget(what: str, tokens: int, max_tokens: int) -> ValueError:
    return ValueError(
        f"{what} has {tokens} tokens, more than the budget of {max_tokens} a micro-batch; "
        f"raise ppo_max_token_len_per_gpu or shorten prompts and responses"
    )


def _under_budget(shares: list[list[int]], limit: int) -> list[list[list[int]]]:
    """The sizes of each share in bins of at most ``limit``, as few as let every share have equally many."""
    parts = max(1, *(-(-sum(sizes) // limit) for sizes in shares))
    while True:
        found = [_balance(sizes, parts) for sizes in shares]
        if all(
            sum(sizes[i] for i in part) <= limit for sizes, bins in zip(shares, found, strict=True) for part in bins
        ):
            return found
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
