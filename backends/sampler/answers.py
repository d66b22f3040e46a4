"""Samples of the draws of a run, which come in the order of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_fn.backends.protocol import Request, Sample
from verl_fn.backends.sampler.draws import Draws


class Answers:
    """Groups draws by row, and makes the sample of a row that has ended.

    Args:
        requests: have the same sampling; row i belongs to request ``i // n``.
        draws: the draws of all rows.
        drawn: the row of each draw; it is emptied with every ``collect``.
        version: of the weights.
    """

    def __init__(self, requests: Sequence[Request], draws: Draws, drawn: list[int], version: int) -> None:
        self._requests, self._draws, self._drawn, self._version = requests, draws, drawn, version
        self._prompts = [torch.tensor(request.prompt) for request in requests]
        self._parts: dict[int, list[tuple[Tensor, ...]]] = {}

    def collect(self) -> None:
        """Takes the draws since the last call."""
        rows = torch.tensor(self._drawn)
        self._drawn.clear()
        # A stable sort by row groups the draws of each row and keeps their order.
        order = rows.argsort(stable=True)
        present, counts = rows.unique(return_counts=True)
        columns = [t[order].split(counts.tolist()) for t in self._draws.results()]
        for row, *part in zip(present.tolist(), *columns, strict=True):
            self._parts.setdefault(row, []).append(tuple(part))

    def sample(self, row: int, finished: bool) -> Sample:
        """Returns the sample of a row.

        Args:
            row: its number.
            finished: whether it ended by itself.
        """
        parts = self._parts.pop(row)
        tokens, log_probs, full, near = (t[0] if len(t) == 1 else torch.cat(t) for t in zip(*parts, strict=True))
        sampling = self._requests[0].sampling
        place, number = divmod(row, sampling.n)
        return Sample(
            request=self._requests[place].id,
            number=number,
            prompt=self._prompts[place],
            tokens=tokens,
            log_probs=log_probs,
            full_log_probs=full if self._draws.cut else None,
            mask=torch.ones(len(tokens)),
            versions=torch.full((len(tokens),), self._version),
            finish_reason="stop" if finished else "length",
            temperature=sampling.temperature or 1.0,
            near_ties=int(near.sum()),
        )
