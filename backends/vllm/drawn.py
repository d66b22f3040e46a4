"""Draws inside vLLM, as its sampler returns them in the order of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Drawn:
    """Draws in the order of the steps.

    Attributes:
        rows: the row of each draw.
        places: the number of tokens of the row before the draw.
        columns: for each draw its token, its log-prob with and without the cut, and whether it is a near tie.
    """

    rows: Tensor
    places: Tensor
    columns: tuple[Tensor, ...]


def last_draws(parts: Sequence[tuple[Drawn, int]]) -> tuple[Drawn, Tensor]:
    """Returns the draws of each row by place, and the version of each.

    vLLM may discard a draw and make it again later, at the same place. Only the last one is returned.

    Args:
        parts: draws, in the order of the steps, with the version of the weights that made them.

    Example:
        >>> t = torch.tensor
        >>> before = Drawn(t([0, 1, 0]), t([4, 7, 5]), (t([10, 20, 11]),))
        >>> after = Drawn(t([0]), t([5]), (t([12]),))
        >>> drawn, versions = last_draws([(before, 3), (after, 4)])
        >>> drawn.rows.tolist(), drawn.columns[0].tolist(), versions.tolist()
        ([0, 0, 1], [10, 12, 20], [3, 4, 3])
    """
    rows, places = (torch.cat([getattr(drawn, name) for drawn, _ in parts]) for name in ("rows", "places"))
    versions = torch.cat([torch.full_like(drawn.rows, version) for drawn, version in parts])
    columns = [torch.cat(column) for column in zip(*(drawn.columns for drawn, _ in parts), strict=True)]
    order = torch.argsort(rows * 2**32 + places, stable=True)
    keys = torch.stack([rows[order], places[order]])
    last = torch.ones(len(order), dtype=torch.bool)
    last[:-1] = (keys[:, 1:] != keys[:, :-1]).any(0)
    kept = order[last]
    return Drawn(rows[kept], places[kept], tuple(column[kept] for column in columns)), versions[kept]
