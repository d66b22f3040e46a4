"""GAE and REINFORCE++ are sums over the later response tokens of a row, whatever lies between them."""

import numpy as np
import pytest
import torch
from step_builders import MULTI_TURN, assert_rows, chosen, flat, pack, ragged, rows_of, scatter

from verl_fn.state import tree
from verl_fn.steps import gae, reinforce_plus_plus, whiten_masked

FIELDS = ("token_level_rewards", "values")
DISCOUNTS = [(1.0, 1.0), (0.9, 0.8), (0.97, 0.0), (0.5, 1.0)]


def gae_by_sums(rewards, values, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, the definition without a recursion."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (later - t) * delta[later] for later in range(t, n)) for t in range(n)]


def discounted(rewards, gamma):
    n = len(rewards)
    return [sum(gamma ** (later - t) * rewards[later] for later in range(t, n)) for t in range(n)]


def whitened(masks, rows):
    """Mean 0 and unbiased variance 1 over all unmasked tokens; nothing to do for fewer than two."""
    values = flat(masks, rows)
    if len(values) < 2:
        return [np.zeros(len(mask)) for mask in masks]
    mean, variance = values.mean(), values.var(ddof=1)
    return scatter(masks, [(row - mean) / np.sqrt(variance + 1e-8) for row in chosen(masks, rows)])


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@ragged
def test_gae_jumps_over_holes(gamma, lam, masks, seed):
    """Tool output between two turns neither discounts nor contributes: the row reads as if it were not there."""
    batch, fields = pack(masks, seed, *FIELDS)
    pairs = zip(*(chosen(masks, fields[name]) for name in FIELDS), strict=True)
    advantages = scatter(masks, [gae_by_sums(r, v, gamma, lam) for r, v in pairs])
    result = gae(batch, gamma=gamma, lam=lam, whiten=False)
    assert_rows(result, "advantages", advantages)
    expected = [(a + v) * mask for a, v, mask in zip(advantages, fields["values"], masks, strict=True)]
    assert_rows(result, "returns", expected)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS[:2])
@ragged
def test_gae_whitens_over_the_whole_batch_and_returns_stay_raw(gamma, lam, masks, seed):
    batch, _ = pack(masks, seed, *FIELDS)
    raw = gae(batch, gamma=gamma, lam=lam, whiten=False)
    result = gae(batch, gamma=gamma, lam=lam)
    assert_rows(result, "advantages", whitened(masks, rows_of(raw, "advantages")))
    assert torch.equal(result["returns"], raw["returns"])


@ragged
def test_with_lambda_one_the_returns_are_the_discounted_rewards(masks, seed):
    batch, fields = pack(masks, seed, *FIELDS)
    rewards = chosen(masks, fields["token_level_rewards"])
    result = gae(batch, gamma=0.9, lam=1.0, whiten=False)
    assert_rows(result, "returns", scatter(masks, [discounted(r, 0.9) for r in rewards]))


@ragged
def test_what_stands_on_masked_tokens_is_not_read(masks, seed):
    batch, fields = pack(masks, seed, *FIELDS)
    junk = {
        name: np.concatenate([np.where(m, row, 99.0) for m, row in zip(masks, fields[name], strict=True)])
        for name in FIELDS
    }
    for estimate in (gae, reinforce_plus_plus):
        result, expected = estimate(batch.with_tokens(**junk)), estimate(batch)
        assert torch.equal(result["advantages"], expected["advantages"])
        assert torch.equal(result["returns"], expected["returns"])


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@ragged
def test_reinforce_plus_plus_whitens_discounted_returns(gamma, masks, seed):
    batch, fields = pack(masks, seed, "token_level_rewards")
    returns = [discounted(r, gamma) for r in chosen(masks, fields["token_level_rewards"])]
    result = reinforce_plus_plus(batch, gamma=gamma)
    assert_rows(result, "returns", scatter(masks, returns))
    assert_rows(result, "advantages", whitened(masks, scatter(masks, returns)))


@ragged
def test_rows_do_not_touch_each_other(masks, seed):
    """Without whitening, an estimate for some rows is that of the whole batch."""
    batch, _ = pack(masks, seed, *FIELDS)
    order = list(reversed(range(len(masks))))[: len(masks) // 2 + 1]
    whole = gae(batch, gamma=0.9, lam=0.7, whiten=False).take(order)
    part = gae(batch.take(order), gamma=0.9, lam=0.7, whiten=False)
    assert_rows(part, "advantages", rows_of(whole, "advantages"))


@pytest.mark.parametrize("estimate", [gae, reinforce_plus_plus])
def test_the_batch_passed_in_is_unchanged(estimate):
    batch, _ = pack(MULTI_TURN, 1, *FIELDS)
    before = tree.digest(batch)
    estimate(batch)
    assert tree.digest(batch) == before


@pytest.mark.parametrize("estimate", [gae, reinforce_plus_plus])
def test_a_batch_with_nothing_to_learn_from_gets_zeros(estimate):
    batch, _ = pack([[0, 0], [0]], 1, *FIELDS)
    result = estimate(batch)
    assert result["advantages"].tolist() == result["returns"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimate", [gae, reinforce_plus_plus])
def test_float32_agrees_with_float64(estimate):
    single, _ = pack(MULTI_TURN, 2, *FIELDS, dtype=np.float32)
    double = single.with_tokens(**{name: single[name].double() for name in FIELDS})
    assert estimate(single)["advantages"].dtype == torch.float32
    assert_rows(estimate(single), "advantages", rows_of(estimate(double), "advantages"), rtol=1e-4, atol=1e-5)


@ragged
def test_whitening_shifts_and_scales(masks, seed):
    batch, fields = pack(masks, seed, "values")
    result = batch.with_tokens(white=whiten_masked(batch["values"], batch["response_mask"]))
    assert_rows(result, "white", whitened(masks, fields["values"]))
    white = flat(masks, rows_of(result, "white"))
    if len(white) > 2:
        assert white.mean() == pytest.approx(0.0, abs=1e-9) and white.std(ddof=1) == pytest.approx(1.0, rel=1e-4)


def test_whitening_a_constant_gives_zeros():
    assert whiten_masked(torch.full((3,), 2.5), torch.tensor([1, 1, 0])).tolist() == [0.0, 0.0, 0.0]
