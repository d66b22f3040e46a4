"""KL estimators have Schulman's values, and a trailing + swaps in the gradient of k2."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_builders import MODEST

from verl_fn.steps import kl_penalty

KINDS = ("k1", "k2", "k3", "abs")
PAIRS = st.lists(st.tuples(st.floats(-12, 0), st.floats(-12, 0)), min_size=1, max_size=6)


def by_hand(kind, logprob, ref):
    d = logprob - ref
    if kind == "k3":
        log_ratio = max(min(-d, 20.0), -20.0)
        return max(min(math.exp(log_ratio) - 1.0 - log_ratio, 10.0), -10.0)
    return {"k1": d, "k2": d * d / 2, "abs": abs(d)}[kind]


def slope(kind, d):
    """The derivative with respect to the policy's log-probability, away from kinks."""
    if kind.endswith("+") or kind == "k2":
        return d
    if kind == "k3":
        saturated = abs(d) > 20.0 or math.exp(-d) - 1.0 + d > 10.0
        return 0.0 if saturated else 1.0 - math.exp(-d)
    return {"k1": 1.0, "abs": math.copysign(1.0, d)}[kind]


def run(kind, logprobs, refs):
    x = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    value = kl_penalty(x, torch.tensor(refs, dtype=torch.float64), kind)
    value.sum().backward()
    return value.tolist(), x.grad.tolist()


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("kind", KINDS)
@given(pairs=PAIRS)
@MODEST
def test_values(kind, plus, pairs):
    """A straight-through estimate has the plain one's value."""
    logprobs, refs = zip(*pairs, strict=True)
    expected = [by_hand(kind, a, b) for a, b in pairs]
    np.testing.assert_allclose(run(kind + plus, logprobs, refs)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, *(k + "+" for k in KINDS)])
@pytest.mark.parametrize("d", [-1000.0, -25.0, -3.0, -1.5, -0.25, 0.5, 2.0, 9.0, 12.5, 25.0, 1000.0])
def test_gradients(kind, d):
    """k3 has none where its clamps hold: a log-ratio beyond 20 or a value beyond 10."""
    assert run(kind, [-1.0], [-1.0 - d])[1][0] == pytest.approx(slope(kind, d), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [-1.5, -0.25, 0.5, 2.0, 9.0])
def test_gradients_by_finite_differences(kind, d):
    h = 1e-6
    numeric = (by_hand(kind, d + h, 0.0) - by_hand(kind, d - h, 0.0)) / (2 * h)
    assert run(kind, [d], [0.0])[1][0] == pytest.approx(numeric, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("alias", "kind"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
@pytest.mark.parametrize("plus", ["", "+"])
def test_verls_names_mean_the_same(alias, kind, plus):
    arguments = ([-1.0, -2.0, -0.5], [-2.0, -0.5, -0.5])
    assert run(alias + plus, *arguments) == run(kind + plus, *arguments)


def test_the_clamps_of_k3():
    """exp(30) - 31 is held at 10; so is 20 + exp(-20) - 1, where the policy is far more certain."""
    assert run("k3", [-30.0, 0.0], [0.0, -30.0])[0] == [10.0, 10.0]
    assert run("k3", [0.0], [-9.0])[0][0] == pytest.approx(8.0 + math.exp(-9.0))


def distributions():
    logits = torch.tensor([0.3, -0.8, 0.1, 0.6], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.1, 0.2, -0.4, 0.5], dtype=torch.float64), -1)
    return logits, torch.log_softmax(logits, -1), ref


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    """Their expectation under the policy, over every outcome, is the KL divergence."""
    _, logp, ref = distributions()
    exact, estimate = ((logp.exp() * value).sum() for value in (logp - ref, kl_penalty(logp, ref, kind)))
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+", "abs+"])
def test_the_gradient_of_k2_and_of_every_plus_is_unbiased(kind):
    """Its expectation over samples is the gradient of the KL divergence itself."""
    logits, logp, ref = distributions()
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((logp.exp().detach() * kl_penalty(logp, ref, kind)).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_the_plain_gradients_of_k1_and_k3_are_not():
    """What the + is for: E[grad k1] is 0, and E[grad k3] is the gradient of the reverse divergence."""
    for kind in ("k1", "k3"):
        logits, logp, ref = distributions()
        (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
        (plain,) = torch.autograd.grad((logp.exp().detach() * kl_penalty(logp, ref, kind)).sum(), logits)
        assert not torch.allclose(plain, exact, rtol=1e-2)


@pytest.mark.parametrize("kind", ["full", "", "+", "k1++", "K3"])
def test_an_unknown_estimator_is_refused_with_the_known_ones(kind):
    with pytest.raises(ValueError, match=r"unknown KL estimator .*k1, k2, k3, abs, kl, mse, low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)
