"""The estimators besides GAE, GRPO and RLOO, in float64, against loops over rows and tokens."""

import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from step_builders import MODEST, SEEDS, assert_rows, pack

from verl_fn.steps import (
    dr_grpo,
    gdpo,
    gpg,
    grpo_passk,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus_baseline,
    remax,
    tir_optimal_token_baseline,
)

GROUPS = st.lists(st.sampled_from([-3, 0, 2**40]), min_size=1, max_size=8)


def drawn(groups, seed):
    """Rows with holes between their turns; every token may have a reward, of few values, so that some are equal."""
    rng = np.random.default_rng(seed)
    masks = [[0, 1, *rng.integers(0, 2, size=rng.integers(0, 5)).tolist()] for _ in groups]
    batch, fields = pack(masks, seed, "old", "spread", "ratio", group=groups)
    rewards = [rng.integers(0, 3, size=len(mask)) * np.array(mask, dtype=float) for mask in masks]
    chance = [1 / (1 + np.exp(-row)) for row in fields["old"]]
    rows = {name: rng.integers(0, 3, size=len(groups)) / 2 for name in ("reward/style", "reward/truth")}
    batch = batch.with_tokens(
        token_level_rewards=np.concatenate(rewards),
        old_log_probs=np.log(np.concatenate(chance)),
        sum_pi_squared=np.concatenate([p**2 + (1 - p) ** 2 for p in chance]),
        rollout_is_weights=np.exp(np.concatenate(fields["ratio"])),
    ).with_rows(reward_baselines=rng.normal(size=len(groups)), **rows)
    return batch, masks, rewards


def members(groups, row):
    return [i for i, name in enumerate(groups) if name == groups[row]]


def centred(scores, groups, row):
    rows = members(groups, row)
    return scores[row] - statistics.fmean(scores[i] for i in rows)


def deviation(scores, groups, row):
    rows = members(groups, row)
    return statistics.stdev(scores[i] for i in rows) if len(rows) > 1 else 1.0


def by_hand_dr_grpo(scores, groups, lengths):
    return [centred(scores, groups, row) for row in range(len(groups))]


def by_hand_passk(scores, groups, lengths):
    advantages = []
    for row in range(len(groups)):
        others = [scores[i] for i in members(groups, row) if i != row]
        best = max(others, default=0.0)
        gap = max(scores[row] - best, 0.0) / (deviation(scores, groups, row) + 1e-6)
        advantages.append(gap if others else 0.0)
    return advantages


def by_hand_opo(scores, groups, lengths):
    advantages = []
    for row in range(len(groups)):
        rows = members(groups, row)
        tokens = sum(lengths[i] for i in rows)
        baseline = sum(scores[i] * lengths[i] for i in rows) / tokens
        advantages.append(scores[row] - baseline)
    return advantages


def by_hand_gpg(scores, groups, lengths):
    plain = by_hand_dr_grpo(scores, groups, lengths)
    live = sum(any(abs(plain[i]) > 1e-12 for i in members(groups, row)) for row in range(len(groups)))
    return [len(groups) / max(live, 1) * a / 0.5 for a in plain]


OUTCOMES = {
    "dr_grpo": (dr_grpo, by_hand_dr_grpo),
    "grpo_passk": (grpo_passk, by_hand_passk),
    "opo": (opo, by_hand_opo),
    "gpg": (partial(gpg, f_norm=0.5), by_hand_gpg),
}


def spread(masks, rows):
    return [value * np.array(mask, dtype=float) for value, mask in zip(rows, masks, strict=True)]


@pytest.mark.parametrize("name", OUTCOMES)
@given(groups=GROUPS, seed=SEEDS)
@example(groups=[0, 2, 0, -3, 2, 0], seed=0)
@MODEST
def test_one_advantage_per_row(name, groups, seed):
    batch, masks, rewards = drawn(groups, seed)
    estimator, formula = OUTCOMES[name]
    rows = formula([float(r.sum()) for r in rewards], groups, [sum(mask) for mask in masks])
    estimated = estimator(batch)
    for field in ("advantages", "returns"):
        assert_rows(estimated, field, spread(masks, rows), rtol=1e-7, atol=1e-9)


