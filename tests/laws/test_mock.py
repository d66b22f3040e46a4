"""The mock backend computes what it says: the laws alone would not notice a wrong gradient."""

import attrs
import mutants
import pytest
import torch

from verl_fn.backends.mock import Mock, MockRollout, Response, sample_table
from verl_fn.backends.protocol import Sampling
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Batch, Key, Params, TokenOutputs, pack, requests_for
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
def test_gradients_are_those_of_a_token_at_a_time(loss):
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


def test_a_loss_that_depends_on_no_trained_table_has_gradients_of_zero():
    backend = mutants.mock()
    whole = backend.init(Key.from_seed(3))
    state = attrs.evolve(whole, params=Params(dict(whole.params), trainable={"values"}))
    grads, metrics = backend.forward_backward(state, tiny_batch(), cross_entropy())
    assert list(grads) == ["values"] and not grads["values"].any() and metrics["loss"].total > 0


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


def test_what_the_mocks_do_not_have_is_refused():
    with pytest.raises(ValueError, match=r"failures name \['step'\]; the methods are init, load_pretrained, forward"):
        Mock(4, adamw(0.1), failures={("step", 1): RuntimeError(), ("save", 1): OSError()})
    backend, batch = mutants.mock(), tiny_batch()
    state = backend.init(Key.from_seed(0))
    assert backend.forward(state.params, batch, ["sum_pi_squared"]).sum_pi_squared.any()
    for needs in (["candidate_logprobs"], ["logprobs", "candidate_logprobs"]):
        with pytest.raises(ValueError, match=r"a mock gives \['entropy', .*\], not \['candidate_logprobs'\]"):
            backend.forward(state.params, batch, needs)
    engine = MockRollout({(5, 6): [7], (1,): Response([7, 8], [-0.5])})
    engine.publish(0, Weights.of({}))
    for prompt, error, message in (
        ([5], KeyError, r"the script has no answer to the prompt \(5,\)"),
        ([1], ValueError, "a response of 2 tokens has 1 log-probs"),
    ):
        with pytest.raises(error, match=message):
            engine.generate(requests_for([prompt], Sampling(4), Key.from_seed(0)))


def test_answers_of_a_script_end_at_stop_tokens_and_at_the_limit():
    """A script's answer that goes on behind the limit was cut, also if it says that it ends there."""
    engine = MockRollout({(1,): [4, 5, 2, 6], (2,): Response([4, 5, 6], finished=False)})
    engine.publish(3, Weights.of({}))
    for prompt, sampling, tokens, reason in (
        (1, Sampling(8), [4, 5, 2, 6], "stop"),
        (1, Sampling(4), [4, 5, 2, 6], "stop"),
        (1, Sampling(3), [4, 5, 2], "length"),
        (1, Sampling(3, stop_token_ids=[2]), [4, 5, 2], "stop"),
        (1, Sampling(8, stop_token_ids=[6, 5]), [4, 5], "stop"),
        (1, Sampling(1, stop_token_ids=[5]), [4], "length"),
        (2, Sampling(8), [4, 5, 6], "length"),
    ):
        (sample,) = engine.generate(requests_for([[prompt]], sampling, Key.from_seed(0)))
        assert (sample.tokens.tolist(), sample.finish_reason) == (tokens, reason)
        assert sample.versions.tolist() == [3] * len(tokens) and sample.full_log_probs is None
    (greedy,) = engine.generate(requests_for([[2]], Sampling(8, temperature=0.0), Key.from_seed(0)))
    assert greedy.temperature == 1.0


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
