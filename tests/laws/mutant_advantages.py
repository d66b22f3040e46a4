"""Broken estimators, each with the law that it breaks."""

import torch

from verl_fn.steps import (
    gae,
    grpo,
    reinforce_plus_plus,
    rloo,
)


def writes_to_rewards(batch):
    batch["token_level_rewards"].clamp_(-0.5, 0.5)
    return grpo(batch)


def explores(batch):
    new = grpo(batch)
    return new.with_tokens(
        advantages=new["advantages"] + 0.1 * torch.randn(batch.num_tokens) * batch["response_mask"]
    )


def running_baseline():
    seen = []

    def estimator(batch):
        seen.append(float(batch["token_level_rewards"].mean()) + len(seen))
        new = rloo(batch)
        return new.with_tokens(advantages=(new["advantages"] - sum(seen) / len(seen)) * batch["response_mask"])

    return estimator


def neighbours_as_groups(batch):
    """Takes every two rows for a group."""
    pairs = torch.arange(len(batch)) // 2
    return grpo(batch.with_rows(group=pairs), norm_adv_by_std=False).with_rows(group=batch["group"])


def as_many_rows_for_all(batch):
    """A table of groups by rows, as an engine that always samples n times a prompt gives."""
    scores = batch.sum_rows(batch["token_level_rewards"] * batch["response_mask"])
    table = scores.view(len(batch["group"].unique()), -1)
    spread = batch.spread((table - table.mean(1, keepdim=True)).flatten()) * batch["response_mask"]
    return batch.with_tokens(advantages=spread, returns=spread)


def ids_as_numbers(batch):
    new = grpo(batch)
    return new.with_tokens(advantages=new["advantages"] * batch.spread(batch["group"] / 50))


def first_row_as_baseline(batch):
    new = rloo(batch)
    baseline = batch.rows("token_level_rewards")[0].sum()
    return new.with_tokens(advantages=(new["advantages"] - baseline) * batch["response_mask"])


def forgets_the_mask(batch):
    new = reinforce_plus_plus(batch)
    everywhere = batch.spread(batch.sum_rows(batch["token_level_rewards"]))
    return new.with_tokens(advantages=everywhere)


def sums_over_holes(batch):
    """Counts rewards where a tool spoke."""
    score = batch.spread(batch.sum_rows(batch["token_level_rewards"])) * batch["response_mask"]
    return batch.with_tokens(advantages=score, returns=score)


def whitens_over_prompts(batch):
    new = gae(batch, whiten=False)
    a = new["advantages"]
    return new.with_tokens(advantages=(a - batch["values"].mean()) * batch["response_mask"])


def one_advantage_a_row(batch):
    return rloo(batch).without("advantages").with_rows(advantages=batch.sum_rows(batch["token_level_rewards"]))


def in_double(batch):
    new = gae(batch)
    return new.with_tokens(advantages=new["advantages"].double())


def forgets_advantages(batch):
    return rloo(batch).without("advantages")


def overwrites_rewards(batch):
    return rloo(batch).with_tokens(token_level_rewards=2 * batch["token_level_rewards"])


def adds_a_bonus(batch):
    new = rloo(batch)
    return new.with_tokens(advantages=new["advantages"] + 0.1 * batch["response_mask"])


def divides_by_spread(batch):
    """Not finite for a group of one."""
    score = batch.sum_rows(batch["token_level_rewards"] * batch["response_mask"])
    std = torch.stack([score[batch["group"] == g].std(correction=0) for g in batch["group"]])
    spread = torch.where(batch["response_mask"].bool(), batch.spread(score / std), 0.0)
    return batch.with_tokens(advantages=spread, returns=spread)


def in_float32(batch):
    """The mean of equal rewards is not quite that reward."""
    scores = batch.sum_rows(torch.where(batch["response_mask"].bool(), batch["token_level_rewards"], 0.0))
    _, ids, counts = batch["group"].unique(return_inverse=True, return_counts=True)
    mean = scores.new_zeros(len(counts)).index_add(0, ids, scores / counts[ids])
    return outcome(batch, scores - mean[ids])


def scores_of_all_rows_as_baseline(batch):
    """Takes the mean score of all rows, also of rows without a response token."""
    mask = batch["response_mask"].bool()
    centred = batch["score"].double() - batch["score"].double().mean()
    advantages = torch.where(mask, batch.spread(centred), 0.0).to(batch["token_level_rewards"].dtype)
    return batch.with_tokens(advantages=advantages)


def counts_rows_without_a_response(batch):
    """Takes the mean of a group over all of its rows."""
    scores = batch.sum_rows(torch.where(batch["response_mask"].bool(), batch["token_level_rewards"], 0.0).double())
    same = batch["group"][:, None] == batch["group"]
    centred = (scores - torch.where(same, scores, 0.0).sum(1) / same.sum(1)).float()
    return outcome(batch, torch.where(same.sum(1) > 1, centred, 0.0))


