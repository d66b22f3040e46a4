"""Splits a batch into parts, by a token budget or by number of rows, and joins the results of the parts."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from .batch import PER_ROW, Batch, TokenOutputs

# What a part of padded rows costs beside its tokens, as a share of the budget: a sixteenth.
FEE = 16


@attrs.frozen(eq=False)
class Split:
    """The parts of a batch; it also joins results of the parts in the order of the batch.

    Attributes:
        rows: for each part, the indices of its rows in the batch.
    """

    batch: Batch
    rows: tuple[Int[Tensor, " b"], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch.take(index) for index in self.rows)

    @property
    def inverse(self) -> Int[Tensor, " B"]:
        """The permutation that brings the concatenated rows of all parts into the order of the batch."""
        return torch.cat(self.rows).argsort()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins per-token results of the parts in the order of the batch.

        Example:
            >>> split = split_by_tokens(Batch.from_rows([[1, 2], [3, 4, 5], [6]]), 3)
            >>> split.join([part.tokens for part in split]).tolist()
            [1, 2, 3, 4, 5, 6]
        """
        lengths = self.batch.lengths[torch.cat(self.rows)].tolist()
        rows = torch.cat(list(parts)).split(lengths)
        return torch.cat([rows[i] for i in self.inverse.tolist()])

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins per-row results of the parts in the order of the batch.

        Example:
            >>> split = split_by_tokens(Batch.from_rows([[1, 2], [3, 4, 5], [6]]), 3)
            >>> split.join_rows([part.lengths for part in split]).tolist()
            [2, 3, 1]
        """
        return torch.cat(list(parts))[self.inverse]

    def join_outputs(self, parts: Sequence[TokenOutputs]) -> TokenOutputs:
        """Joins a model's outputs for the parts, per token and per row, in the order of the batch."""
        return TokenOutputs(
            {
                name: (self.join_rows if name in PER_ROW else self.join)([part.by_name[name] for part in parts])
                for name in parts[0].by_name
            }
        )


def split_by_tokens(
    batch: Batch,
    max_tokens: int,
    together: str | None = None,
    *,
    padded: bool = False,
    beside: Int[Tensor, " B"] | None = None,
) -> Split:
    """Splits a batch into few parts of at most ``max_tokens`` tokens, with about as many tokens in each.

    Args:
        max_tokens: the budget of each part. Rows are never cut.
        together: a per-row field of integers; rows with the same value stay in one part. Pass ``loss.together``.
        padded: count each row of a part as long as the part's longest; rows of about the same length then share a
            part.
        beside: what each row costs beside its tokens, such as the patches of its images.

    Raises:
        ValueError: a row or a group has more tokens than the budget, or the batch lacks the field.

    Example:
        >>> batch = Batch.from_rows([[1] * 3, [2] * 3, [3]])
        >>> [part.num_tokens for part in split_by_tokens(batch, 6, beside=torch.tensor([0, 0, 3]))]
        [1, 6]
        >>> [part.lengths.tolist() for part in split_by_tokens(batch, 6, padded=True)]
        [[3, 3], [1]]
        >>> [part.num_tokens for part in split_by_tokens(batch, 4)]
        [4, 3]
        >>> split_by_tokens(batch.with_rows(pair=[7, 7, 8]), 4, together="pair")
        Traceback (most recent call last):
        ValueError: the group pair = 7 (2 rows, the first is row 0) has 6 tokens, more than the budget of 4 ...
    """
    units = _units(batch, max_tokens, together, padded, beside)
    bins = units.under_budget([list(range(len(units.rows)))], max_tokens)[0]
    return Split(batch, tuple(torch.tensor(units.rows_of(part)) for part in bins if part))


