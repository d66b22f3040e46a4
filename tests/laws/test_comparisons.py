"""Comparisons notice what the laws do not: a wrong formula, and how far two backends differ."""

import math

import attrs
import pytest
import torch

from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock
from verl_fn.state import Grads, Key, Sum, tree
from verl_fn.steps import bradley_terry, cross_entropy, gae, kl_to_reference, loss, ppo_clip, sgd, value_clip
from verl_fn.testing import (
    FirstStep,
    LawViolation,
    check_advantage,
    check_loss,
    compare_advantage,
    compare_backends,
    compare_loss,
    tiny_batch,
    tiny_pairs,
)
from verl_fn.testing.compare import BARS


def clipped(outputs, row):
    """PPO's loss, a token at a time."""
    values = []
    for t in range(len(row.tokens)):
        advantage, ratio = row["advantages"][t], (outputs.logprobs[t] - row["old_log_probs"][t]).exp()
        value = max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        values.append(min(value, -3.0 * advantage) if advantage < 0 else value)
    return torch.stack(values)


def preferred(outputs, pair):
    """The loss of a reward model, for one pair."""
    winner = int(pair["chosen"].argmax())
    margin = outputs.row_values[winner] - outputs.row_values[1 - winner]
    return (1.0 + (-margin).exp()).log().expand(2)


@loss(needs=["logprobs"])
def shifted(outputs, batch):
    """The advantage of the next token of the response."""
    following = batch["advantages"].clone()
    for row in range(len(batch)):
        (response,) = torch.where((batch["response_mask"] != 0) & (batch.row_ids == row))
        following[response] = following[response].roll(-1)
    return -following * outputs.logprobs, {}


@loss(needs=["logprobs"])
def ascends(outputs, batch):
    return batch["advantages"] * outputs.logprobs, {}


def reinforce(outputs, row):
    return -row["advantages"] * outputs.logprobs


def returns_to_go(batch):
    """GAE with gamma and lambda of 1, a token at a time."""
    fields = {"advantages": [], "returns": []}
    names = ("token_level_rewards", "values", "response_mask")
    for rewards, values, mask in zip(*map(batch.rows, names), strict=True):
        for t in range(len(mask)):
            rest = math.fsum(float(r) for r, m in zip(rewards[t:], mask[t:], strict=True) if m)
            fields["returns"].append(rest)
            fields["advantages"].append(rest - float(values[t]))
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in fields.items()}


def looks_back(batch):
    """Sums the rewards up to a token instead of those from it on."""
    backwards = [row.flip(0) for row in batch.rows("token_level_rewards")]
    mirrored = batch.with_tokens(token_level_rewards=torch.cat(backwards))
    new = gae(mirrored, whiten=False)
    return batch.with_tokens(advantages=new["advantages"], returns=new["returns"])


def test_built_in_losses_are_their_formulas():
    compare_loss(ppo_clip(), clipped)
    compare_loss(bradley_terry(), preferred, tiny_pairs)


def test_a_built_in_estimator_is_its_formula():
    compare_advantage(lambda batch: gae(batch, whiten=False), returns_to_go)


@pytest.mark.parametrize("wrong", [shifted, ascends], ids=["shifted", "ascends"])
def test_a_comparison_sees_what_the_laws_of_losses_do_not(wrong):
    check_loss(wrong)
    with pytest.raises(LawViolation, match="Reference"):
        compare_loss(wrong, reinforce)


def test_a_comparison_sees_what_the_laws_of_estimators_do_not():
    def ascends(batch):
        new = gae(batch, whiten=False)
        return new.with_tokens(advantages=-new["advantages"])

    check_advantage(ascends)
    for wrong in (ascends, looks_back):
        with pytest.raises(LawViolation, match="Reference"):
            compare_advantage(wrong, returns_to_go)


def test_gradients_are_compared_too():
    @loss(needs=["logprobs"])
    def detached(outputs, batch):
        ratio = (outputs.logprobs - batch["old_log_probs"]).exp()
        return -batch["advantages"] * ratio.detach() * outputs.logprobs, {}

    def differentiated(outputs, row):
        return -row["advantages"] * (outputs.logprobs - row["old_log_probs"]).exp() * outputs.logprobs

    with pytest.raises(LawViolation, match=r"on batch 0 the loss differs at \['gradient'\]"):
        compare_loss(detached, differentiated)


