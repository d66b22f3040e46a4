"""The policy losses besides PPO's: values and slopes of each, in float64, against plain formulas."""

import math

import numpy as np
import pytest
import torch
from step_builders import MULTI_TURN, assert_rows, pack, ragged, scatter

from verl_fn.state import Batch, TokenOutputs
from verl_fn.steps import (
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    gspo,
    kl_cov,
    ppo_clip,
    reinforce,
    sapo,
    total_loss,
)

FIELDS = ("logprobs", "old_log_probs", "advantages", "loss_weight", "cov_selected")
LOW, HIGH = 0.1, 0.28


def clipped(ratio):
    return min(max(ratio, 1 - LOW), 1 + HIGH)


def of_reinforce(x, old, a, chosen):
    return -a * x, -a


def of_sapo(x, old, a, chosen):
    ratio, tau = math.exp(x - old), 1.5 if a > 0 else 2.5
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio


def of_cispo(x, old, a, chosen):
    weight = clipped(math.exp(x - old))
    return -weight * a * x, -weight * a


def of_dro(x, old, a, chosen):
    return 0.35 * (x - old) ** 2 - a * x, 0.7 * (x - old) - a


def of_dppo(valid, x, old, a):
    weight = min(math.exp(x - old), 1.2) if valid else 0.0
    return -weight * a * x, -weight * a


def of_dppo_tv(x, old, a, chosen):
    moved = math.exp(x) - math.exp(old)
    return of_dppo(moved <= HIGH if a > 0 else moved >= -LOW, x, old, a)


def of_dppo_kl(x, old, a, chosen):
    p, q = math.exp(x), math.exp(old)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return of_dppo(p <= q or kl <= 0.05 if a > 0 else p >= q or kl <= 0.02, x, old, a)


def of_surrogate(x, old, a, chosen):
    ratio = math.exp(x - old)
    free = ratio <= 1 + HIGH if a > 0 else ratio >= 1 - LOW
    return (0.0, 0.0) if chosen else (-a * (ratio if free else clipped(ratio)), -a * ratio if free else 0.0)


def of_kl_cov(x, old, a, chosen):
    ratio, d = math.exp(x - old), x - old
    return 0.3 * abs(d) * chosen - a * ratio, 0.3 * math.copysign(1, d) * chosen - a * ratio


BOUNDS = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}
TOKEN_LOSSES = {
    "reinforce": (reinforce(), of_reinforce),
    "sapo": (sapo(1.5, 2.5), of_sapo),
    "cispo": (cispo(**BOUNDS), of_cispo),
    "dro": (dro(0.7), of_dro),
    "dppo_tv": (dppo_tv(**BOUNDS, clip_ratio_c=1.2), of_dppo_tv),
    "dppo_kl": (dppo_kl(clip_ratio_low=0.02, clip_ratio_high=0.05, clip_ratio_c=1.2), of_dppo_kl),
    "clip_cov": (clip_cov(**BOUNDS), of_surrogate),
    "kl_cov": (kl_cov(0.3), of_kl_cov),
}


def drawn(masks, seed):
    """Log-probabilities around -1, within half a nat of each other, and a random selection."""
    batch, fields = pack(masks, seed, *FIELDS)
    old = [-1.2 + 0.3 * row for row in fields["old_log_probs"]]
    x = [np.minimum(row + 0.3 * move, -0.01) for row, move in zip(old, fields["logprobs"], strict=True)]
    old = [np.minimum(row, -0.01) for row in old]
    chosen = [(row > 0.3).astype(float) for row in fields["cov_selected"]]
    batch = batch.with_tokens(old_log_probs=np.concatenate(old), cov_selected=np.concatenate(chosen))
    return batch, x, old, fields["advantages"], chosen


def run(loss, batch, x):
    leaf = torch.tensor(np.concatenate(x), requires_grad=True)
    values, metrics = loss(TokenOutputs({"logprobs": leaf}), batch)
    values.sum().backward()
    return values.detach(), batch.with_tokens(slope=leaf.grad), metrics


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@ragged
def test_values_and_slopes_of_tokens(name, masks, seed):
    loss, formula = TOKEN_LOSSES[name]
    batch, *fields = drawn(masks, seed)
    values, result, metrics = run(loss, batch, fields[0])
    pairs = [[formula(*token) for token in zip(*row, strict=True)] for row in zip(*fields, strict=True)]
    assert_rows(batch.with_tokens(values=values), "values", [[v for v, _ in row] for row in pairs], rtol=1e-6)
    assert_rows(result, "slope", [[slope for _, slope in row] for row in pairs], rtol=1e-6)
    expected = (batch["loss_weight"] * values).sum().item()
    assert metrics["actor/pg_loss"].value == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("make", [dppo_tv, dppo_kl])
