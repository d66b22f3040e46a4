"""Random ragged batches, packed as ours and padded as verl's, with the same numbers."""

import random

import numpy as np
import torch

from verl_fn.state import Batch, Key, TokenOutputs
from verl_fn.testing.builders import in_float64

BATCHES, TOLERANCE = 200, 1e-5


def ragged(number: int, *, holes: bool = True, rewards: str = "last") -> Batch:
    """A batch in float64: groups of one to five rows in any order, some rows with tools' outputs between tokens.

    Args:
        number: other numbers give other batches.
        holes: whether there are tools' outputs.
        rewards: ``last`` puts a reward on the last response token, ``every`` on every one.
    """
    key = Key.from_seed(number)
    dice, stream = random.Random(key.fold_in("shape").seed()), key.fold_in("values").generator()
    groups = [g for g in range(dice.randint(2, 4)) for _ in range(dice.choice([1, 2, 3, 5]))]
    dice.shuffle(groups)
    prompts, masks, scores = [], [], []
    for _ in groups:
        prompts.append(dice.randint(1, 3))
        turns = [[1.0] * dice.randint(1, 4)]
        while holes and dice.random() < 0.4:
            turns += [[0.0] * dice.randint(1, 2), [1.0] * dice.randint(1, 3)]
        masks.append([0.0] * prompts[-1] + [x for turn in turns for x in turn])
        scores.append([0.0] * (len(masks[-1]) - 1) + [dice.choice([0.0, 0.0, 1.0, 1.0, 0.3])])
    batch = Batch.from_rows([[5] * len(mask) for mask in masks], {"response_mask": masks})
    mask = batch["response_mask"]

    def normal():
        return torch.randn(batch.num_tokens, generator=stream) * mask

    old = (-0.05 - 2.5 * torch.rand(batch.num_tokens, generator=stream)) * mask
    chance = old.exp().square()
    given = torch.tensor([x for row in scores for x in row])
    return in_float64(
        batch.with_tokens(
            token_level_rewards=normal() if rewards == "every" else given,
            old_log_probs=old,
            ref_log_prob=(old + 0.3 * normal()).clamp(max=-1e-3) * mask,
            advantages=normal(),
            values=normal(),
            returns=normal(),
            sum_pi_squared=(chance + (1.0 - chance) * torch.rand(batch.num_tokens, generator=stream)) * mask,
            rollout_is_weights=(0.5 + torch.rand(batch.num_tokens, generator=stream)) * mask,
        ).with_rows(
            group=[31 * g + 7 for g in groups],
            prompt_length=prompts,
            reward_baselines=torch.rand(len(groups), generator=stream),
            **{f"reward/{name}": torch.rand(len(groups), generator=stream) for name in ("style", "truth")},
        )
    )


def outputs(batch: Batch, number: int) -> TokenOutputs:
    """Log-probabilities and values of a model, within about a nat of the old ones, in float64."""
    stream = Key.from_seed(number).fold_in("outputs").generator()
    drawn = torch.randn(batch.num_tokens, generator=stream).double()
    logprobs = (batch["old_log_probs"] + 0.4 * drawn).clamp(max=-1e-3) * batch["response_mask"]
    values = torch.randn(batch.num_tokens, generator=stream).double() * batch["response_mask"]
    return TokenOutputs({"logprobs": logprobs, "values": values})


def pad(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """The values of the response's tokens as verl's table ``[B, longest response]``, with zeros after the end."""
    rows = [row[n:] for row, n in zip(values.split(batch.lengths.tolist()), batch["prompt_length"], strict=True)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def unpad(batch: Batch, table: torch.Tensor) -> torch.Tensor:
    """verl's table as one value per token, 0 on prompts."""
    rows = []
    for row, length, prompt in zip(table, batch.lengths.tolist(), batch["prompt_length"].tolist(), strict=True):
        rows.append(torch.cat([row.new_zeros(prompt), row[: length - prompt]]))
    return torch.cat(rows)


def index(batch: Batch) -> np.ndarray:
    return batch["group"].numpy()


def gap(ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """The largest difference, relative to 1 plus their value, where the mask is set."""
    difference = (ours.double() - theirs.double()).abs() / (1.0 + theirs.double().abs())
    return float(difference.max() if mask is None else torch.where(mask != 0, difference, 0.0).max())