def test_a_comparison_names_the_row_and_the_token_that_differ_most():
    @loss(needs=["logprobs"])
    def wrong_at_the_third_token(outputs, batch):
        values = -batch["advantages"] * outputs.logprobs
        return torch.where(batch.positions == 2, values + 100.0, values), {}

    @loss(needs=["logprobs"], level="row")
    def wrong_in_the_third_row(outputs, batch):
        mask = batch["response_mask"]
        sums = torch.stack([row.sum() for row in (outputs.logprobs * mask).split(batch.lengths.tolist())])
        return torch.where(torch.arange(len(sums)) == 2, sums + 100.0, sums), {}

    def log_prob(outputs, row):
        return (outputs.logprobs * row["response_mask"]).sum()[None]

    with pytest.raises(LawViolation, match=r"the loss \(most at token 2 of row \d\) differs"):
        compare_loss(wrong_at_the_third_token, reinforce)
    with pytest.raises(LawViolation, match=r"the loss \(most in row 2\) differs"):
        compare_loss(wrong_in_the_third_row, log_prob)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="one at a time"):
        compare_loss(value_clip() + bradley_terry(), reinforce, tiny_pairs)
    with pytest.raises(ValueError, match="values of shape"):
        compare_loss(ascends, lambda outputs, row: reinforce(outputs, row).sum())
    with pytest.raises(ValueError, match="an estimator writes"):
        compare_advantage(gae, lambda batch: {"values": batch["values"]})


class Tilted(Mock):
    """Reports a third more loss, and the gradient of one parameter twice as large."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        doubled = Grads({name: t * (2.0 if name == "logits" else 1.0) for name, t in grads.items()})
        return doubled, metrics | {"loss": Sum(metrics["loss"].total * 4 / 3)}


def test_backends_differ_by_what_was_put_in_between_them():
    right = Mock(8, sgd(0.1))
    state = right.init(Key.from_seed(3))
    before = tree.digest(state)
    first = compare_backends(right, Tilted(8, sgd(0.1)), tiny_batch(), value_clip() + ppo_clip(), state=state)
    grads, metrics = right.forward_backward(state, tiny_batch(), value_clip() + ppo_clip())
    assert tree.digest(state) == before
    assert first.loss == pytest.approx((metrics["loss"].value, metrics["loss"].value * 4 / 3))
    assert first.grad_norm[0] == pytest.approx(float(grads.global_norm()))
    assert first.grad_norm[1] > first.grad_norm[0]
    assert first.gradients == pytest.approx({"logits": 1.0, "values": 0.0}) and first.worst == "logits"
    assert first.missed == ["loss", "grad_norm", "gradient"] and not first.ok
    assert "logits differs most" in str(first) and "error 1, MISSES its bar of 1e-05" in str(first)


def test_splits_of_a_model_differ_by_rounding(tiny):
    backends = [Local(tiny, sgd(0.1), max_tokens=tokens) for tokens in (1000, 20)]
    first = compare_backends(*backends, tiny_batch(), cross_entropy())
    assert first.ok and first.bars == BARS["float32"], first
    assert first.gradients[first.worst] > 0 and first.loss[0] == pytest.approx(first.scale)
    assert str(first).count("holds its bar") == 3


def test_the_lower_dtype_decides_the_bars_and_only_rounding_holds_them(tiny):
    whole, half = Local(tiny, sgd(0.1)), Local(tiny, sgd(0.1), dtype="bfloat16")
    for pair in ((whole, half), (half, whole)):
        first = compare_backends(*pair, tiny_batch(), cross_entropy())
        assert first.ok and first.bars == BARS["bfloat16"], first
        assert "no bar" in str(first)
    assert attrs.evolve(first, bars=BARS["float32"]).missed == ["loss", "grad_norm", "gradient"]


def test_the_error_of_a_loss_is_relative_to_the_sum_of_the_sizes_of_its_values():
    right, batch = Mock(8, sgd(0.1)), tiny_batch()
    state = right.init(Key.from_seed(3))
    first = compare_backends(right, Tilted(8, sgd(0.1)), batch, value_clip(), state=state)
    values, _ = value_clip()(right.forward(state.params, batch, ["values"]), batch)
    assert first.scale == pytest.approx(float((batch["loss_weight"] * values).abs().sum()))
    assert first.errors["loss"] == pytest.approx(first.loss[0] / 3 / first.scale)


def test_a_gradient_that_is_not_a_number_is_the_worst():
    first = FirstStep((1.0, 1.0), (1.0, math.nan), {"a": 5.0, "b": math.nan, "c": 7.0}, 1.0)
    assert first.worst == "b" and first.missed == ["grad_norm", "gradient"]


@loss(needs=["logprobs"])
def saturating(outputs, batch):
    """Its values are near 0, and they have both signs."""
    return -batch["advantages"] * torch.tanh(outputs.logprobs - batch["old_log_probs"]), {}


NEAR_ZERO = {"saturating": saturating, "kl": kl_to_reference("low_var_kl")}


def near_zero(backend, state):
    """A batch whose log-probs differ little from the old ones and from the reference's."""
    batch = tiny_batch()
    old = backend.forward(state.params, batch).logprobs - 0.1 * batch["response_mask"]
    rows = batch.spread(1.0 - 2.0 * (torch.arange(len(batch)) % 2))
    return batch.with_tokens(old_log_probs=old, ref_log_prob=old, advantages=rows)


