"""Broken losses, each with the law that it breaks."""

import torch

from verl_fn.state import (
    Moments,
    Sum,
    Weighted,
)
from verl_fn.steps import (
    loss,
    ppo_clip,
    token_mean,
    whiten_masked,
)


@loss(needs=["logprobs"])
def divides_by_tokens(outputs, batch):
    return -batch["advantages"] * outputs.logprobs / batch["response_mask"].sum(), {}


@loss(needs=["logprobs"])
def whitens_inside(outputs, batch):
    return -whiten_masked(batch["advantages"], batch["response_mask"]) * outputs.logprobs, {}


@loss(needs=["logprobs"])
def sums_across_rows(outputs, batch):
    """A running ratio that does not start again with each row."""
    ratio = (outputs.logprobs - batch["old_log_probs"]).cumsum(0).clamp(-20.0, 20.0).exp()
    return -batch["advantages"] * ratio, {}


@loss(needs=["candidate_logprobs"])
def centres_candidates(outputs, batch):
    centred = outputs.candidate_logprobs - outputs.candidate_logprobs.mean(0).square()
    return centred.sum(-1), {}


@loss(needs=["logprobs"])
def mean_as_metric(outputs, batch):
    per_token, metrics = ppo_clip()(outputs, batch)
    return per_token, metrics | {"actor/mean": Weighted(per_token.detach().mean(), 1.0)}


@loss(needs=["logprobs"])
def number_as_metric(outputs, batch):
    per_token, metrics = ppo_clip()(outputs, batch)
    return per_token, metrics | {"actor/mean": per_token.mean().item()}


@loss(needs=["logprobs"])
def keeps_the_graph(outputs, batch):
    per_token, metrics = ppo_clip()(outputs, batch)
    return per_token, metrics | {"actor/sum": Sum(per_token.sum())}


@loss(needs=["logprobs"])
def counts_prompts(outputs, batch):
    per_token, metrics = ppo_clip()(outputs, batch)
    ratio = outputs.logprobs - batch["old_log_probs"]
    return per_token, metrics | {"actor/std": Moments.of(ratio, torch.ones_like(ratio), stat="std")}


@loss(needs=["logprobs"])
def counts_calls(outputs, batch):
    per_token, metrics = ppo_clip()(outputs, batch)
    return per_token, metrics | {"actor/parts": Sum(1)}


@loss(needs=["logprobs"])
def one_a_row(outputs, batch):
    return -batch.sum_rows(batch["advantages"] * outputs.logprobs), {}


@loss(needs=["logprobs"])
def reads_undeclared(outputs, batch):
    return ppo_clip()(outputs, batch)[0] - 0.01 * outputs.entropy, {}


@loss(needs=["logprobs"])
def reads_if_there(outputs, batch):
    """Changes with what another term of a sum happens to need."""
    bonus = getattr(outputs, "entropy", 0.0)
    return ppo_clip()(outputs, batch)[0] - 0.01 * bonus, {}


@loss(needs=["logprobs"])
def clamps_in_place(outputs, batch):
    batch["advantages"].clamp_(-0.5, 0.5)
    return ppo_clip()(outputs, batch)


@loss(needs=["logprobs"])
def writes_to_outputs(outputs, batch):
    outputs.logprobs.detach().clamp_(min=-0.5)
    return ppo_clip()(outputs, batch)


@loss(needs=["logprobs"])
def drops_out(outputs, batch):
    per_token, metrics = ppo_clip()(outputs, batch)
    return per_token * (torch.rand(len(per_token)) > 0.1), metrics


def keeps_a_baseline():
    seen = []

    @loss(needs=["logprobs"])
    def with_baseline(outputs, batch):
        seen.append(float(batch["advantages"].mean()))
        baseline = sum(seen) / len(seen) + len(seen)
        return -(batch["advantages"] - baseline) * outputs.logprobs, {"mean": token_mean(batch, outputs.logprobs)}

    return with_baseline


@loss(needs=["logprobs"])
def does_not_clamp(outputs, batch):
    return -batch["advantages"] * (outputs.logprobs - batch["old_log_probs"]).exp(), {}


@loss(needs=["logprobs"])
def pulls_without_advantage(outputs, batch):
    return -(batch["advantages"] + 0.01) * outputs.logprobs, {}


