"""The mock backend computes what it says: the laws alone would not notice a wrong gradient."""

import mutants
import pytest
import torch

from verl_fn.backends.mock import Mock, MockRollout, sample_table
from verl_fn.backends.protocol import Sampling
from verl_fn.state import Batch, Key, TokenOutputs, pack, requests_for
from verl_fn.steps import (
    adamw,
    aggregate,
    apply_update,
    constant,
    cross_entropy,
    entropy,
    grpo,
    kl_to_reference,
    ppo_clip,
    total_loss,
    value_clip,
)
from verl_fn.testing import tiny_batch


def by_autograd(tables, batch, loss):
    """The same model in plain torch, a token at a time."""
    leaves = {name: t.double().requires_grad_() for name, t in tables.items()}
    by_token = {
        name: [torch.zeros((), dtype=torch.float64)] * batch.num_tokens for name in ("logprobs", "entropy", "values")
    }
    temperature = batch.spread(batch["temperature"])
    for t in batch["response_mask"].nonzero()[:, 0].tolist():
        last = batch.tokens[t - 1]
        log_probs = (leaves["logits"][last] / temperature[t]).log_softmax(0)
        by_token["logprobs"][t] = log_probs[batch.tokens[t]]
        by_token["entropy"][t] = -(log_probs.exp() * log_probs).sum()
        by_token["values"][t] = leaves["values"][last]
    outputs = TokenOutputs({name: torch.stack(column) for name, column in by_token.items()})
    total_loss(loss, outputs, batch)[0].backward()
    return outputs, {name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in leaves.items()}


@pytest.mark.parametrize(
    "loss",
    [
        ppo_clip(),
        cross_entropy(),
        entropy(),
        value_clip(),
        ppo_clip() + value_clip() - 0.3 * entropy() + kl_to_reference(),
    ],
    ids=["ppo_clip", "cross_entropy", "entropy", "value_clip", "all"],
)
def test_gradients_in_closed_form_are_those_of_autograd(loss):
    backend, batch = mutants.mock(), tiny_batch()
    state = backend.init(Key.from_seed(3))
    outputs, expected = by_autograd(state.params, batch, loss)
    grads, metrics = backend.forward_backward(state, batch, loss)
    actual = backend.forward(state.params, batch, loss.needs)
    for name in loss.needs:
        torch.testing.assert_close(
            actual.by_name[name].double(), outputs.by_name[name].detach(), rtol=1e-5, atol=1e-6
        )
    for name, g in grads.items():
        torch.testing.assert_close(g.double(), expected[name], rtol=1e-4, atol=1e-6)
    assert "loss" in metrics


def test_a_target_without_a_token_before_it_is_refused():
    backend = mutants.mock()
    state = backend.init(Key.from_seed(0))
    batch = aggregate(Batch.from_rows([[1, 2], [3, 4]], {"response_mask": [[0.0, 1.0], [1.0, 1.0]]}))
    with pytest.raises(ValueError, match="row 1: response_mask is set on its first token"):
        backend.forward(state.params, batch)
    with pytest.raises(ValueError, match="loss_weight"):
        backend.forward_backward(state, batch.without("loss_weight"), cross_entropy())
    with pytest.raises(ValueError, match="topk"):
        backend.forward(state.params, batch, ["topk:64"])


def test_failures_come_at_the_call_they_are_set_for_and_leave_the_state_alone():
    backend = Mock(mutants.VOCAB, mutants.optimizer(), failures={("forward_backward", 2): RuntimeError("boom")})
    state, batch = backend.init(Key.from_seed(0)), tiny_batch()
    backend.forward_backward(state, batch, ppo_clip())
    with pytest.raises(RuntimeError, match="boom"):
        backend.forward_backward(state, batch, ppo_clip())
    backend.forward_backward(state, batch, ppo_clip())
    assert backend.calls["forward_backward"] == 3
    with pytest.raises(ValueError, match="step"):
        Mock(mutants.VOCAB, mutants.optimizer(), failures={("step", 1): RuntimeError("boom")})


def test_load_pretrained_takes_the_tables_and_nothing_else(tmp_path):
    backend = mutants.mock()
    state = backend.init(Key.from_seed(0))
    state, _ = backend.apply_update(state, backend.forward_backward(state, tiny_batch(), ppo_clip())[0])
    backend.save(state, tmp_path)
    fresh = backend.load_pretrained(tmp_path, Key.from_seed(1))
    assert torch.equal(fresh.params["logits"], state.params["logits"])
    assert (fresh.step, fresh.scheduler, float(fresh.optimizer.exp_avg["logits"].abs().max())) == (0, 0, 0.0)


def test_both_mocks_together_learn():
    """Reinforcement learning in milliseconds: the token 5 is rewarded wherever it is drawn."""
    trainer, engine = Mock(mutants.VOCAB, adamw(constant(0.3))), MockRollout(sample_table)
    state, key, scores = trainer.init(Key.from_seed(0)), Key.from_seed(1), []
    for step in range(20):
        engine.publish(step, trainer.weights(state.params))
        batch = pack(
            engine.generate(requests_for([[1], [2], [3]], Sampling(4, n=8), key.fold_in(step)), version=step)
        )
        reward = (batch.tokens == 5).float() * batch["response_mask"]
        scores.append(float(reward.sum() / batch["response_mask"].sum()))
        batch = aggregate(
            grpo(batch.with_tokens(token_level_rewards=reward, old_log_probs=batch["rollout_log_probs"]))
        )
        grads, _ = trainer.forward_backward(state, batch, ppo_clip())
        state, _ = trainer.apply_update(state, grads)
    assert scores[0] < 0.4 and scores[-1] > 0.9


def test_the_mock_makes_the_same_step_as_any_other_backend():
    backend = mutants.mock()
    state = backend.init(Key.from_seed(0))
    grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
    expected, _ = apply_update(mutants.optimizer(), state, grads, donate=False)
    new, metrics = backend.apply_update(state, grads)
    assert torch.equal(new.params["logits"], expected.params["logits"])
    assert metrics["perf/residency_copies"].value == 0
