"""GRPO and RLOO compare a row with the others of its group."""

import math
import statistics
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from step_builders import MODEST, MULTI_TURN, SEEDS, assert_rows, pack, rows_of

from verl_fn.state import Batch, tree
from verl_fn.steps import gae, grpo, grpo_passk, reinforce_plus_plus, rloo
from verl_fn.steps.advantages.columns import AdvantageError, whiten_masked

ESTIMATORS = {"grpo": grpo, "dr_grpo": lambda batch: grpo(batch, norm_adv_by_std=False), "rloo": rloo}
GROUPS = st.lists(st.sampled_from([-3, 0, 7, 2**40]), min_size=1, max_size=10)


def grouped(groups, seed):
    """Rows of random masks, interleaved groups, and rewards on response tokens only."""
    rng = np.random.default_rng(seed)
    masks = [rng.integers(0, 2, size=rng.integers(1, 6)).tolist() for _ in groups]
    batch, fields = pack(masks, seed, "token_level_rewards", group=groups)
    rewards = [row * mask for row, mask in zip(fields["token_level_rewards"], masks, strict=True)]
    return batch.with_tokens(token_level_rewards=np.concatenate(rewards)), masks, [float(r.sum()) for r in rewards]


def by_hand(kind, scores, groups, masks):
    """Rows without a response token have no vote; a row that is compared with no other gets nothing."""
    advantages = []
    for score, group, mask in zip(scores, groups, masks, strict=True):
        rows = zip(scores, groups, masks, strict=True)
        members = [s for s, g, m in rows if g == group and any(m)]
        if len(members) < 2 or not any(mask):
            advantages.append(0.0)
        elif kind == "rloo":
            advantages.append(score - (sum(members) - score) / (len(members) - 1))
        else:
            centred = score - statistics.fmean(members)
            advantages.append(centred / (statistics.stdev(members) + 1e-6) if kind == "grpo" else centred)
    return advantages


@pytest.mark.parametrize("kind", ESTIMATORS)
@given(groups=GROUPS, seed=SEEDS)
@example(groups=[7, 0, 7, -3, 7, 0], seed=0)
@MODEST
def test_every_response_token_gets_its_rows_advantage(kind, groups, seed):
    """Groups of any name, size (also one) and order; masked tokens get 0."""
    batch, masks, scores = grouped(groups, seed)
    estimated = ESTIMATORS[kind](batch)
    expected = [a * np.array(mask) for a, mask in zip(by_hand(kind, scores, groups, masks), masks, strict=True)]
    assert_rows(estimated, "advantages", expected, rtol=1e-7, atol=1e-9)
    assert_rows(estimated, "returns", expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ESTIMATORS)
@given(groups=GROUPS, seed=SEEDS, data=st.data())
@MODEST
def test_the_order_of_rows_does_not_matter(kind, groups, seed, data):
    batch, _, _ = grouped(groups, seed)
    order = data.draw(st.permutations(range(len(groups))))
    assert_rows(
        ESTIMATORS[kind](batch.take(order)), "advantages", rows_of(ESTIMATORS[kind](batch).take(order), "advantages")
    )


@pytest.mark.parametrize("kind", ["dr_grpo", "rloo"])
@given(groups=GROUPS, seed=SEEDS)
@MODEST
def test_a_group_sums_to_zero(kind, groups, seed):
    """The baseline is the group's own mean, up to a factor, so a group of several has no net push."""
    masks = [[1]] * len(groups)
    batch, _ = pack(masks, seed, "token_level_rewards", group=groups)
    advantages = ESTIMATORS[kind](batch)["advantages"].tolist()
    for name in set(groups):
        members = [a for a, g in zip(advantages, groups, strict=True) if g == name]
        assert len(members) == 1 or sum(members) == pytest.approx(0.0, abs=1e-9)


def test_rloo_is_grpo_without_std_times_n_over_n_minus_one():
    batch, _ = pack([[1]] * 4, 3, "token_level_rewards", group=[0] * 4)
    centred = ESTIMATORS["dr_grpo"](batch)["advantages"]
    torch.testing.assert_close(rloo(batch)["advantages"], centred * 4 / 3)