@loss(needs=["logprobs"])
def not_finite_for_one_token(outputs, batch):
    """Divides by the standard deviation of a row, which may have one token."""
    others = batch.spread(batch.sum_rows(batch["response_mask"])) - 1.0
    return -batch["advantages"] * outputs.logprobs / others, {}


@loss(needs=["logprobs"])
def detaches(outputs, batch):
    return -batch["advantages"] * outputs.logprobs.detach(), {}


@loss(needs=["logprobs"], level="row")
def compares_with_the_next_row(outputs, batch):
    """Rows that it compares may be in another micro-batch."""
    rows = batch.sum_rows(outputs.logprobs)
    return (rows - rows.roll(1)).square(), {}


@loss(needs=["logprobs"], level="row")
def token_loss_as_row_loss(outputs, batch):
    return -batch["advantages"] * outputs.logprobs, {}


@loss(needs=["row_values"], level="row")
def mean_over_rows(outputs, batch):
    return outputs.row_values.square() / len(batch), {}


@loss(needs=["logprobs"])
def divides_by_lengths(outputs, batch):
    """The lengths of prompts and responses together."""
    return -batch["advantages"] * outputs.logprobs / batch.spread(batch.lengths), {}


@loss(needs=["logprobs"])
def discounts_by_position(outputs, batch):
    return -batch["advantages"] * outputs.logprobs * 0.9**batch.positions, {}


@loss(needs=["logprobs"])
def applies_weights(outputs, batch):
    return -batch["advantages"] * outputs.logprobs * batch["loss_weight"], {}


@loss(needs=["row_values"], level="row")
def applies_row_weights(outputs, batch):
    return outputs.row_values.square() * batch["row_weight"], {}


@loss(needs=["logprobs"])
def multiplies_by_the_mask(outputs, batch):
    """Infinity times 0 is no number."""
    kl = (outputs.logprobs - batch["ref_log_prob"]) * batch["response_mask"]
    return kl, {"actor/kl": Sum(kl.detach().sum())}


@loss(needs=["logprobs"], level="row")
def sums_rows_times_the_mask(outputs, batch):
    return -batch.sum_rows(batch["advantages"] * outputs.logprobs * batch["response_mask"]), {}


@loss(needs=["logprobs"])
def is_constant(outputs, batch):
    return batch["advantages"] * (outputs.logprobs - batch["old_log_probs"]).sign(), {}


@loss(needs=["entropy"])
def is_detached(outputs, batch):
    return outputs.entropy.detach() + 0.0 * outputs.entropy, {}


def depends_on_a_parameter():
    weight = torch.ones((), requires_grad=True)

    @loss(needs=["logprobs"])
    def learns_by_itself(outputs, batch):
        return weight * batch["advantages"], {}

    return learns_by_itself


@loss(needs=["logprobs"])
def returns_bf16(outputs, batch):
    return (-batch["advantages"] * outputs.logprobs).bfloat16(), {}


@loss(needs=["logprobs"])
def rounds_to_bf16(outputs, batch):
    return -batch["advantages"] * outputs.logprobs.bfloat16().to(outputs.logprobs.dtype), {}


@loss(needs=["hidden"])
def reads_what_no_backend_serves(outputs, batch):
    return outputs.hidden.sum(-1), {}


@loss(needs=["logprobs"])
def selects_inside(outputs, batch):
    """Leaves out the tokens of highest covariance in this micro-batch."""
    advantages, mask = batch["advantages"], batch["response_mask"] != 0
    covariance = torch.where(mask, advantages * outputs.logprobs.detach(), -torch.inf)
    largest = covariance >= covariance.topk(max(1, int(0.2 * int(mask.sum())))).values[-1]
    return torch.where(largest, 0.0, -advantages * outputs.logprobs), {}


