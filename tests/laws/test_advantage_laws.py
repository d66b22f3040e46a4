"""Every built-in estimator, on batches of all sorts."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import KEYS, examples

from verl_fn.steps import (
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    tir_optimal_token_baseline,
)
from verl_fn.testing import LawViolation, check_advantage, tiny_batch

ESTIMATORS = {
    "gae": gae,
    "gae with discounts": partial(gae, gamma=0.9, lam=0.8),
    "gae without whitening": partial(gae, whiten=False),
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "grpo_passk without std": partial(grpo_passk, norm_adv_by_std=False),
    "rloo": rloo,
    "opo": opo,
    "gpg": partial(gpg, f_norm=2.0),
    "gdpo": gdpo,
    "gdpo with weights": partial(gdpo, reward_keys=["truth", "style"], reward_weights=[1.0, -0.5]),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "optimal_token_baseline without a tail": partial(optimal_token_baseline, handle_zero_tail=False),
    "optimal_token_baseline with importance weights": partial(
        optimal_token_baseline, handle_zero_tail=False, rollout_is_weights=True
    ),
    "tir_optimal_token_baseline without a tail": partial(tir_optimal_token_baseline, handle_zero_tail=False),
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus with a discount": partial(reinforce_plus_plus, gamma=0.9),
}


# Where only the longest row of a group goes on, the baseline of these is 0, and equal rewards are advantages.
TAILED = {
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}


@pytest.mark.parametrize("name", [*ESTIMATORS, *TAILED])
@given(key=KEYS, rows=st.integers(1, 12))
@examples(8)
def test_built_in_estimator(name, key, rows):
    estimator = (ESTIMATORS | TAILED)[name]
    check_advantage(estimator, tiny_batch(key, rows=rows), equal_rewards=name not in TAILED, key=key)


@pytest.mark.parametrize("name", TAILED)
def test_a_tail_without_a_baseline_breaks_the_law_of_equal_rewards(name):
    with pytest.raises(LawViolation, match="where all rewards of a group are"):
        check_advantage(TAILED[name])
