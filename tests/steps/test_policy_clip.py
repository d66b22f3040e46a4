"""The clipped surrogate with dual clip, its gradient and its fractions."""

import math

import numpy as np
import pytest
import torch
from step_builders import MULTI_TURN, assert_rows, flat, pack, ragged

from verl_fn.state import TokenOutputs, tree
from verl_fn.steps import ppo_clip

FIELDS = ("logprobs", "old_log_probs", "advantages", "loss_weight")
BOUNDS = {
    "default": ({}, (0.2, 0.2, 3.0)),
    "symmetric": ({"clip_ratio": 0.4}, (0.4, 0.4, 3.0)),
    "higher": ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, (0.2, 0.28, 3.0)),
    "low only": ({"clip_ratio": 0.5, "clip_ratio_low": 0.1}, (0.1, 0.5, 3.0)),
    "tight cap": ({"clip_ratio_c": 1.1}, (0.2, 0.2, 1.1)),
}


def loss_of(log_ratio, advantage, low, high, cap):
    """Minus the smaller of r A and clip(r) A, which for A < 0 is clipped above cap A."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return -(max(objective, cap * advantage) if advantage < 0 else objective)


def slope_of(log_ratio, advantage, low, high, cap):
    """-A r where the ratio is not clipped, 0 where it is."""
    ratio = math.exp(log_ratio)
    if abs(log_ratio) > 20.0:
        return 0.0
    clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low or ratio > cap
    return 0.0 if clipped else -advantage * ratio


def run(batch, logprobs, **options):
    x = torch.tensor(np.concatenate(logprobs), requires_grad=True)
    per_token, metrics = ppo_clip(**options)(TokenOutputs({"logprobs": x}), batch)
    per_token.sum().backward()
    result = batch.with_tokens(loss=per_token.detach(), slope=x.grad)
    return result, {name: metric.value for name, metric in metrics.items()}


@pytest.mark.parametrize("bounds", BOUNDS)
@ragged
def test_values_gradients_and_metrics(bounds, masks, seed):
    options, (low, high, cap) = BOUNDS[bounds]
    batch, fields = pack(masks, seed, *FIELDS)
    result, metrics = run(batch, fields["logprobs"], **options)
    gaps = [a - b for a, b in zip(fields["logprobs"], fields["old_log_probs"], strict=True)]
    tokens = [list(zip(g, a, strict=True)) for g, a in zip(gaps, fields["advantages"], strict=True)]
    losses = [np.array([loss_of(*token, low, high, cap) for token in row]) for row in tokens]
    assert_rows(result, "loss", losses)
    assert_rows(result, "slope", [[slope_of(*token, low, high, cap) for token in row] for row in tokens])

    ratio, advantage = np.exp(flat(masks, gaps)), flat(masks, fields["advantages"])
    clipped = np.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
    capped = (advantage < 0) & (ratio > cap)
    expected = {
        "actor/pg_loss": sum((w * x).sum() for w, x in zip(fields["loss_weight"], losses, strict=True)),
        "actor/pg_clipfrac": clipped.mean() if len(ratio) else math.nan,
        "actor/pg_clipfrac_lower": capped.mean() if len(ratio) else math.nan,
        "actor/ppo_kl": -flat(masks, gaps).mean() if len(ratio) else math.nan,
    }
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-11, nan_ok=True)


CASES = [
    pytest.param(0.5, 1.0, -1.2, 0.0, id="good, already likelier: clipped"),
    pytest.param(-0.5, 1.0, -math.exp(-0.5), -math.exp(-0.5), id="good, less likely: free"),
    pytest.param(-0.5, -1.0, 0.8, 0.0, id="bad, already less likely: clipped"),
    pytest.param(0.5, -1.0, math.exp(0.5), math.exp(0.5), id="bad, likelier: free"),
    pytest.param(1.5, -1.0, 3.0, 0.0, id="bad, far likelier: capped"),
    pytest.param(1.5, -2.0, 6.0, 0.0, id="the cap scales with the advantage"),
    pytest.param(30.0, 1.0, -1.2, 0.0, id="a huge ratio stays finite"),
    pytest.param(-30.0, 1.0, -math.exp(-20.0), 0.0, id="the log-ratio is clamped at -20"),
    pytest.param(0.0, 0.5, -0.5, -0.5, id="on policy: the policy gradient"),
]


@pytest.mark.parametrize(("log_ratio", "advantage", "loss", "slope"), CASES)
def test_each_regime(log_ratio, advantage, loss, slope):
    batch = pack([[1]], 0, "loss_weight")[0].with_tokens(old_log_probs=[-2.0], advantages=[advantage])
    result, _ = run(batch, [np.array([log_ratio - 2.0])])
    assert result["loss"].item() == pytest.approx(loss, rel=1e-6)
    assert result["slope"].item() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_gradients_by_finite_differences(bounds):
    options, limits = BOUNDS[bounds]
    batch, fields = pack(MULTI_TURN, 8, *FIELDS)
    result, _ = run(batch, fields["logprobs"], **options)
    gaps = np.concatenate(fields["logprobs"]) - np.concatenate(fields["old_log_probs"])
    h = 1e-6
    numeric = [
        (loss_of(g + h, a, *limits) - loss_of(g - h, a, *limits)) / (2 * h)
        for g, a in zip(gaps, np.concatenate(fields["advantages"]), strict=True)
    ]
    np.testing.assert_allclose(result["slope"].numpy(), numeric, rtol=1e-6, atol=1e-8)


def test_zero_advantages_give_a_zero_gradient():
    batch, fields = pack(MULTI_TURN, 4, *FIELDS)
    result, metrics = run(batch.with_tokens(advantages=torch.zeros(batch.num_tokens)), fields["logprobs"])
    assert not result["slope"].any() and not result["loss"].any()
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0


def test_metrics_hold_no_graph():
    batch, fields = pack([[1, 1]], 0, *FIELDS)
    outputs = TokenOutputs({"logprobs": torch.tensor(fields["logprobs"][0], requires_grad=True)})
    per_token, metrics = ppo_clip()(outputs, batch)
    assert per_token.requires_grad
    assert not any(leaf.requires_grad for leaf in tree.leaves(metrics))


@pytest.mark.parametrize("cap", [1.0, 0.5, -3.0])
def test_a_cap_within_the_clip_is_refused(cap):
    with pytest.raises(ValueError, match=f"clip_ratio_c is {cap}; the dual clip needs a value above 1"):
        ppo_clip(clip_ratio_c=cap)
