"""Publications by several senders: which rows of each tensor each of them sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from verl_fn.backends.protocol import TensorSpec

from .intake import IncompleteWeights


@attrs.frozen
class Cut:
    """The rows that one sender sends, where several send a publication together.

    Attributes:
        number: the number of the sender.
        edges: by name, the first row of each sender, in the order of their numbers, and the number of rows.

    Example:
        >>> Cut(1, {"w": (0, 3, 5)}).rows("w")
        (3, 5)
    """

    number: int
    edges: Mapping[str, tuple[int, ...]]

    @property
    def of(self) -> int:
        """How many senders there are."""
        return max((len(edges) for edges in self.edges.values()), default=2) - 1

    def rows(self, name: str) -> tuple[int, int]:
        """Returns the first row of a tensor that this sender has, and the one after its last."""
        edges = self.edges.get(name, (0,) * (self.number + 2))
        return edges[self.number], edges[self.number + 1]


def check_cuts(specs: Iterable[TensorSpec], cuts: Sequence[Cut]) -> None:
    """Raises an error unless the senders of a publication together send each row of each tensor once.

    Args:
        specs: the tensors.
        cuts: what each sender sends.

    Raises:
        IncompleteWeights: a sender is missing or there twice, or the senders' rows are not all rows once.

    Example:
        >>> import torch
        >>> edges = {"w": (0, 5, 7)}
        >>> check_cuts([TensorSpec("w", (8, 2), torch.float32)], [Cut(0, edges), Cut(1, edges)])
        Traceback (most recent call last):
        verl_fn.backends.weight_sync.intake.IncompleteWeights: the ranks send rows (0, 5, 7) of 'w', but it has 8 rows
    """
    if any(cut.edges != cuts[0].edges for cut in cuts):
        raise IncompleteWeights("ranks disagree about the rows that each of them sends")
    if (numbers := sorted(cut.number for cut in cuts)) != list(range(len(cuts))):
        raise IncompleteWeights(f"weights came from the ranks {numbers}, not from each of 0 to {len(cuts) - 1} once")
    for spec in specs:
        edges = cuts[0].edges.get(spec.name, ())
        whole = len(edges) == len(cuts) + 1 and (edges[0], edges[-1]) == (0, spec.rows)
        if not whole or list(edges) != sorted(edges):
            raise IncompleteWeights(f"the ranks send rows {edges} of {spec.name!r}, but it has {spec.rows} rows")
