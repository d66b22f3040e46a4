"""Importance weights of rollouts: against plain loops in float64, and the laws of a step on batches."""

import math
import pickle

import pytest
import torch
from step_builders import assert_rows, chosen, pack, ragged, scatter

from verl_fn.algorithms.policy import estimator
from verl_fn.config.algorithms import GRPO
from verl_fn.state import Batch, TokenOutputs, tree
from verl_fn.state.metrics import merge
from verl_fn.steps import (
    aggregate,
    correct_advantages,
    exact_gap,
    importance_weights,
    ppo_clip,
    rollout_gap,
    total_loss,
)
from verl_fn.testing import tiny_batch

FIELDS = ("old_log_probs", "rollout_log_probs", "advantages")


def numbers(metrics):
    return {name: metric.value for name, metric in metrics.items()}


def expected_weights(masks, fields, level, low, high, outside):
    """One row after the other, one token after the other."""
    result = []
    for row in chosen(masks, [a - b for a, b in zip(fields[FIELDS[0]], fields[FIELDS[1]], strict=True)]):
        whole = {"sequence": math.fsum(row), "geometric": math.fsum(row) / max(len(row), 1)}.get(level)
        ratios = [math.exp(d if whole is None else whole) for d in row]
        if outside == "truncate":
            result.append([min(max(r, low), high) for r in ratios])
        else:
            result.append([r if low <= r <= high else 0.0 for r in ratios])
    return result


@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@ragged
def test_weights_are_bounded_ratios_and_multiply_advantages(level, outside, masks, seed):
    batch, fields = pack(masks, seed, *FIELDS)
    bounds = {"low": 0.4, "high": 1.5, "outside": outside}
    corrected = correct_advantages(batch, level, **bounds)
    weights = scatter(masks, expected_weights(masks, fields, level, 0.4, 1.5, outside))
    assert_rows(corrected, "rollout_is_weights", weights)
    assert_rows(corrected, "advantages", [w * a for w, a in zip(weights, fields["advantages"], strict=True)])
    assert tree.equal(corrected.without("rollout_is_weights", "advantages"), batch.without("advantages"))


@ragged
def test_equal_probabilities_change_nothing(masks, seed):
    batch, _ = pack(masks, seed, *FIELDS)
    batch = batch.with_tokens(rollout_log_probs=batch["old_log_probs"])
    mask = batch["response_mask"].bool()
    for level in ("token", "sequence", "geometric"):
        for bounds in ({}, {"low": 1.0, "high": 1.0, "outside": "mask"}):
            weights = importance_weights(batch, level, **bounds)[mask]
            assert torch.equal(weights, torch.ones(int(mask.sum()), dtype=torch.float64))
    if mask.any():
        measured = numbers(rollout_gap(batch))
        # The probabilities of a single token have no correlation.
        correlation = measured.pop("training/rollout_actor_probs_pearson_corr")
        assert math.isnan(correlation) or correlation == pytest.approx(1.0)
        assert measured.pop("rollout_corr/rollout_is_eff_sample_size") == 1.0 and set(measured.values()) == {0.0}


def test_the_gap_by_hand_and_in_parts():
    engine, trainer, mask = (
        [0.0, math.log(0.5), math.log(0.25)],
        [9.0, math.log(0.25), math.log(0.5)],
        [0.0, 1.0, 1.0],
    )
    row = {"rollout_log_probs": [engine], "old_log_probs": [trainer], "response_mask": [mask]}
    batch = Batch.from_rows([[1, 2, 3]], {name: torch.tensor(field) for name, field in row.items()})
    assert numbers(rollout_gap(batch)) == pytest.approx(
        {
            "training/rollout_probs_diff_mean": 0.25,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_probs_diff_std": 0.0,
            "training/rollout_actor_probs_pearson_corr": -1.0,
            "rollout/log_prob_diff_mean": math.log(2),
            "rollout_corr/kl": 0.0,
            "rollout_corr/k3_kl": 0.25,  # of 0.5 - 1 + log 2 and 2 - 1 - log 2
            "rollout_corr/rollout_is_eff_sample_size": 2.5**2 / (2 * 4.25),
        },
        abs=1e-6,
    )
    cut = batch.with_tokens(rollout_full_log_probs=batch["old_log_probs"])
    assert rollout_gap(cut)["training/rollout_probs_diff_max"].value == 0.0
    whole, _ = pack([[0, 1, 1], [1, 0], [1, 1, 1]], 0, *FIELDS)
    parts = merge(*(rollout_gap(whole.take([i])) for i in range(3)))
    assert numbers(parts) == pytest.approx(numbers(rollout_gap(whole)))


