"""Samples made of the draws of a run, in the order of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from verl_fn.backends.protocol import Request, Sample


class Answers:
    """Groups draws by row, and makes the sample of a row that has ended.

    Args:
        requests: are drawn alike; row i belongs to request ``i // n``.

    Example:
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> answers = Answers(requests_for([[5], [6]], Sampling(max_tokens=2), Key.from_seed(0)))
        >>> draws = torch.tensor([7, 8, 2]), torch.zeros(3), torch.zeros(3), torch.zeros(3)
        >>> answers.collect(torch.tensor([1, 0, 1]), draws, torch.tensor([3, 3, 4]))
        >>> sample = answers.sample(1, finished=True)
        >>> sample.tokens.tolist(), sample.versions.tolist()
        ([7, 2], [3, 4])
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests: list[Request] = []
        self._prompts: list[Tensor] = []
        self._parts: dict[int, list[tuple[Tensor, ...]]] = {}
        self.add(requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Adds requests; their rows follow the rows of earlier ones."""
        self._requests += requests
        self._prompts += [torch.tensor(request.prompt) for request in requests]

    def collect(self, rows: Int[Tensor, " d"], draws: Sequence[Tensor], versions: Int[Tensor, " d"]) -> None:
        """Adds draws, in the order of the steps.

        Args:
            rows: the row of each draw.
            draws: for each draw its token, its log-prob with and without the cut, and whether it is a near tie; where
                experts are recorded, also the experts of the token before it.
            versions: for each draw the version of the weights.
        """
        # A stable sort by row groups the draws of each row and keeps their order.
        order = rows.argsort(stable=True)
        present, counts = rows.unique(return_counts=True)
        columns = [t[order].split(counts.tolist()) for t in (*draws, versions)]
        for row, *part in zip(present.tolist(), *columns, strict=True):
            self._parts.setdefault(row, []).append(tuple(part))

    def sample(
        self, row: int, finished: bool, length: int | None = None, before: Int[Tensor, "p l k"] | None = None
    ) -> Sample:
        """Returns the sample of a row.

        Args:
            row: its number.
            finished: whether it ended by itself.
            length: how many of its draws count; by default all.
            before: if experts are recorded, the experts of the prompt's tokens but the last.
        """
        parts = self._parts.pop(row)
        columns = (t[0] if len(t) == 1 else torch.cat(t) for t in zip(*parts, strict=True))
        tokens, log_probs, full, near, *routed, versions = (column[:length] for column in columns)
        sampling = self._requests[0].sampling
        place, number = divmod(row, sampling.n)
        return Sample(
            request=self._requests[place].id,
            number=number,
            prompt=self._prompts[place],
            tokens=tokens,
            log_probs=log_probs,
            full_log_probs=full if sampling.cuts else None,
            mask=torch.ones(len(tokens)),
            versions=versions,
            finish_reason="stop" if finished else "length",
            temperature=sampling.temperature or 1.0,
            near_ties=int(near.sum()),
            routed_experts=None if before is None else torch.cat([before, routed[0], routed[0][-1:]]),
        )
