"""Every built-in loss, on batches of all sorts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import KEYS, examples

from verl_fn.steps import (
    aggregate,
    aggregate_rows,
    bradley_terry,
    cdpo,
    cispo,
    clip_cov,
    cross_entropy,
    distill,
    distill_top_k,
    dpo,
    dppo_kl,
    dppo_tv,
    dro,
    entropy,
    geo_mean,
    gspo,
    ipo,
    kl_cov,
    kl_to_reference,
    kto,
    loss,
    orpo,
    ppo_clip,
    reinforce,
    sapo,
    simpo,
    value_clip,
)
from verl_fn.steps.aggregate import MODES, ROW_MODES
from verl_fn.testing import LawViolation, check_loss, tiny_batch, tiny_outputs, tiny_pairs
from verl_fn.testing.builders import tiny_candidates

KL_KINDS = ["k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs"]
# Each with whether zero advantages must give a zero gradient.
LOSSES = {
    "ppo_clip": (ppo_clip(), True),
    "ppo_clip with bounds of its own": (ppo_clip(clip_ratio_low=0.1, clip_ratio_high=0.28), True),
    "ppo_clip with a tight dual clip": (ppo_clip(clip_ratio_c=1.2), True),
    "reinforce": (reinforce(), True),
    "gspo": (gspo(), True),
    "gspo with bounds of its own": (gspo(clip_ratio_low=0.02, clip_ratio_high=0.05), True),
    "geo_mean": (geo_mean(), True),
    "geo_mean with bounds of its own": (geo_mean(0.4, clip_ratio_low=0.1), True),
    "sapo": (sapo(), True),
    "sapo, sharp": (sapo(2.0, 5.0), True),
    "cispo": (cispo(), True),
    "dro": (dro(0.5), False),
    "dppo_tv": (dppo_tv(0.1), True),
    "dppo_kl": (dppo_kl(0.05), True),
    "dppo_kl, truncated early": (dppo_kl(0.05, clip_ratio_high=0.2, clip_ratio_c=1.1), True),
    "clip_cov": (clip_cov(), True),
    "kl_cov": (kl_cov(), False),
    "geo_mean and KL": (geo_mean() + 0.1 * kl_to_reference(), False),
    "value_clip": (value_clip(), True),
    "value_clip, tight": (value_clip(0.05), True),
    "entropy": (entropy(), True),
    "capped entropy": (entropy(cap=0.7), True),
    "cross_entropy": (cross_entropy(), True),
    **{
        f"kl_to_reference({kind}{plus})": (kl_to_reference(kind + plus), True)
        for kind in KL_KINDS
        for plus in ("", "+")
    },
    "twice ppo_clip": (2.0 * ppo_clip(), True),
    "a sum of halves": (sum([ppo_clip() / 2, gspo() / 2]), True),
    "policy, KL and entropy": (ppo_clip() + 0.1 * kl_to_reference() - 0.01 * entropy(), False),
    "policy and value": (ppo_clip() + 0.5 * value_clip(), False),
}


@pytest.mark.parametrize("name", LOSSES)
@given(key=KEYS, rows=st.integers(1, 9))
@examples(5)
def test_built_in_loss(name, key, rows):
    built_in, policy_only = LOSSES[name]
    check_loss(built_in, tiny_batch(key, rows=rows), zero_advantages=policy_only, key=key)


PAIR_LOSSES = {
    "bradley_terry": bradley_terry(),
    "bradley_terry, centered": bradley_terry(center_rewards_coefficient=0.1),
    "dpo": dpo(),
    "dpo, steep": dpo(3.0),
    "cdpo": cdpo(),
    "ipo": ipo(),
    "simpo": simpo(),
    "orpo": orpo(),
    "dpo and orpo": dpo() + 0.5 * orpo(),
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
@given(key=KEYS, pairs=st.integers(1, 5))
@examples(6)
def test_loss_of_pairs(name, key, pairs):
    check_loss(PAIR_LOSSES[name], tiny_pairs(key, pairs=pairs), together="pair", key=key)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@given(key=KEYS, rows=st.integers(1, 9))
@examples(6)
def test_distill(kl, key, rows):
    batch = tiny_batch(key, rows=rows)
    check_loss(distill(kl), batch.with_tokens(teacher_log_probs=batch["ref_log_prob"]), key=key)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@given(key=KEYS, rows=st.integers(1, 9))
@examples(6)
def test_distill_top_k(kl, key, rows):
    batch = tiny_batch(key, rows=rows)
    batch = batch.with_tokens(teacher_candidate_log_probs=tiny_candidates(batch, key.fold_in("teacher")))
    check_loss(distill_top_k(kl), batch, key=key)


@given(key=KEYS, rows=st.integers(1, 9))
@examples(6)
def test_kto(key, rows):
    batch = tiny_batch(key, rows=rows)
    fields = {"label": (torch.arange(rows) % 2).float(), "reference_point": torch.full((rows,), 0.2)}
    check_loss(kto(), batch.with_rows(**fields), key=key)


@pytest.mark.parametrize("mode", ROW_MODES)
def test_every_aggregation_of_rows_is_a_weight(mode):
    batch = aggregate_rows(tiny_pairs(), mode, group="pair")
    check_loss(bradley_terry() - 0.5 * ppo_clip(), batch, zero_advantages=False)


@pytest.mark.parametrize("mode", MODES)
def test_every_aggregation_is_a_weight(mode):
    check_loss(ppo_clip(), aggregate(tiny_batch(), mode, loss_scale_factor=8.0))


def test_a_loss_of_pairs_is_whole_where_pairs_stay_together():
    """DPO: one number for each pair."""

    @loss(needs=["logprobs"], level="row", together="pair")
    def dpo(outputs, batch):
        gain = batch.sum_rows(torch.where(batch["response_mask"] != 0, outputs.logprobs - batch["ref_log_prob"], 0.0))
        _, pair = batch["pair"].unique(return_inverse=True)
        margin = gain.new_zeros(int(pair.max()) + 1).index_add(0, pair, gain * (2.0 * batch["chosen"] - 1.0))
        return torch.nn.functional.softplus(-margin)[pair], {}

    check_loss(dpo)
    check_loss(dpo, tiny_pairs(pairs=3), together="pair")
    check_loss(ppo_clip() + 0.1 * dpo, tiny_pairs(), together="pair", zero_advantages=False)
    with pytest.raises(LawViolation, match="declares together=None"):
        check_loss(ppo_clip(), tiny_pairs(), together="pair")


def test_a_loss_reads_fields_of_its_own():
    @loss(needs=["logprobs"])
    def distil(outputs, batch):
        return (outputs.logprobs - batch["teacher_log_probs"]).square(), {}

    with pytest.raises(KeyError, match="teacher_log_probs"):
        check_loss(distil)
    check_loss(distil, tiny_batch().with_tokens(teacher_log_probs=tiny_outputs(tiny_batch()).logprobs))


def test_a_function_that_makes_a_loss_is_to_be_called():
    with pytest.raises(TypeError, match=r"takes a Loss, not a function: .*check_loss\(mine\(\)\)"):
        check_loss(lambda low=0.2: None)