def test_grpo_divides_by_the_unbiased_deviation():
    """Rewards 1, 0, 0, 0 have deviation 1/2 with n - 1 and sqrt(3)/4 with n."""
    batch = pack([[1]] * 4, 0, group=[5] * 4)[0].with_tokens(token_level_rewards=[1.0, 0.0, 0.0, 0.0])
    assert grpo(batch)["advantages"].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_grpo_adds_epsilon_to_the_deviation():
    batch = pack([[1], [1]], 0, group=[0, 0])[0].with_tokens(token_level_rewards=[1.0, -1.0])
    assert grpo(batch, epsilon=2.0**0.5)["advantages"].tolist() == pytest.approx([0.5**1.5, -(0.5**1.5)])


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 1.0, -2.0])
def test_a_group_of_equal_rewards_learns_nothing(kind, reward):
    batch = pack([[1, 1]] * 4, 0, group=[3] * 4)[0].with_tokens(token_level_rewards=[0.0, reward] * 4)
    assert ESTIMATORS[kind](batch)["advantages"].tolist() == [0.0] * 8


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_row_without_a_response_token_has_no_vote(kind):
    """Rewards [1, 1, 0] with a fourth row of mask 0 give what they give by themselves."""
    masks = [[1], [1], [1], [0, 0]]
    batch = pack(masks, 0, group=[1] * 4)[0].with_tokens(token_level_rewards=[1.0, 1.0, 0.0, 0.0, 0.0])
    with_it, without = ESTIMATORS[kind](batch), ESTIMATORS[kind](batch.take([0, 1, 2]))
    assert with_it["advantages"].tolist() == [*without["advantages"].tolist(), 0.0, 0.0]
    assert by_hand(kind, [1.0, 1.0, 0.0, 0.0], [1] * 4, masks)[:3] == pytest.approx(without["advantages"].tolist())


def test_the_best_row_of_a_group_is_one_that_counts():
    masks = [[0, 0], [1], [1], [1]]
    batch = pack(masks, 0, group=[1] * 4)[0].with_tokens(token_level_rewards=[0.0, 0.0, -3.0, -1.0, -4.0])
    assert grpo_passk(batch, norm_adv_by_std=False)["advantages"].tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]


def test_values_that_cannot_be_whitened_are_named():
    values, mask = torch.tensor([1.0, math.nan, 2.0, math.inf, math.inf]), torch.tensor([1, 1, 1, 1, 0])
    with pytest.raises(AdvantageError, match="whiten_masked: the values of tokens 1, 3 are nan or infinite"):
        whiten_masked(values, mask)
    assert whiten_masked(values, torch.tensor([1, 0, 1, 0, 0])).isfinite().all()


@pytest.mark.parametrize("estimator", [grpo, rloo, gae, reinforce_plus_plus])
def test_a_reward_on_a_masked_token_is_ignored_with_a_warning(estimator):
    batch, _ = pack([[1, 0], [1, 1]], 0, "values", group=[0, 0])
    drawn, lost = ([0.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 1.0])
    with warnings.catch_warnings(action="error"):
        expected = estimator(batch.with_tokens(token_level_rewards=drawn))
    with pytest.warns(UserWarning, match="rewards on tokens with response_mask 0 are ignored; write a row's reward"):
        found = estimator(batch.with_tokens(token_level_rewards=lost))
    assert found["advantages"].tolist() == expected["advantages"].tolist()


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_batch_passed_in_is_unchanged(kind):
    batch, _ = pack(MULTI_TURN, 1, "token_level_rewards", group=[0, 0, 1, 1, 1])
    before = tree.digest(batch)
    ESTIMATORS[kind](batch)
    assert tree.digest(batch) == before


@pytest.mark.parametrize("estimator", [grpo, rloo])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-7, 12345.678])
@pytest.mark.parametrize("rows", [2, 3, 7, 31])
def test_equal_rewards_give_exactly_zero(estimator, reward, rows):
    fields = {"token_level_rewards": [[reward]] * rows, "response_mask": [[1.0]] * rows}
    batch = Batch.from_rows([[1]] * rows, fields, {"group": [5] * rows})
    assert estimator(batch)["advantages"].tolist() == [0.0] * rows