def test_the_gap_of_a_far_token_is_measured_without_bounds():
    """One ratio of e^3 beside three of 1."""
    batch, _ = pack([[0, 1, 1], [1, 1]], 0, *FIELDS)
    engine = torch.full((5,), -4.0)
    batch = batch.with_tokens(
        old_log_probs=engine + torch.tensor([9.0, 0.0, 3.0, 0.0, 0.0]), rollout_log_probs=engine
    )
    found, far = numbers(rollout_gap(batch)), math.exp(3.0)
    assert {name: value for name, value in found.items() if not name.startswith("training/")} == pytest.approx(
        {
            "rollout/log_prob_diff_mean": 0.75,
            "rollout_corr/kl": -0.75,
            "rollout_corr/k3_kl": (far - 4.0) / 4,
            "rollout_corr/rollout_is_eff_sample_size": (far + 3) ** 2 / (4 * (far**2 + 3)),
        },
        rel=1e-6,
    )


def test_log_probs_that_are_nan_differ_from_the_engines():
    batch, _ = pack([[0, 1, 1], [1, 0]], 0, *FIELDS)
    broken = torch.where(batch["response_mask"] != 0, math.nan, batch["rollout_log_probs"])
    found = numbers(exact_gap(batch, broken))
    assert found["rollout/tokens_differing"] == 3.0 and math.isnan(found["rollout/log_prob_diff_max"])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_values_outside_the_mask_do_not_matter(level):
    batch, _ = pack([[0, 1, 1], [1, 0]], 0, *FIELDS)
    outside = batch["response_mask"] == 0
    wild = {name: torch.where(outside, math.nan, batch[name]) for name in FIELDS[:2]}
    assert torch.equal(importance_weights(batch.with_tokens(**wild), level), importance_weights(batch, level))
    assert numbers(rollout_gap(batch.with_tokens(**wild))) == numbers(rollout_gap(batch))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_order_of_rows_does_not_matter(level):
    batch, _ = pack([[0, 1, 1], [1, 0], [1, 1, 1, 1]], 0, *FIELDS)
    order = torch.tensor([2, 0, 1])
    corrected = correct_advantages(batch, level)
    assert tree.equal(correct_advantages(batch.take(order), level), corrected.take(order))


def test_a_loss_of_corrected_advantages_is_the_weighted_loss():
    batch, _ = pack([[1, 1, 0, 1], [0, 1, 1]], 3, *FIELDS)
    batch = aggregate(batch, "token-mean")
    outputs = TokenOutputs({"logprobs": batch["old_log_probs"] + 0.3 * batch["advantages"].flip(0)})
    corrected = correct_advantages(batch, "token", high=1.2)
    weighted = batch.with_tokens(loss_weight=batch["loss_weight"] * corrected["rollout_is_weights"])
    got, expected = (float(total_loss(ppo_clip(), outputs, one)[0]) for one in (corrected, weighted))
    assert got == pytest.approx(expected, rel=1e-9)


def test_cut_distributions_are_compared_before_the_cut():
    batch, _ = pack([[1, 1]], 0, *FIELDS)
    full = batch.with_tokens(rollout_full_log_probs=batch["rollout_log_probs"], rollout_log_probs=torch.zeros(2))
    assert torch.equal(importance_weights(full), importance_weights(batch))


def test_huge_ratios_stay_finite():
    batch, _ = pack([[1] * 6], 0, *FIELDS)
    # Equal probabilities would have no correlation.
    trainer, engine = torch.linspace(-2.0, -1.0, 6), torch.tensor([-1.0] + [-1e4] * 5)
    batch = batch.with_tokens(old_log_probs=trainer, rollout_log_probs=engine)
    weights = importance_weights(batch, "sequence", high=1e30)
    assert torch.isfinite(weights).all() and all(map(math.isfinite, numbers(rollout_gap(batch)).values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "row"}, "level is 'row'"),
        ({"outside": "clip"}, "outside 'clip'"),
        ({"low": 2.0, "high": 1.0}, "0 <= low <= high"),
        ({"low": -1.0}, "0 <= low <= high"),
        ({"high": math.nan}, "0 <= low <= high"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    batch, _ = pack([[1]], 0, *FIELDS)
    with pytest.raises(ValueError, match=message):
        importance_weights(batch, **options)


def test_weights_have_the_dtype_of_the_log_probs_and_other_tokens_do_not_differ():
    batch, _ = pack([[0, 1, 1]], 0, *FIELDS)
    narrow = batch.with_tokens(**{name: batch[name].float() for name in FIELDS})
    corrected = correct_advantages(narrow)
    assert corrected["rollout_is_weights"].dtype == corrected["advantages"].dtype == torch.float32
    others = narrow["rollout_log_probs"] + torch.tensor([3.0, 0.0, 0.5])
    assert numbers(exact_gap(narrow, others)) == {
        "rollout/tokens_differing": 1.0, "rollout/log_prob_diff_max": pytest.approx(0.5),
    }  # fmt: skip


def test_the_config_puts_the_correction_after_the_estimator():
    options = GRPO(rollout_is="sequence", rollout_is_threshold=1.1, rollout_is_outside="mask")
    batch = tiny_batch().without("advantages", "returns")
    plain = estimator(GRPO())(batch)
    corrected = estimator(options)(batch)
    assert tree.equal(corrected, correct_advantages(plain, "sequence", high=1.1, outside="mask"))
    assert not tree.equal(corrected["advantages"], plain["advantages"])
    assert tree.equal(pickle.loads(pickle.dumps(estimator(options)))(batch), corrected)