def whitened(masks, rows, groups):
    """Mean 0 and variance 1 over all response tokens of rows that are compared with others."""
    masks = [[m * (len(members(groups, row)) > 1) for m in mask] for row, mask in enumerate(masks)]
    values = [value for value, mask in zip(rows, masks, strict=True) for _ in range(sum(mask))]
    if len(values) < 2:
        return spread(masks, [0.0] * len(rows))
    mean, scale = statistics.fmean(values), math.sqrt(statistics.variance(values) + 1e-8)
    return spread(masks, [(value - mean) / scale for value in rows])


@given(groups=GROUPS, seed=SEEDS)
@MODEST
def test_reinforce_plus_plus_baseline(groups, seed):
    batch, masks, rewards = drawn(groups, seed)
    rows = by_hand_dr_grpo([float(r.sum()) for r in rewards], groups, None)
    assert_rows(
        reinforce_plus_plus_baseline(batch), "advantages", whitened(masks, rows, groups), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("by_std", [True, False])
@given(groups=GROUPS, seed=SEEDS)
@MODEST
def test_gdpo(by_std, groups, seed):
    batch, masks, _ = drawn(groups, seed)
    rows = [0.0] * len(groups)
    for name, weight in (("truth", 1.0), ("style", -0.25)):
        scores = batch[f"reward/{name}"].tolist()
        for row in range(len(groups)):
            divisor = deviation(scores, groups, row) + 1e-6 if by_std else 1.0
            rows[row] += weight * centred(scores, groups, row) / divisor
    estimated = gdpo(batch, reward_keys=["truth", "style"], reward_weights=[1.0, -0.25], norm_adv_by_std=by_std)
    assert_rows(estimated, "advantages", whitened(masks, rows, groups), rtol=1e-6, atol=1e-6)


def test_gdpo_uses_all_rewards_by_default_and_names_what_is_missing():
    batch, _, _ = drawn([0, 0, 2, 2], 1)
    explicit = gdpo(batch, reward_keys=["style", "truth"], reward_weights=[1.0, 1.0])
    assert gdpo(batch)["advantages"].tolist() == explicit["advantages"].tolist()
    with pytest.raises(ValueError, match=r"gdpo needs the rewards \['form'\] .* this batch has \['style', 'truth'\]"):
        gdpo(batch, reward_keys=["truth", "form"])
    # Weights without names are of the names in order, whatever order the fields were written in.
    other = batch.without("reward/style", "reward/truth").with_rows(
        **{name: batch[name] for name in ("reward/truth", "reward/style")}
    )
    weighted = [gdpo(one, reward_weights=[3.0, 1.0])["advantages"].tolist() for one in (batch, other)]
    assert weighted[0] == weighted[1]
    assert (
        weighted[0] == gdpo(batch, reward_keys=["style", "truth"], reward_weights=[3.0, 1.0])["advantages"].tolist()
    )
    for weights in ([1.0], [1.0] * 3):
        with pytest.raises(ValueError, match=f"{len(weights)} reward_weights for 2 reward_keys"):
            gdpo(batch, reward_weights=weights)
    lacking = batch["reward/style"].clone()
    lacking[2] = torch.nan
    with pytest.raises(ValueError, match=r"reward/style is nan .* in row 2 of .*; let the reward function return"):
        gdpo(batch.with_rows(**{"reward/style": lacking}))
    with pytest.raises(ValueError, match=r"of several functions as per-row fields reward/NAME; this batch has \[\]"):
        gdpo(batch.without("reward/style", "reward/truth"))


def to_go(rewards):
    return [np.cumsum(row[::-1])[::-1] for row in rewards]


@given(groups=GROUPS, seed=SEEDS)
@MODEST
def test_remax(groups, seed):
    batch, masks, rewards = drawn(groups, seed)
    returns = [row * mask for row, mask in zip(to_go(rewards), masks, strict=True)]
    baselines = spread(masks, batch["reward_baselines"].tolist())
    estimated = remax(batch)
    assert_rows(estimated, "returns", returns)
    assert_rows(estimated, "advantages", [r - b for r, b in zip(returns, baselines, strict=True)])


def by_hand_token_baseline(batch, masks, rewards, groups, compressed, tail, weighted):
    """For each token, the weighted mean of the returns of the group's rows that have a token at the same step."""
    returns = to_go(rewards)
    energy, steps = [], []
    for row, mask in enumerate(masks):
        p, square = (batch.rows(name)[row].numpy() for name in ("old_log_probs", "sum_pi_squared"))
        w = (1 - 2 * np.exp(p) + square) * np.array(mask)
        energy.append(np.cumsum(w * batch.rows("rollout_is_weights")[row].numpy() ** 2 if weighted else w))
        steps.append(np.cumsum(mask) - 1 if compressed else np.arange(len(mask)) - mask.index(1))
    ends = [
        max(int(s) for s, m in zip(step, mask, strict=True) if m) + 1 for step, mask in zip(steps, masks, strict=True)
    ]
    result = []
    for row, mask in enumerate(masks):
        rows = members(groups, row)
        others = max((ends[i] for i in rows if i != row), default=0)
        advantages = np.zeros(len(mask))
        for t in np.flatnonzero(mask):
            beside = [(i, int(u)) for i in rows for u in np.flatnonzero(masks[i]) if steps[i][u] == steps[row][t]]
            weight = sum(energy[i][u] for i, u in beside)
            baseline = sum(energy[i][u] * returns[i][u] for i, u in beside) / weight
            if tail and steps[row][t] >= others:
                baseline = 0.0
            advantages[t] = (returns[row][t] - baseline) * (len(rows) > 1)
        result.append(advantages)
    return result


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("estimator", "compressed"), [(optimal_token_baseline, False), (tir_optimal_token_baseline, True)]
)
@given(groups=GROUPS, seed=SEEDS)
@example(groups=[0, 0, 2, 0, 2, -3], seed=3)
@MODEST
def test_optimal_token_baselines(estimator, compressed, weighted, tail, groups, seed):
    batch, masks, rewards = drawn(groups, seed)
    expected = by_hand_token_baseline(batch, masks, rewards, groups, compressed, tail, weighted)
    estimated = estimator(batch, handle_zero_tail=tail, rollout_is_weights=weighted)
    assert_rows(estimated, "advantages", expected, rtol=1e-5, atol=1e-6)


def test_the_baseline_of_tokens_without_uncertainty_is_the_mean_of_the_group():
    """Where every token had probability 1, W is 0 and says nothing."""
    batch, _ = pack([[1], [1]], 0, group=[0, 0])
    certain = {"old_log_probs": [0.0, 0.0], "sum_pi_squared": [1.0, 1.0]}
    estimated = optimal_token_baseline(batch.with_tokens(token_level_rewards=[1.0, 0.0], **certain))
    assert estimated["advantages"].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("estimator", [opo, gpg, grpo_passk, reinforce_plus_plus_baseline, gdpo])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 12345.678])
def test_equal_rewards_give_exactly_zero(estimator, reward):
    batch, _ = pack([[1], [1, 1], [1, 1, 1]], 0, group=[0, 0, 0])
    rewards = [reward, 0.0, reward, 0.0, 0.0, reward]
    batch = batch.with_tokens(token_level_rewards=torch.tensor(rewards, dtype=torch.float64))
    batch = batch.with_rows(**{"reward/a": torch.tensor([reward] * 3).double()})
    assert estimator(batch)["advantages"].tolist() == [0.0] * 6