def deal(
    batch: Batch,
    shares: int,
    max_tokens: int,
    together: str | None = None,
    *,
    padded: bool = False,
    beside: Int[Tensor, " B"] | None = None,
) -> list[list[list[int]]]:
    """Distributes the rows of a batch over ranks, and the rows of each rank over the same number of micro-batches.

    Ranks and micro-batches get about as many tokens each. The result depends on the arguments only, so all ranks
    compute the same one without communication.

    Args:
        shares: the number of ranks.
        max_tokens: the budget of each micro-batch. Rows are never cut.
        together: a per-row field of integers; rows with the same value go to one micro-batch of one rank.
        padded: count each row of a micro-batch as long as its longest, as ``split_by_tokens`` does.
        beside: what each row costs beside its tokens.

    Returns:
        For each rank and each of its micro-batches, the indices of its rows. A micro-batch may be empty.

    Raises:
        ValueError: a row or a group has more tokens than the budget, or the batch lacks the field.

    Example:
        >>> batch = Batch.from_rows([[1] * 3, [2] * 2, [3]], per_row={"pair": [1, 0, 1]})
        >>> deal(batch, 2, 4), deal(batch, 2, 4, together="pair")
        ([[[0]], [[1, 2]]], [[[0, 2]], [[1]]])
    """
    units = _units(batch, max_tokens, together, padded, beside)
    shared = [sorted(share) for share in balance(units.sizes, shares)]
    return [[units.rows_of(part) for part in parts] for parts in units.under_budget(shared, max_tokens)]


def split_by_count(batch: Batch, max_rows: int, together: str | None = None) -> Split:
    """Splits a batch into consecutive parts of at most ``max_rows`` rows.

    Args:
        max_rows: the number of rows that a part may have.
        together: a per-row field of integers; rows with the same value stay in one part, the part of the first one.

    Raises:
        ValueError: a group has more rows than ``max_rows``, or the batch lacks the field.

    Example:
        >>> [len(part) for part in split_by_count(Batch.from_rows([[1], [2], [3]]), 2)]
        [2, 1]
    """
    parts: list[list[int]] = []
    for group in groups_of(batch, together):
        if len(group) > max_rows:
            raise ValueError(
                f"{_description(batch, group, together)} has more rows than the {max_rows} that a part may have; "
                "raise ppo_mini_batch_size or make the groups smaller"
            )
        if parts and len(parts[-1]) + len(group) <= max_rows:
            parts[-1].extend(group)
        else:
            parts.append(list(group))
    return Split(batch, tuple(torch.tensor(part) for part in parts))