@pytest.mark.parametrize("name", NEAR_ZERO)
def test_what_rounding_makes_of_a_loss_near_zero_holds_its_bar(name, tiny):
    whole, half = Local(tiny, sgd(0.1)), Local(tiny, sgd(0.1), dtype="bfloat16")
    for seed in range(4):
        state = whole.init(Key.from_seed(seed))
        first = compare_backends(whole, half, near_zero(whole, state), NEAR_ZERO[name], state=state)
        assert "loss" not in first.missed, first


class Faulty(Local):
    """Computes in bfloat16, and with a fault: a change of the batch or of the loss."""

    def __init__(self, folder, fault):
        super().__init__(folder, sgd(0.1), dtype="bfloat16")
        self.fault = fault

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(state, *self.fault(batch, loss))


def without_a_token(batch, loss):
    weight = batch["loss_weight"].clone()
    weight[int(weight.argmax())] = 0.0
    return batch.with_tokens(loss_weight=weight), loss


FAULTS = {
    "a token is missing": without_a_token,
    "one percent more": lambda batch, loss: (batch, 1.01 * loss),
    "the other sign": lambda batch, loss: (batch, -1.0 * loss),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NEAR_ZERO)
def test_a_fault_in_a_loss_near_zero_misses_a_bar(name, fault, tiny):
    whole, faulty = Local(tiny, sgd(0.1)), Faulty(tiny, FAULTS[fault])
    state = whole.init(Key.from_seed(0))
    batch = near_zero(whole, state)
    for pair in ((whole, faulty), (faulty, whole)):
        assert not compare_backends(*pair, batch, NEAR_ZERO[name], state=state).ok


def test_a_loss_without_slopes_is_compared_by_its_values(tiny):
    @loss(needs=["logprobs"])
    def rooted(outputs, batch):
        """The slope is infinite for a token that has no weight."""
        kept = torch.where(batch["loss_weight"] > 0, outputs.logprobs, 0.0)
        return kept.abs().sqrt(), {}

    first = compare_backends(Local(tiny, sgd(0.1)), Local(tiny, sgd(0.1)), tiny_batch(), rooted)
    assert first.ok and first.scale > 0


def test_backends_of_other_models_are_refused():
    class Renamed(Mock):
        def forward_backward(self, state, batch, loss):
            grads, metrics = super().forward_backward(state, batch, loss)
            return Grads({f"other.{name}": t for name, t in grads.items()}), metrics

    with pytest.raises(ValueError, match="only one of the backends has gradients named"):
        compare_backends(Mock(8, sgd(0.1)), Renamed(8, sgd(0.1)), tiny_batch(), cross_entropy())
