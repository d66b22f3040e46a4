"""The batch of the first step's benchmark: ragged rows, and old outputs with which a part of the tokens clips."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl_fn.state import Batch
from verl_fn.steps import aggregate, aggregate_rows

# A gradient jumps where a loss begins to clip. The few tokens that bf16 would move across such a bound change the
# gradient more than all other rounding does, so no token is this close to one.
MARGIN = 0.05
# For each head: its old outputs, how much they differ from the model's, and the bounds of this change in the losses.
OLD = {
    "lm": ("old_log_probs", 0.4, (math.log(0.8), math.log(1.2), math.log(3.0))),
    "value": ("values", 0.5, (-0.5, 0.5)),
}


def ragged_batch(vocab: int, rows: int, longest: int) -> Batch:
    """Rows of 4 to ``longest`` tokens, a third of them the prompt, with everything that the losses read."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, n: int) -> Tensor:
        return torch.randint(low, high, (n,), generator=generator)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator)

    lengths = draw(4, longest + 1, rows).tolist()
    tokens = [draw(4, vocab, n) for n in lengths]
    mask = [[0.0] * max(1, n // 3) + [1.0] * (n - max(1, n // 3)) for n in lengths]
    fields = {"advantages": [normal(n) for n in lengths], "returns": [normal(n) for n in lengths]}
    group = torch.arange(rows) // 2
    per_row = {"group": group, "score": (torch.arange(rows) % 2).float(), "temperature": torch.ones(rows)}
    prompts = torch.tensor([max(1, n // 3) for n in lengths])
    batch = Batch.from_rows(tokens, {"response_mask": mask, **fields}, per_row | {"prompt_length": prompts})
    return aggregate_rows(aggregate(batch, "token-mean"))


def with_old(batch: Batch, head: str, output: Tensor, noise: Tensor) -> Batch:
    """Returns the batch with old outputs, some of them so far from the model's that the losses clip.

    Args:
        batch: the batch.
        head: the model's head.
        output: what the model gives, by token.
        noise: normal numbers, by token.
    """
    name, scale, bounds = OLD[head]
    mask = batch["response_mask"]
    old = output - off_bounds(scale * noise, bounds) * mask
    others = {"rollout_log_probs": old, "ref_log_prob": output + 0.5 * scale * noise * mask} if head == "lm" else {}
    return batch.with_tokens(**{name: old}, **others)


def off_bounds(change: Tensor, bounds: Sequence[float]) -> Tensor:
    """Moves changes that are within ``MARGIN`` of a bound away from it, on the side where they are.

    Example:
        >>> off_bounds(torch.tensor([0.0, 0.49, 0.5, 0.9]), [0.5]).tolist()
        [0.0, 0.44999998807907104, 0.550000011920929, 0.8999999761581421]
    """
    for bound in bounds:
        edge = torch.where(change < bound, bound - MARGIN, bound + MARGIN)
        change = torch.where((change - bound).abs() < MARGIN, edge, change)
    return change
