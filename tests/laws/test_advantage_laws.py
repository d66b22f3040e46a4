"""Every built-in estimator, on batches of all sorts."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import KEYS, examples

from verl_fn.steps import gae, grpo, reinforce_plus_plus, rloo
from verl_fn.testing import check_advantage, tiny_batch

ESTIMATORS = {
    "gae": gae,
    "gae with discounts": partial(gae, gamma=0.9, lam=0.8),
    "gae without whitening": partial(gae, whiten=False),
    "grpo": grpo,
    "grpo without std": partial(grpo, norm_adv_by_std=False),
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus with a discount": partial(reinforce_plus_plus, gamma=0.9),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(key=KEYS, rows=st.integers(1, 12))
@examples(15)
def test_built_in_estimator(name, key, rows):
    check_advantage(ESTIMATORS[name], tiny_batch(key, rows=rows), key=key)