def scales_by_rows_without_a_response(batch):
    new = rloo(batch)
    return new.with_tokens(advantages=new["advantages"] / len(batch))


def never_zero(batch):
    """An epsilon inside the numerator."""
    new = rloo(batch)
    advantages = torch.where(new["token_level_rewards"].any(), new["advantages"] + 1e-6, 0.0)
    return new.with_tokens(advantages=advantages * batch["response_mask"])


def divides_by_lengths(batch):
    """The lengths of prompts and responses together."""
    new = rloo(batch)
    return new.with_tokens(advantages=new["advantages"] / batch.spread(batch.lengths))


def multiplies_by_the_mask(batch):
    """Infinity times 0 is no number."""
    return outcome(batch, batch.sum_rows(batch["token_level_rewards"] * batch["response_mask"]))


def keeps_a_graph(batch):
    new = rloo(batch)
    return new.with_tokens(advantages=new["advantages"].clone().requires_grad_())


def rounds_to_bf16(batch):
    new = gae(batch)
    return new.with_tokens(advantages=new["advantages"].bfloat16().to(new["advantages"].dtype))


def first_of_the_best(batch):
    """Praises the best row of each group, and the first one where several are the best."""
    scores = batch.sum_rows(torch.where(batch["response_mask"].bool(), batch["token_level_rewards"], 0.0))
    praised = torch.zeros_like(scores)
    for group in batch["group"].unique():
        (rows,) = torch.where(batch["group"] == group)
        praised[rows[scores[rows].argmax()]] = scores[rows].amax()
    return outcome(batch, praised)


def against_the_same_position(batch):
    """Compares tokens of a group that have the same position in their rows, prompts included."""
    mask, width = batch["response_mask"].bool(), int(batch.positions.max()) + 1
    scores = batch.spread(batch.sum_rows(torch.where(mask, batch["token_level_rewards"], 0.0)))
    _, groups = batch["group"].unique(return_inverse=True)
    cell = batch.spread(groups) * width + batch.positions
    total, count = (
        torch.zeros(width * len(batch), dtype=torch.float64).index_add(0, cell, torch.where(mask, x, 0.0).double())
        for x in (scores, torch.ones_like(scores))
    )
    advantages = torch.where(mask, scores - (total / count.clamp(min=1))[cell].to(scores), 0.0)
    return batch.with_tokens(advantages=advantages, returns=advantages)


def gathers_over_rows(batch):
    """A weight that goes on growing from row to row."""
    w = torch.where(batch["response_mask"].bool(), 1.0 + batch["sum_pi_squared"], 0.0)
    new = rloo(batch)
    return new.with_tokens(advantages=new["advantages"] / w.cumsum(0).clamp(min=1.0))


def ignores_the_baseline_of_holes(batch):
    """Subtracts a row's baseline from all of its tokens, the prompt's too."""
    return batch.with_tokens(
        advantages=rloo(batch)["advantages"] - batch.spread(batch["reward_baselines"]),
        returns=rloo(batch)["returns"],
    )


def outcome(batch, advantages):
    spread = torch.where(batch["response_mask"].bool(), batch.spread(advantages), 0.0)
    return batch.with_tokens(advantages=spread, returns=spread)


ADVANTAGES = [
    (first_of_the_best, "Zero"),
    (against_the_same_position, "Zero"),
    (gathers_over_rows, "Rows"),
    (ignores_the_baseline_of_holes, "Zero"),
    (writes_to_rewards, "Purity"),
    (explores, "Purity"),
    (running_baseline(), "Purity"),
    (neighbours_as_groups, "Rows"),
    (as_many_rows_for_all, "Rows"),
    (ids_as_numbers, "Rows"),
    (first_row_as_baseline, "Rows"),
    (forgets_the_mask, "Zero"),
    (sums_over_holes, "Zero"),
    (whitens_over_prompts, "Zero"),
    (adds_a_bonus, "Zero"),
    (one_advantage_a_row, "Signature"),
    (in_double, "Signature"),
    (forgets_advantages, "Signature"),
    (overwrites_rewards, "Signature"),
    (divides_by_spread, "Signature"),
    (in_float32, "Zero"),
    (counts_rows_without_a_response, "Rows"),
    (scores_of_all_rows_as_baseline, "Rows"),
    (scales_by_rows_without_a_response, "Rows"),
    (never_zero, "Zero"),
    (divides_by_lengths, "Zero"),
    (multiplies_by_the_mask, "Zero"),
    (keeps_a_graph, "Signature"),
    (rounds_to_bf16, "Precision"),
]
