"""Every built-in loss, on batches of all sorts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import KEYS, examples

from verl_fn.steps import (
    aggregate,
    cross_entropy,
    entropy,
    kl_to_reference,
    loss,
    ppo_clip,
    value_clip,
)
from verl_fn.steps.aggregate import MODES
from verl_fn.testing import check_loss, tiny_batch, tiny_outputs

KL_KINDS = ["k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs"]
# Each with whether zero advantages must give a zero gradient.
LOSSES = {
    "ppo_clip": (ppo_clip(), True),
    "ppo_clip with bounds of its own": (ppo_clip(clip_ratio_low=0.1, clip_ratio_high=0.28), True),
    "ppo_clip with a tight dual clip": (ppo_clip(clip_ratio_c=1.2), True),
    "value_clip": (value_clip(), True),
    "value_clip, tight": (value_clip(0.05), True),
    "entropy": (entropy(), True),
    "cross_entropy": (cross_entropy(), True),
    **{
        f"kl_to_reference({kind}{plus})": (kl_to_reference(kind + plus), True)
        for kind in KL_KINDS
        for plus in ("", "+")
    },
    "twice ppo_clip": (2.0 * ppo_clip(), True),
    "policy, KL and entropy": (ppo_clip() + 0.1 * kl_to_reference() - 0.01 * entropy(), False),
    "policy and value": (ppo_clip() + 0.5 * value_clip(), False),
}


@pytest.mark.parametrize("name", LOSSES)
@given(key=KEYS, rows=st.integers(1, 9))
@examples(6)
def test_built_in_loss(name, key, rows):
    built_in, policy_only = LOSSES[name]
    check_loss(built_in, tiny_batch(key, rows=rows), zero_advantages=policy_only, key=key)


@pytest.mark.parametrize("mode", MODES)
def test_every_aggregation_is_a_weight(mode):
    check_loss(ppo_clip(), aggregate(tiny_batch(), mode, loss_scale_factor=8.0))


def test_a_loss_of_pairs_is_whole_where_pairs_stay_together():
    """DPO: one number for each pair, on the last token of its rows."""

    @loss(needs=["logprobs"])
    def dpo(outputs, batch):
        gain = batch.sum_rows((outputs.logprobs - batch["ref_log_prob"]) * batch["response_mask"])
        _, pair = batch["pair"].unique(return_inverse=True)
        margin = torch.zeros(int(pair.max()) + 1).index_add(0, pair, gain * batch["chosen"])
        return batch.spread(torch.nn.functional.softplus(-margin)[pair]), {}

    batch = tiny_batch(rows=8).with_rows(pair=torch.arange(8) // 2, chosen=torch.tensor([1.0, -1.0] * 4))
    check_loss(dpo, aggregate(batch, "seq"), together="pair")


def test_a_loss_reads_fields_of_its_own():
    @loss(needs=["logprobs"])
    def distil(outputs, batch):
        return (outputs.logprobs - batch["teacher_log_probs"]).square(), {}

    with pytest.raises(KeyError, match="teacher_log_probs"):
        check_loss(distil)
    check_loss(distil, tiny_batch().with_tokens(teacher_log_probs=tiny_outputs(tiny_batch()).logprobs))