@loss(needs=["logprobs"])
def draws_inside(outputs, batch):
    """Leaves out tokens that a generator of the process draws."""
    drawn = torch.randperm(batch.num_tokens)[: batch.num_tokens // 2]
    return -(batch["advantages"] * outputs.logprobs).index_fill(0, drawn, 0.0), {}


@loss(needs=["logprobs"])
def one_ratio_for_all_rows(outputs, batch):
    mask = batch["response_mask"] != 0
    gap = torch.where(mask, (outputs.logprobs - batch["old_log_probs"]).clamp(-20.0, 20.0), 0.0)
    return -batch["advantages"] * (gap.sum() / mask.sum().clamp(min=1)).exp(), {}


@loss(needs=["logprobs"], level="row")
def ratio_over_whole_lengths(outputs, batch):
    """The geometric mean over a row's prompt and response."""
    mask = batch["response_mask"] != 0
    gap = torch.where(mask, (outputs.logprobs - batch["old_log_probs"]).clamp(-20.0, 20.0), 0.0)
    advantages = batch.sum_rows(torch.where(mask, batch["advantages"], 0.0))
    return -advantages * (batch.sum_rows(gap) / batch.lengths).exp(), {}


@loss(needs=["logprobs"])
def penalizes_without_advantage(outputs, batch):
    """A penalty without ``zero_advantages=False``, which losses with a penalty, such as DRO, declare."""
    gap = outputs.logprobs - batch["old_log_probs"]
    return gap.square() - batch["advantages"] * outputs.logprobs, {}


@loss(needs=["logprobs"], level="row")
def estimates_the_kl_inside(outputs, batch):
    """KTO with a reference point of the micro-batch."""
    gain = batch.sum_rows(torch.where(batch["response_mask"] != 0, outputs.logprobs - batch["ref_log_prob"], 0.0))
    return torch.sigmoid(gain.detach().mean() - gain), {}


def margins(batch, gain):
    _, pair = batch["pair"].unique(return_inverse=True)
    return gain.new_zeros(int(pair.max()) + 1).index_add(0, pair, gain * (2.0 * batch["chosen"] - 1.0)), pair


@loss(needs=["row_values"], level="row", together="pair")
def divides_by_pairs(outputs, batch):
    margin, pair = margins(batch, outputs.row_values)
    return torch.nn.functional.softplus(-margin)[pair] / len(margin), {}


@loss(needs=["row_values"], level="row", together="pair")
def takes_neighbours_for_pairs(outputs, batch):
    """The preferred row comes first only where nobody permutes the rows."""
    first, second = outputs.row_values.reshape(-1, 2).unbind(1)
    return torch.nn.functional.softplus(second - first).repeat_interleave(2), {}


@loss(needs=["logprobs"], level="row", together="pair")
def averages_over_prompts(outputs, batch):
    """SimPO with a mean over prompt and response."""
    mean = batch.sum_rows(torch.where(batch["response_mask"] != 0, outputs.logprobs, 0.0)) / batch.lengths
    margin, pair = margins(batch, mean)
    return torch.nn.functional.softplus(-margin)[pair], {}


LOSSES = [
    (selects_inside, "Split invariance"),
    (draws_inside, "Purity"),
    (one_ratio_for_all_rows, "Split invariance"),
    (ratio_over_whole_lengths, "Zero"),
    (penalizes_without_advantage, "Zero"),
    (estimates_the_kl_inside, "Split invariance"),
    (divides_by_pairs, "Split invariance"),
    (takes_neighbours_for_pairs, "Split invariance"),
    (averages_over_prompts, "Zero"),
    (compares_with_the_next_row, "Split invariance"),
    (mean_over_rows, "Split invariance"),
    (token_loss_as_row_loss, "Signature"),
    (divides_by_tokens, "Split invariance"),
    (whitens_inside, "Split invariance"),
    (sums_across_rows, "Split invariance"),
    (centres_candidates, "Split invariance"),
    (mean_as_metric, "Split invariance"),
    (counts_calls, "Split invariance"),
    (number_as_metric, "Signature"),
    (keeps_the_graph, "Signature"),
    (one_a_row, "Signature"),
    (detaches, "Signature"),
    (counts_prompts, "Zero"),
    (pulls_without_advantage, "Zero"),
    (reads_undeclared, "Purity"),
    (reads_if_there, "Purity"),
    (clamps_in_place, "Purity"),
    (writes_to_outputs, "Purity"),
    (drops_out, "Purity"),
    (keeps_a_baseline(), "Purity"),
    (does_not_clamp, "Finite"),
    (not_finite_for_one_token, "Finite"),
    (divides_by_lengths, "Zero"),
    (discounts_by_position, "Zero"),
    (multiplies_by_the_mask, "Zero"),
    (sums_rows_times_the_mask, "Zero"),
    (applies_weights, "Signature"),
    (applies_row_weights, "Signature"),
    (is_constant, "Signature"),
    (ppo_clip() + is_detached, "Signature"),
    (depends_on_a_parameter(), "Signature"),
    (returns_bf16, "Signature"),
    (rounds_to_bf16, "Precision"),
    (reads_what_no_backend_serves, "Signature"),
]
