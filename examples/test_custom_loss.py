"""Tests of a loss and an algorithm of your own, in milliseconds and without a model.

.venv/bin/python -m pytest examples/test_custom_loss.py
"""

import pytest
import torch

from verl_fn.backends.protocol import Sampling
from verl_fn.state import Key, pack, requests_for
from verl_fn.steps import adamw, aggregate, loss, rloo, token_mean
from verl_fn.testing import LawViolation, Mock, MockRollout, check_loss, compare_loss, sample_table


@loss(needs=["logprobs"])
def truncated(outputs, batch):
    """REINFORCE with importance weights that are truncated at 2 and not differentiated."""
    weight = (outputs.logprobs - batch["old_log_probs"]).clamp(max=20.0).exp().clamp(max=2.0).detach()
    return -weight * batch["advantages"] * outputs.logprobs, {"weight": token_mean(batch, weight)}


@loss(needs=["logprobs"])
def averaged(outputs, batch):
    """The same loss with a bug: it divides by the number of tokens in its own micro-batch."""
    per_token, metrics = truncated(outputs, batch)
    return per_token / batch["response_mask"].sum(), metrics


def step(state, prompts, backend, engine, key):
    """Takes one step of an algorithm: samples, rewards every token 5, compares within groups, and updates."""
    engine.publish(state.step, backend.weights(state.params))
    requests = requests_for(prompts, Sampling(max_tokens=4, n=8), key.fold_in(state.step))
    batch = pack(engine.generate(requests, version=state.step))
    reward = (batch.tokens == 5) * batch["response_mask"]
    batch = rloo(batch.with_tokens(token_level_rewards=reward, old_log_probs=batch["rollout_log_probs"]))
    grads, _ = backend.forward_backward(state, aggregate(batch, "token-mean"), truncated)
    state, _ = backend.apply_update(state, grads)
    return state, float(reward.sum() / batch["response_mask"].sum())


def test_the_loss_obeys_the_laws():
    check_loss(truncated)


def formula(outputs, row):
    """The loss once more, for one row and as plainly as possible."""
    values = []
    for t in range(len(row.tokens)):
        ratio = (outputs.logprobs[t].detach() - row["old_log_probs"][t]).exp()
        values.append(-min(float(ratio), 2.0) * row["advantages"][t] * outputs.logprobs[t])
    return torch.stack(values)


def test_the_loss_is_its_formula():
    compare_loss(truncated, formula)
    with pytest.raises(LawViolation, match="another sign"):
        compare_loss(-1.0 * truncated, formula)


def test_a_denominator_inside_the_loss_is_caught():
    with pytest.raises(LawViolation, match="denominators belong in loss_weight") as caught:
        check_loss(averaged)
    assert caught.value.law == "Split invariance"


def test_the_algorithm_learns():
    """A mock is a table of logits; ``sample_table`` draws from the table that was published."""
    backend, engine = Mock(8, adamw(0.3)), MockRollout(sample_table)
    state, key, shares = backend.init(Key.from_seed(0)), Key.from_seed(1), []
    for _ in range(20):
        state, share = step(state, [[1], [2], [3]], backend, engine, key)
        shares.append(share)
    assert shares[0] < 0.4 and shares[-1] > 0.9


def test_scripted_answers_give_the_expected_update():
    """Only the answer 5 is rewarded, so the table learns 5 after the prompt 1, and nothing else changes."""
    backend, engine = (
        Mock(8, adamw(0.3, weight_decay=0.0)),
        MockRollout(lambda request: [5 - request.sample % 2]),
    )
    state = backend.init(Key.from_seed(0))
    new, _ = step(state, [[1]], backend, engine, Key.from_seed(1))
    moved = new.params["logits"] - backend.init(Key.from_seed(0)).params["logits"]
    assert moved[1, 5] > 0 > moved[1, 4]
    assert moved[2:].abs().max() == 0 and moved[0].abs().max() == 0


def test_a_failed_update_leaves_the_state_as_it_was():
    backend = Mock(8, adamw(0.3), failures={("apply_update", 1): RuntimeError("out of memory")})
    state = backend.init(Key.from_seed(0))
    with pytest.raises(RuntimeError, match="out of memory"):
        step(state, [[1]], backend, MockRollout(sample_table), Key.from_seed(1))
    state, _ = step(state, [[1]], backend, MockRollout(sample_table), Key.from_seed(1))
    assert state.step == 1
