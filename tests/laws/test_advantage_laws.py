"""Every built-in estimator, on batches of all sorts."""

import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import KEYS, examples

from verl_fn.state import Key
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
from verl_fn.steps.advantages.columns import AdvantageError
from verl_fn.steps.aggregate import last_of_rows
from verl_fn.testing import LawViolation, check_advantage, tiny_batch
from verl_fn.testing.builders import in_float64

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


@pytest.mark.parametrize("name", [*ESTIMATORS, *TAILED])
def test_no_rows_have_no_advantages(name):
    none = tiny_batch(Key.from_seed(0), rows=2).take(torch.tensor([], dtype=torch.long))
    assert len((ESTIMATORS | TAILED)[name](none)["advantages"]) == 0


@pytest.mark.parametrize("name", TAILED)
def test_a_tail_without_a_baseline_breaks_the_law_of_equal_rewards(name):
    with pytest.raises(LawViolation, match="if all rewards of a group are"):
        check_advantage(TAILED[name])


# With a discount, tokens far from a reward have less of it than others, so equal rewards are no equal returns.
DISCOUNTED = ("gae with discounts", "reinforce_plus_plus with a discount")
CONSTANTS = (0.1, 1000.1, 10000.1, 1e6 + 0.1, 1e29, -1000.1, -1e29, 1 / 3, 1e-8)


def rewarded(batch, reward, value):
    """Gives every row this reward, in total, and this value to every baseline that does not come from the batch."""
    dtype = batch["values"].dtype
    on_last = reward * last_of_rows(batch, batch["response_mask"]).to(dtype)
    names = ("reward_baselines", "reward/style", "reward/truth")
    rows = {name: torch.full((len(batch),), reward, dtype=dtype) for name in names}
    values = torch.full((batch.num_tokens,), value, dtype=dtype)
    return batch.with_tokens(token_level_rewards=on_last, values=values).with_rows(**rows)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in DISCOUNTED])
@given(key=KEYS, rows=st.integers(1, 12))
@examples(4)
def test_what_has_the_same_reward_everywhere_gives_exactly_no_advantage(name, key, rows):
    drawn = tiny_batch(key, rows=rows)
    for reward in CONSTANTS:
        value = reward if name == "gae without whitening" else 0.0
        for batch in (drawn, in_float64(drawn)):
            assert not ESTIMATORS[name](rewarded(batch, reward, value))["advantages"].any(), reward


GROUPED = [n for n in ESTIMATORS if not n.startswith(("gae", "remax", "reinforce_plus_plus"))]


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_plus_plus_baseline", *TAILED])
def test_a_row_that_is_compared_with_no_other_gets_no_advantage(name):
    """A group of one, and one of two whose other row has no response token; the rest stays as without them."""
    batch = tiny_batch(rows=6).with_rows(group=[3, 3, 3, 9, 8, 8])
    batch = batch.take([0, 2, 3, 4, 5, 1]).with_rows(group=[3, 3, 9, 8, 8, 9])  # row 1 has no response
    estimated = (ESTIMATORS | TAILED)[name](batch)
    assert not estimated.take([2, 5])["advantages"].any()
    others = [0, 1, 3, 4]
    alone = (ESTIMATORS | TAILED)[name](batch.take(others))["advantages"]
    # gpg scales up for all rows without signal, and this is one.
    factor = 5 / 4 if name == "gpg" else 1.0
    torch.testing.assert_close(estimated.take(others)["advantages"], factor * alone)
    assert alone.any()


READ = {"gae": ("values",), "gdpo": ("reward/truth", "reward/style"), "remax": ("reward_baselines",)}
READ |= dict.fromkeys(TAILED, ("old_log_probs", "sum_pi_squared"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*ESTIMATORS, *TAILED])
def test_a_number_that_is_not_finite_ends_the_estimate(name, value):
    """It would make a group or, through whitening, the whole batch nan. Where nothing counts, it is not read."""
    batch, function = tiny_batch(Key.from_seed(3), rows=6), name.partition(" ")[0]
    for field in ("token_level_rewards", *READ.get(function, ())):
        for row in (1, 4):
            values = batch[field].clone()
            values[row if field in batch.per_row else int(batch.cu_seqlens[row + 1]) - 1] = value
            add = batch.with_rows if field in batch.per_row else batch.with_tokens
            if row == 1:  # without a response
                assert (ESTIMATORS | TAILED)[name](add(**{field: values}))["advantages"].isfinite().all()
                continue
            function = name.partition(" ")[0]
            with pytest.raises(
                AdvantageError, match=re.escape(f"{function}: {field} is nan or infinite in row 4 of 6")
            ):
                (ESTIMATORS | TAILED)[name](add(**{field: values}))


def test_rewards_whose_sum_no_float32_holds_end_the_estimate():
    batch = tiny_batch(rows=4)
    batch = batch.with_tokens(token_level_rewards=torch.where(batch["response_mask"] != 0, 3e38, 0.0))
    for name in ("reinforce_plus_plus", "gae", "remax"):
        with pytest.raises(AdvantageError, match=rf"{name}: \w+ overflow torch.float32 in rows 0, 2 of 4; scale"):
            ESTIMATORS[name](batch)
    assert grpo(batch)["advantages"].isfinite().all()