def test_the_lower_clip_of_dppo_counts_valid_tokens(make):
    """The first of three tokens has moved too far, and the second one has only a ratio above the cap."""
    fields = {"old_log_probs": [[-2.0, -9.0, -9.0]], "advantages": [[1.0] * 3], "response_mask": [[1.0] * 3]}
    batch = Batch.from_rows([[1] * 3], fields | {"loss_weight": [[1.0] * 3]})
    outputs = TokenOutputs({"logprobs": torch.tensor([-0.1, -8.0, -9.0])})
    _, metrics = make(clip_ratio_c=2.0)(outputs, batch)
    shares = [metrics[f"actor/pg_clipfrac{which}"].value for which in ("", "_lower")]
    assert shares == pytest.approx([1 / 3, 1 / 3])


def responses(masks, *fields):
    """Each row's tokens with mask 1, by field."""
    rows = zip(masks, *fields, strict=True)
    return [[np.asarray(field)[np.array(mask, dtype=bool)] for field in row] for mask, *row in rows]


@ragged
def test_gspo(masks, seed):
    batch, x, old, advantages, _ = drawn(masks, seed)
    values, result, metrics = run(gspo(**BOUNDS), batch, x)
    expected, slopes, clips = [], [], []
    for xs, olds, a in responses(masks, x, old, advantages):
        s = math.exp(np.mean(xs - olds)) if len(xs) else 1.0
        free = [s <= 1 + HIGH if one > 0 else s >= 1 - LOW for one in a]
        expected.append([-one * (s if ok else clipped(s)) for one, ok in zip(a, free, strict=True)])
        slopes.append([-one * s * ok for one, ok in zip(a, free, strict=True)])
        clips += [not ok for ok in free]
    mask = batch["response_mask"].bool()
    kept = batch.with_tokens(values=torch.where(mask, values, 0.0), slopes=torch.where(mask, result["slope"], 0.0))
    assert_rows(kept, "values", scatter(masks, expected))
    assert_rows(kept, "slopes", scatter(masks, slopes))
    assert metrics["actor/pg_clipfrac"].value == pytest.approx(np.mean(clips) if clips else math.nan, nan_ok=True)


@ragged
def test_geo_mean(masks, seed):
    batch, x, old, advantages, _ = drawn(masks, seed)
    batch = batch.with_rows(row_weight=np.ones(len(masks)))
    values, result, _ = run(geo_mean(**BOUNDS), batch, x)
    expected, slopes = [], []
    for xs, olds, a in responses(masks, x, old, advantages):
        gaps, n = xs - olds, max(len(xs), 1)
        used = [min(g, HIGH) if one > 0 else max(g, -LOW) for g, one in zip(gaps, a, strict=True)]
        value = -sum(a) / n * math.exp(sum(used) / n)
        expected.append(value)
        slopes.append([value / n * (g == u) for g, u in zip(gaps, used, strict=True)])
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-9, atol=1e-11)
    assert_rows(result, "slope", scatter(masks, slopes))


def test_gspo_of_one_advantage_a_row_is_the_gradient_of_the_ratio():
    """With the weights of seq-mean-token-mean, a row sums to -A s, and the slope of each token is -A s / n."""
    batch, x, old, _, _ = drawn([[1, 1, 1]], 3)
    batch = batch.with_tokens(advantages=[0.7] * 3, loss_weight=[1 / 3] * 3)
    leaf = torch.tensor(x[0], requires_grad=True)
    total, _ = total_loss(gspo(5.0), TokenOutputs({"logprobs": leaf}), batch)
    s = math.exp(np.mean(x[0] - old[0]))
    assert total.item() == pytest.approx(-0.7 * s)
    (slope,) = torch.autograd.grad(total, leaf)
    assert slope.tolist() == pytest.approx([-0.7 * s / 3] * 3)


ON_POLICY = {"ppo_clip": ppo_clip(), "gspo": gspo(), "sapo": sapo(), "cispo": cispo(), "dro": dro(0.7)} | {
    "reinforce": reinforce(), "dppo_tv": dppo_tv(), "dppo_kl": dppo_kl(), "kl_cov": kl_cov()
}  # fmt: skip


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_all_have_the_policy_gradient(name):
    """Where the log-probabilities are the old ones, the slope is minus the advantage."""
    batch, _, old, advantages, _ = drawn(MULTI_TURN, 5)
    _, result, _ = run(ON_POLICY[name], batch, old)
    assert_rows(result, "slope", [-a for a in advantages])


@pytest.mark.parametrize("loss", [clip_cov(), kl_cov()])
def test_a_selection_that_is_missing_is_named(loss):
    batch = drawn([[1, 1]], 0)[0].without("cov_selected")
    with pytest.raises(KeyError, match=r"call steps.select_\w+_cov on the whole update batch first"):
        loss(TokenOutputs({"logprobs": torch.zeros(2)}), batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sapo(tau_neg=0.0), "tau_pos is 1.0 and tau_neg 0.0; both must be positive"),
        (lambda: dro(0.0), "dro_beta is 0.0; it must be positive"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
