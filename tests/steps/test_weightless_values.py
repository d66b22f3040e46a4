"""What has no weight or no mask does not count, even where it or its derivative is not finite."""

import math

import pytest
import torch

from verl_fn.errors import ArgumentError
from verl_fn.state import Batch, TokenOutputs, tree
from verl_fn.steps import (
    AdaptiveKL,
    FixedKL,
    aggregate,
    aggregate_rows,
    apply_kl_in_reward,
    check_weights,
    gae,
    grpo,
    loss,
    ppo_clip,
    reinforce_plus_plus,
    rloo,
    total_loss,
)

NAN, INF = math.nan, math.inf
MASK = [[0.0, 1.0, 1.0], [0.0, 1.0]]


def batch_of(**fields) -> Batch:
    return Batch.from_rows([[1, 2, 3], [4, 5]], {"response_mask": MASK, **fields})


@loss(needs=["logprobs"])
def unlikelihood(outputs, batch):
    """Its derivative is infinite at a log-prob of 0."""
    return -torch.log1p(-outputs.logprobs.exp()), {}


@loss(needs=["logprobs"])
def likelihood_of_rows(outputs, batch):
    """Every token's value depends on all tokens of its row."""
    return batch.spread(batch.sum_rows(outputs.logprobs).exp()), {}


@loss(needs=["logprobs"], level="row")
def root_of_rows(outputs, batch):
    return batch.sum_rows(outputs.logprobs).abs().sqrt(), {}


@loss(needs=["row_values"], level="row")
def log_of_values(outputs, batch):
    return outputs.row_values.log(), {}


def gradient(term, batch, values, name="logprobs"):
    leaf = torch.tensor(values, requires_grad=True)
    total, _ = total_loss(term, TokenOutputs({name: leaf}), batch)
    total.backward()
    return total.item(), leaf.grad.tolist()


def test_an_infinite_derivative_at_a_token_without_weight():
    batch = batch_of(loss_weight=[[0.0, 0.0, 1.0], [0.0, 0.0]])
    total, found = gradient(unlikelihood, batch, [0.0, 0.0, -1.0, 0.0, 0.0])
    p = math.exp(-1.0)
    assert total == pytest.approx(-math.log(1 - p)) and found == pytest.approx([0.0, 0.0, p / (1 - p), 0.0, 0.0])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_field_that_is_not_finite_at_a_token_without_weight(value):
    fields = {"old_log_probs": [[0.0] * 3, [0.0] * 2], "advantages": [[value, value, 1.0], [value, value]]}
    batch = batch_of(loss_weight=[[0.0, 0.0, 1.0], [0.0, 0.0]], **fields)
    total, found = gradient(ppo_clip(), batch, [0.0] * 5)
    assert (total, found) == (-1.0, [0.0, 0.0, -1.0, 0.0, 0.0])


def test_a_token_without_weight_still_counts_in_the_values_of_others():
    batch = batch_of(loss_weight=[[0.0, 0.0, 1.0], [0.0, 0.0]])
    _, found = gradient(likelihood_of_rows, batch, [0.0, -1.0, -1.0, 0.0, -1.0])
    assert found == pytest.approx([math.exp(-2.0)] * 3 + [0.0] * 2)


def test_rows_without_weight():
    """The derivative of the square root is infinite in the second row."""
    batch = batch_of().with_rows(row_weight=[1.0, 0.0])
    _, found = gradient(root_of_rows, batch, [0.0, -2.0, -2.0, 0.0, 0.0])
    assert found == pytest.approx([-0.25] * 3 + [0.0] * 2)
    _, found = gradient(log_of_values, batch, [2.0, 0.0], "row_values")
    assert found == [0.5, 0.0]


def test_terms_of_both_levels_keep_what_either_weighs():
    batch = batch_of(loss_weight=[[0.0, 0.0, 0.0], [0.0, 1.0]]).with_rows(row_weight=[1.0, 0.0])
    _, found = gradient(unlikelihood + root_of_rows, batch, [-1.0, -2.0, -1.0, 0.0, -1.0])
    p = math.exp(-1.0)
    assert found == pytest.approx([-0.25, -0.25, -0.25, 0.0, p / (1 - p)])


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_the_guard_can_be_transformed(transform):
    batch = batch_of(loss_weight=[[0.0, 0.0, 1.0], [0.0, 0.0]])
    x = torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0])

    def fn(logprobs):
        return total_loss(unlikelihood, TokenOutputs({"logprobs": logprobs}), batch)[0]

    derived = torch.func.grad(fn)(x)
    if transform == "vmap":
        derived = torch.func.vmap(torch.func.grad(fn))(torch.stack([x, x]))[1]
    slope = math.exp(-1.0) / (1 - math.exp(-1.0))
    assert derived.tolist() == pytest.approx([0.0, 0.0, slope, 0.0, 0.0])
    if transform == "jvp":
        assert float(torch.func.jvp(fn, (x,), (torch.ones(5),))[1]) == pytest.approx(slope)


def test_a_gradient_that_is_nan_where_there_is_weight_stays_so():
    """Such an update is skipped, which says that something is wrong."""
    batch = batch_of(loss_weight=[[0.0, 1.0, 1.0], [0.0, 1.0]])
    _, found = gradient(ppo_clip(), batch.with_tokens(old_log_probs=[0.0] * 5, advantages=[NAN] * 5), [0.0] * 5)
    assert [math.isnan(g) for g in found] == [False, True, True, False, True]


