"""The KL penalty comes off the token rewards at the coefficient before the controller moves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_builders import MODEST, MULTI_TURN, assert_rows, chosen, pack, ragged

from verl_fn.state import tree
from verl_fn.steps import AdaptiveKL, FixedKL, apply_kl_in_reward

FIELDS = ("token_level_scores", "old_log_probs", "ref_log_prob")


@ragged
def test_rewards_are_scores_less_the_penalty_on_response_tokens(masks, seed):
    batch, fields = pack(masks, seed, *FIELDS)
    penalized, _, metrics = apply_kl_in_reward(batch, FixedKL(0.3))
    scores, old, ref = (fields[name] for name in FIELDS)
    expected = [s - 0.3 * np.array(m) * (a - b) for s, a, b, m in zip(scores, old, ref, masks, strict=True)]
    assert_rows(penalized, "token_level_rewards", expected)
    assert_rows(penalized, "token_level_scores", scores)
    assert metrics["actor/reward_kl_penalty_coeff"].value == 0.3


@ragged
def test_the_controller_sees_the_mean_over_rows_of_their_token_means(masks, seed):
    """Long rows count no more than short ones."""
    masks = [[*mask, 1] for mask in masks]
    batch, fields = pack(masks, seed, *FIELDS)
    gaps = [a - b for a, b in zip(fields["old_log_probs"], fields["ref_log_prob"], strict=True)]
    current = np.mean([row.mean() for row in chosen(masks, gaps)])
    start = AdaptiveKL(0.2, target=0.5, horizon=50)
    _, controller, metrics = apply_kl_in_reward(batch, start)
    assert metrics["actor/reward_kl_penalty"].value == pytest.approx(current, abs=1e-7)
    assert controller.value == pytest.approx(start.update(current, len(masks)).value)


def test_rows_without_a_response_token_do_not_move_the_controller():
    start = AdaptiveKL(0.2, target=0.5, horizon=50)
    batch = pack([[1, 1], [0, 0], [1]], 0, *FIELDS)[0]
    moved = [apply_kl_in_reward(rows, start)[1] for rows in (batch, batch.take([0, 2]))]
    assert moved[0].value == pytest.approx(moved[1].value, rel=1e-6) != start.value


def test_rewards_use_the_coefficient_from_before_the_move():
    batch, fields = pack([[1, 1], [1]], 0, *FIELDS)
    start = AdaptiveKL(0.5, target=0.01, horizon=2)
    penalized, moved, metrics = apply_kl_in_reward(batch, start, "k2")
    scores, old, ref = (fields[name] for name in FIELDS)
    assert_rows(
        penalized, "token_level_rewards", [s - 0.25 * (a - b) ** 2 for s, a, b in zip(scores, old, ref, strict=True)]
    )
    assert metrics["actor/reward_kl_penalty_coeff"].value == 0.5 != moved.value


@pytest.mark.parametrize(("kind", "penalty"), [("k1", -2.0), ("k2", 2.0), ("abs", 2.0), ("k3", np.exp(2.0) - 3.0)])
def test_the_estimator_can_be_chosen(kind, penalty):
    batch = pack([[1]], 0)[0].with_tokens(token_level_scores=[1.0], old_log_probs=[-3.0], ref_log_prob=[-1.0])
    penalized, _, metrics = apply_kl_in_reward(batch, FixedKL(0.5), kind)
    assert penalized["token_level_rewards"].item() == pytest.approx(1.0 - 0.5 * penalty, rel=1e-6)
    assert metrics["actor/reward_kl_penalty"].value == pytest.approx(penalty, rel=1e-6)


def test_a_batch_with_no_response_token_keeps_its_scores():
    batch, fields = pack([[0, 0], [0]], 0, *FIELDS)
    penalized, controller, metrics = apply_kl_in_reward(batch, FixedKL(0.5))
    assert_rows(penalized, "token_level_rewards", fields["token_level_scores"])
    assert metrics["actor/reward_kl_penalty"].value == 0.0 and controller.value == 0.5


@given(st.floats(-10, 10), st.integers(1, 4096))
@MODEST
def test_the_fixed_coefficient_never_moves(current, steps):
    assert FixedKL(0.01).update(current, steps).value == 0.01


@given(st.lists(st.tuples(st.floats(-1, 3), st.integers(1, 512)), min_size=1, max_size=8))
@MODEST
def test_the_adaptive_coefficient_follows_ziegler(history):
    """beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), step after step."""
    controller, beta = AdaptiveKL(0.05, target=0.4, horizon=1000), 0.05
    for current, steps in history:
        error = (current - 0.4) / 0.4
        beta *= 1 + (0.2 if error > 0.2 else -0.2 if error < -0.2 else error) * steps / 1000
        controller = controller.update(current, steps)
        assert controller.value == pytest.approx(beta, rel=1e-12)
        assert (controller.target, controller.horizon) == (0.4, 1000)


@pytest.mark.parametrize(
    ("current", "factor"),
    [(1.0, 1.0), (1.1, 1.01), (0.9, 0.99), (5.0, 1.02), (-5.0, 0.98), (0.0, 0.98)],
)
def test_the_error_is_clipped_at_a_fifth_on_both_sides(current, factor):
    assert AdaptiveKL(2.0, target=1.0, horizon=100).update(current, 10).value == pytest.approx(2.0 * factor)


def test_nothing_passed_in_is_changed():
    batch, _ = pack(MULTI_TURN, 0, *FIELDS)
    start = AdaptiveKL(0.2, target=0.01, horizon=10)
    before = tree.digest((batch, start))
    _, moved, _ = apply_kl_in_reward(batch, start)
    assert tree.digest((batch, start)) == before and moved.value != 0.2


def test_controllers_are_values_that_a_checkpoint_can_hold():
    assert tree.paths(AdaptiveKL(0.1, 0.2, 30)) == {".value": 0.1, ".target": 0.2, ".horizon": 30}
    assert tree.paths(FixedKL(0.1)) == {".value": 0.1}


def test_an_adaptive_coefficient_outlives_a_kl_of_nan_and_needs_a_target():
    start = AdaptiveKL(0.2, target=0.5, horizon=50)
    assert start.update(math.nan, 10) is start
    for name in ("target", "horizon"):
        for value in (0, -1.0, math.nan):
            with pytest.raises(ValueError, match=f"{name} of an adaptive KL coefficient is {value}; it must"):
                AdaptiveKL(0.2, **{name: value})