def groups_of(batch: Batch, together: str | None) -> list[list[int]]:
    """Returns the indices of each group's rows, with the groups in the order of their first rows.

    Args:
        together: the per-row field that names the groups; None puts each row into a group of its own.

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
            f"rows with the same {together!r} must stay together, but the batch has no per-row field of that name; "
            f"it has {sorted(batch.per_row)}"
        )
    ids = batch.per_row[together]
    if ids.ndim != 1 or ids.dtype.is_floating_point:
        raise ValueError(
            f"{together!r} keeps rows together, so it must be one integer per row; it is {ids.dtype}{list(ids.shape)}"
        )
    groups: dict[int, list[int]] = {}
    for row, name in enumerate(ids.tolist()):
        groups.setdefault(name, []).append(row)
    return list(groups.values())


@attrs.frozen
class _Units:
    """The units that are never split: groups of rows, or single rows.

    Attributes:
        rows: the indices of each unit's rows.
        sizes: the number of tokens of each unit.
        longest: the length of each unit's longest row, if rows are padded; else None.
    """

    rows: list[list[int]]
    sizes: list[int]
    longest: list[int] | None

    def rows_of(self, units: Sequence[int]) -> list[int]:
        return sorted(row for unit in units for row in self.rows[unit])

    def under_budget(self, shares: list[list[int]], limit: int) -> list[list[list[int]]]:
        """Divides the units of each share into parts of at most ``limit`` tokens, the same number for every share."""
        if self.longest is None:
            return _under_budget(shares, self.sizes, limit)
        divided = [_by_length(share, [len(rows) for rows in self.rows], self.longest, limit) for share in shares]
        most = max(map(len, divided))
        return [parts + [[]] * (most - len(parts)) for parts in divided]


def _units(batch: Batch, max_tokens: int, together: str | None, padded: bool, beside: Tensor | None) -> _Units:
    groups = groups_of(batch, together)
    lengths = (batch.lengths if beside is None else batch.lengths + beside).tolist()
    longest = [max(lengths[row] for row in group) for group in groups] if padded else None
    sizes = [sum(lengths[row] for row in group) for group in groups]
    taken = sizes if longest is None else [len(g) * most for g, most in zip(groups, longest, strict=True)]
    largest = max(range(len(groups)), key=taken.__getitem__)
    if taken[largest] > max_tokens:
        raise ValueError(
            f"{_description(batch, groups[largest], together)} has {taken[largest]} tokens"
            f"{' with padding' if padded else ''}{'' if beside is None else ' and patches of images'}, more than the "
            f"budget of {max_tokens} per micro-batch; raise the backend's max_tokens (ppo_max_token_len_per_gpu), or "
            "shorten prompts and responses"
        )
    return _Units(groups, sizes, longest)


def _description(batch: Batch, group: list[int], together: str | None) -> str:
    if together is None:
        return f"row {group[0]}"
    return f"the group {together} = {int(batch[together][group[0]])} ({len(group)} rows, the first is row {group[0]})"


def _under_budget(shares: list[list[int]], sizes: list[int], limit: int) -> list[list[list[int]]]:
    """Packs the units of each share into parts of at most ``limit``, as many for each share."""
    of_shares = [[sizes[unit] for unit in share] for share in shares]
    parts = max(1, *(_fewest(of_share, limit) for of_share in of_shares))
    while True:
        dealt = [balance(of_share, parts) for of_share in of_shares]
        if all(
            sum(of_share[i] for i in part) <= limit
            for of_share, bins in zip(of_shares, dealt, strict=True)
            for part in bins
        ):
            return [[[share[i] for i in part] for part in bins] for share, bins in zip(shares, dealt, strict=True)]
        parts += 1


def _fewest(sizes: list[int], limit: int) -> int:
    """Returns a number of parts that units of these sizes need at least.

    A part has room for at most k - 1 units larger than a k-th of the limit.

    Example:
        >>> _fewest([6, 6, 6, 1], 10), _fewest([4, 4, 4, 4, 4], 10), _fewest([1] * 30, 10)
        (3, 3, 3)
    """
    large = (-(-sum(size * k > limit for size in sizes) // (k - 1)) for k in range(2, 10))
    return max(-(-sum(sizes) // limit), *large)


def _by_length(share: list[int], rows: list[int], longest: list[int], limit: int) -> list[list[int]]:
    """Divides units, sorted by length, into parts whose rows, padded to the longest, have at most ``limit`` tokens.

    Of all such divisions it is the one with the fewest tokens, padding included, if a part costs as much as
    ``limit / FEE`` tokens: with too few parts a third would be padding.

    Example:
        >>> _by_length([0, 1, 2, 3], [1, 1, 1, 1], [40, 10, 38, 10], 80)
        [[0, 2], [1, 3]]
    """
    units = sorted(share, key=lambda unit: (-longest[unit], unit))
    ends = list(itertools.accumulate((rows[unit] for unit in units), initial=0))
    # Where units of each length begin. Every unit costs at least its length, so of the parts that begin with units of
    # one length the largest is the best.
    starts = [n for n, unit in enumerate(units) if n == 0 or longest[unit] != longest[units[n - 1]]]
    # For each number of units, the least cost of dividing the first so many, and where the last part begins.
    least, begins = [0.0], [0]
    for end in range(1, len(units) + 1):
        best, begin, after = math.inf, end - 1, end
        for start in reversed(starts[: bisect.bisect_left(starts, end)]):
            size = longest[units[start]]
            first = max(start, bisect.bisect_left(ends, ends[end] - limit // size))
            if first >= after:
                break
            if (cost := least[first] + (ends[end] - ends[first]) * size + limit / FEE) < best:
                best, begin = cost, first
            after = start
        least.append(best)
        begins.append(begin)
    parts: list[list[int]] = []
    end = len(units)
    while end:
        parts.append(units[begins[end] : end])
        end = begins[end]
    return parts[::-1]


def balance(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Assigns items to parts, the largest first, each to the part with the smallest sum so far.

    Example:
        >>> balance([10, 5, 6, 3], 2)
        [[0, 3], [2, 1]]
    """
    bins: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, lightest = loads[0]
        heapq.heapreplace(loads, (load + sizes[item], lightest))
        bins[lightest].append(item)
    return bins