@pytest.mark.filterwarnings("ignore:the gradient of the loss constant")
def test_a_loss_that_ignores_the_outputs_has_a_zero_gradient():
    @loss(needs=["logprobs"])
    def constant(outputs, batch):
        return batch["advantages"], {}

    batch = aggregate(batch_of(advantages=[[0.0, 1.0, 2.0], [0.0, 3.0]]))
    assert gradient(constant, batch, [NAN] * 5) == (2.0, [0.0] * 5)


def test_weights_without_outputs_are_refused():
    batch = batch_of(loss_weight=[[0.0, 1.0, 1.0], [0.5, 1.0]])
    with pytest.raises(ValueError, match=r"row 1: loss_weight is set on 1 tokens .* where response_mask is 0"):
        check_weights(ppo_clip(), batch)
    check_weights(ppo_clip(), aggregate(batch))
    check_weights(log_of_values, batch.with_rows(row_weight=[1.0, 1.0]))


def test_a_function_is_no_loss():
    for wrong in (lambda outputs, batch: (outputs.logprobs, {}), ppo_clip):
        with pytest.raises(
            ArgumentError, match=r"a loss is a Loss, not a function; decorate .* such as ppo_clip\(\)"
        ):
            check_weights(wrong, aggregate(batch_of()))


@pytest.mark.parametrize("value", [NAN, INF])
def test_the_kl_outside_of_responses_does_not_count(value):
    fields = {"token_level_scores": [[0.0] * 3, [0.0] * 2], "old_log_probs": [[0.0, -1.0, -1.0], [0.0, -1.0]]}
    batch = batch_of(ref_log_prob=[[value, -2.0, -2.0], [value, -3.0]], **fields)
    penalized, controller, metrics = apply_kl_in_reward(batch, AdaptiveKL(0.1, target=1.0, horizon=10))
    assert metrics["actor/reward_kl_penalty"].value == 1.5
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    assert penalized["token_level_rewards"].tolist() == pytest.approx([0.0, -0.1, -0.1, 0.0, -0.2])


def test_a_kl_that_is_nan_does_not_change_the_coefficient():
    controller = AdaptiveKL(0.1)
    assert tree.equal(controller.update(NAN, 8), controller)
    assert tree.equal(FixedKL(0.1).update(NAN, 8), FixedKL(0.1))
    assert controller.update(INF, 8).value > 0.1


@pytest.mark.parametrize("setting", ["target", "horizon"])
@pytest.mark.parametrize("value", [0, -1, NAN])
def test_a_target_or_horizon_that_divides_by_nothing_is_refused(setting, value):
    with pytest.raises(ValueError, match=f"{setting} of an adaptive KL coefficient is .*; it must be above 0"):
        AdaptiveKL(0.1, **{setting: value})


INTEGERS = {
    "gae": lambda b: gae(b, gamma=0.5, lam=0.5, whiten=False),
    "whitened gae": lambda b: gae(b, gamma=0.5, lam=0.5),
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": lambda b: reinforce_plus_plus(b, gamma=0.5),
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_estimates_from_integers_are_those_from_floats(name, dtype):
    fields = {"token_level_rewards": torch.tensor([0, 1, 1, 0, 0]), "values": torch.tensor([0, 1, 0, 0, 1])}
    rows = [[1, 2, 3], [4, 5]]
    batch = Batch.from_rows(rows, {"response_mask": MASK}, {"group": [0, 0]})
    integers = batch.with_tokens(**{name: t.to(dtype) for name, t in fields.items()})
    floats = batch.with_tokens(**{name: t.float() for name, t in fields.items()})
    for estimate in ("advantages", "returns"):
        assert torch.equal(INTEGERS[name](integers)[estimate], INTEGERS[name](floats)[estimate])


@pytest.mark.parametrize("name", INTEGERS)
def test_results_of_estimators_and_aggregation_share_no_memory(name):
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    batch = Batch.from_rows([[1, 2, 3], [4, 5]], per_row={"group": [0, 0]})
    batch = batch.with_tokens(response_mask=mask, token_level_rewards=mask.clone(), values=mask.clone())
    done = aggregate_rows(aggregate(INTEGERS[name](batch), "token-sum"), "row-sum")
    fields = [*done.per_token.values(), *done.per_row.values()]
    assert len({t.untyped_storage().data_ptr() for t in fields}) == len(fields)


def test_an_adaptive_coefficient_sees_rows_with_a_response_alone():
    fields = {"token_level_scores": [[0.0]] * 3, "old_log_probs": [[0.0]] * 3, "ref_log_prob": [[-0.05]] * 3}
    batch = Batch.from_rows([[1]] * 3, fields | {"response_mask": [[1.0], [1.0], [0.0]]})
    ours, without = (
        apply_kl_in_reward(b, AdaptiveKL(0.1, target=1.0, horizon=10))[1] for b in (batch, batch.take([0, 1]))
    )
    assert ours.value == without.value == pytest.approx(0.1 * (1 - 0.2 * 2 / 10))


def test_rows_without_a_weighted_token_pass_no_nan_to_their_values():
    """A term of tokens reads the value of their row, whose derivative is infinite."""

    @loss(needs=["row_values"])
    def spread(outputs, batch):
        return batch.spread(outputs.row_values.sqrt()), {}

    batch = batch_of(loss_weight=[[0.0, 0.5, 0.5], [0.0, 0.0]])
    assert gradient(spread, batch, [4.0, 0.0], "row_values") == (2.0, [0.25, 0.0])
