"""Drawing tokens inside vLLM: its sampler, replaced by the draws of the embedded engine.

A draw depends on the sample's seed and on the place of the token, never on the rows beside it or on what was drawn
before: a request that is asked again, of a restarted engine too, gives the same tokens. Log-probs, near ties and the
tokens themselves stay on the device until they are collected, so vLLM handles no log-probs at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from verl_fn.backends.draws import Drawn, Draws
from verl_fn.backends.protocol import Sampling
from verl_fn.state import uniform_at

# The most logits of one draw, a bound of its memory: it needs 20 bytes for each.
LOGITS = 2**25


class DrawingSampler(Sampler):
    """vLLM's sampler; between ``begin`` and ``end`` it draws as ``Draws`` does.

    Args:
        runner: vLLM's model runner.
        vocab: the size of the vocabulary.
        noise: how much two computations of a logit may differ.
    """

    def __init__(self, runner: Any, vocab: int, noise: float) -> None:
        super().__init__(logprobs_mode=runner.model_config.logprobs_mode)
        self.runner, self.vocab, self.noise = runner, vocab, noise
        self._draws: Draws | None = None

    def begin(self, sampling: Sampling, seeds: list[int], rows: Mapping[str, int]) -> None:
        """Starts a run.

        Args:
            sampling: how all of its rows are drawn.
            seeds: the seed of each row.
            rows: the number of the row of each of vLLM's requests.
        """
        self._draws = Draws(sampling, self.vocab, self.noise)
        self._seeds = torch.tensor(seeds, device=self.runner.device)
        self._row_of = dict(rows)
        self._rows: list[list[int]] = []
        self._places: list[Tensor] = []
        # Of the requests in vLLM's batch; it seldom changes between two steps.
        self._present: list[str] = []
        self._present_rows: list[int] = []
        self._present_seeds = self._seeds[:0]

    def extend(self, seeds: list[int], rows: Mapping[str, int]) -> None:
        """Adds rows to the run; see ``begin``."""
        self._seeds = torch.cat([self._seeds, torch.tensor(seeds, device=self.runner.device)])
        self._row_of.update(rows)

    def end(self) -> None:
        """Ends the run."""
        self._draws = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Draws a token for each row of logits."""
        if self._draws is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        batch, count = self.runner.input_batch, len(logits)
        if self._present != batch.req_ids:
            self._present = list(batch.req_ids)
            self._present_rows = [self._row_of[name] for name in self._present]
            self._present_seeds = self._seeds[torch.tensor(self._present_rows, device=self._seeds.device)]
        places = self.runner.seq_lens[:count].long()
        uniforms = uniform_at(self._present_seeds[:count], places)[:, None]
        logits = logits[:, : self.vocab].float()
        size = max(1, LOGITS // self.vocab)
        parts = [self._draws.draw(logits[i : i + size], uniforms[i : i + size]) for i in range(0, count, size)]
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        # A row of which only a part of the prompt was computed has no token yet.
        partial = self.runner.discard_request_mask.np[:count]
        self._rows.append([-1 if skip else row for row, skip in zip(self._present_rows, partial, strict=True)])
        self._places.append(places)
        # Without a finite logit the draw is beyond the vocabulary, and its log-prob NaN: an error once collected.
        drawn = tokens.clamp(max=self.vocab - 1).to(torch.int32)
        return SamplerOutput(sampled_token_ids=drawn[:, None], logprobs_tensors=None)

    def collected(self) -> Drawn | None:
        """Returns the draws since the last call, on the CPU; None if there are none."""
        assert self._draws is not None
        if not self._rows:
            return None
        rows = torch.tensor([row for step in self._rows for row in step])
        places, columns = torch.cat(self._places).cpu(), self._draws.results()
        self._rows.clear()
        self._places.clear()
        whole = rows >= 0
        return Drawn(rows[whole], places[whole], tuple(column[whole] for column in columns))
