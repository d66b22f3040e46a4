"""Value loss, entropy, KL to the reference and cross-entropy, and how losses combine."""

import math
import warnings

import numpy as np
import pytest
import torch
from step_builders import MULTI_TURN, assert_rows, flat, pack, ragged

from verl_fn.state import Batch, Sum, TokenOutputs
from verl_fn.steps import (
    LossError,
    cross_entropy,
    entropy,
    kl_penalty,
    kl_to_reference,
    loss,
    ppo_clip,
    row_mean,
    total_loss,
    value_clip,
    weighted_sum,
)


def run(term, batch, **outputs):
    """The per-token loss, its gradient with respect to each output, and the metrics' values."""
    leaves = {name: torch.tensor(np.concatenate(rows), requires_grad=True) for name, rows in outputs.items()}
    per_token, metrics = term(TokenOutputs(leaves), batch)
    per_token.sum().backward()
    slopes = {f"slope_{name}": leaf.grad for name, leaf in leaves.items()}
    result = batch.with_tokens(loss=per_token.detach(), **slopes)
    return result, {name: metric.value for name, metric in metrics.items()}


def weighted(fields, losses):
    return sum((w * x).sum() for w, x in zip(fields["loss_weight"], losses, strict=True))


def value_loss(new, old, target, reach):
    near = min(max(new, old - reach), old + reach)
    return 0.5 * max((new - target) ** 2, (near - target) ** 2)


def value_slope(new, old, target, reach):
    """No gradient where the clipped error is the larger one, the plain one's elsewhere."""
    near = min(max(new, old - reach), old + reach)
    return 0.0 if (near - target) ** 2 > (new - target) ** 2 else new - target


@pytest.mark.parametrize("reach", [0.5, 0.25, 2.0])
@ragged
def test_value_loss(reach, masks, seed):
    """On multiples of 1/64, where nothing rounds, the clipped fraction is exact too."""
    batch, fields = pack(masks, seed, "vpred", "values", "returns", "loss_weight")
    fields = {name: [np.round(row * 64) / 64 for row in rows] for name, rows in fields.items()}
    batch = batch.with_tokens(**{name: np.concatenate(rows) for name, rows in fields.items()})
    result, metrics = run(value_clip(reach), batch, values=fields["vpred"])
    triples = [
        list(zip(*row, strict=True)) for row in zip(*(fields[n] for n in ("vpred", "values", "returns")), strict=True)
    ]
    losses = [np.array([value_loss(*t, reach) for t in row]) for row in triples]
    assert_rows(result, "loss", losses)
    clipped = [np.array([value_loss(*t, reach) > 0.5 * (t[0] - t[2]) ** 2 for t in row]) for row in triples]
    nothing = not sum(map(sum, masks))
    assert metrics == pytest.approx(
        {
            "critic/vf_loss": weighted(fields, losses),
            "critic/vf_clipfrac": math.nan if nothing else flat(masks, clipped).mean(),
            "critic/vpred_mean": math.nan if nothing else flat(masks, fields["vpred"]).mean(),
        },
        nan_ok=True,
    )


@pytest.mark.parametrize("reach", [0.5, 2.0])
@ragged
def test_value_gradient(reach, masks, seed):
    batch, fields = pack(masks, seed, "vpred", "values", "returns", "loss_weight")
    result, _ = run(value_clip(reach), batch, values=fields["vpred"])
    rows = zip(*(fields[name] for name in ("vpred", "values", "returns")), strict=True)
    assert_rows(result, "slope_values", [[value_slope(*t, reach) for t in zip(*row, strict=True)] for row in rows])


@pytest.mark.parametrize(
    ("new", "old", "target", "expected"),
    [
        (1.0, 0.0, 2.0, 1.125),
        (-1.0, 0.0, 2.0, 4.5),
        (0.25, 0.0, 2.0, 1.53125),
        (3.0, 0.0, 2.0, 1.125),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_value_loss_is_the_pessimistic_one(new, old, target, expected):
    batch = pack([[1]], 0, "loss_weight")[0].with_tokens(values=[old], returns=[target])
    assert run(value_clip(0.5), batch, values=[np.array([new])])[0]["loss"].item() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_not_taken_for_clipping(dtype):
    batch, fields = pack([[1] * 500], 0, "vpred", "values", "returns", "loss_weight", dtype=dtype)
    close = [np.clip(row, old - 0.4, old + 0.4) for row, old in zip(fields["vpred"], fields["values"], strict=True)]
    assert run(value_clip(0.5), batch, values=close)[1]["critic/vf_clipfrac"] == 0.0


@ragged
def test_entropy_is_passed_on_with_slope_one(masks, seed):
    batch, fields = pack(masks, seed, "entropy", "loss_weight")
    result, metrics = run(entropy(), batch, entropy=fields["entropy"])
    assert_rows(result, "loss", fields["entropy"])
    assert_rows(result, "slope_entropy", [np.ones(len(mask)) for mask in masks])
    assert metrics == pytest.approx({"actor/entropy_loss": weighted(fields, fields["entropy"])})


@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl", "k3+", "abs"])
def test_kl_to_reference_is_the_penalty_on_new_log_probs(kind):
    batch, fields = pack(MULTI_TURN, 3, "logprobs", "ref_log_prob", "loss_weight")
    result, metrics = run(kl_to_reference(kind), batch, logprobs=fields["logprobs"])
    x = torch.tensor(np.concatenate(fields["logprobs"]), requires_grad=True)
    expected = kl_penalty(x, batch["ref_log_prob"], kind)
    expected.sum().backward()
    assert torch.equal(result["loss"], expected.detach()) and torch.equal(result["slope_logprobs"], x.grad)
    assert metrics == pytest.approx({"actor/kl_loss": (batch["loss_weight"] * expected).sum().item()})


def test_kl_to_reference_uses_k3_unless_told():
    batch, fields = pack([[1, 1]], 3, "logprobs", "ref_log_prob", "loss_weight")
    plain, named = (
        run(term, batch, logprobs=fields["logprobs"])[0] for term in (kl_to_reference(), kl_to_reference("k3"))
    )
    assert torch.equal(plain["loss"], named["loss"])


@ragged
def test_cross_entropy_is_minus_the_log_probability(masks, seed):
    batch, fields = pack(masks, seed, "logprobs", "loss_weight")
    result, metrics = run(cross_entropy(), batch, logprobs=fields["logprobs"])
    assert_rows(result, "loss", [-row for row in fields["logprobs"]])
    assert_rows(result, "slope_logprobs", [-np.ones(len(mask)) for mask in masks])
    tokens = flat(masks, fields["logprobs"])
    assert metrics == pytest.approx({"train/nll": -tokens.mean() if len(tokens) else math.nan}, nan_ok=True)


def test_cross_entropy_on_logits_has_gradient_softmax_less_one_hot():
    """A field at t belongs to token t, which the logits at t - 1 predict; only weighted tokens count."""
    torch.manual_seed(0)
    tokens, weight = [2, 0, 3, 1], np.array([0.0, 0.5, 0.0, 0.25])
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    shifted = torch.log_softmax(logits[:-1], -1)
    logprobs = torch.cat([torch.zeros(1, dtype=torch.float64), shifted[range(3), tokens[1:]]])
    batch = Batch.from_rows([tokens], {"response_mask": [[0.0, 1.0, 0.0, 1.0]], "loss_weight": [weight]})
    per_token, _ = cross_entropy()(TokenOutputs({"logprobs": logprobs}), batch)
    (batch["loss_weight"] * per_token).sum().backward()
    expected = np.zeros((4, 5))
    for t in (1, 3):
        row = np.exp(logits[t - 1].detach().numpy())
        expected[t - 1] = weight[t] * (row / row.sum() - np.eye(5)[tokens[t]])
    np.testing.assert_allclose(logits.grad.numpy(), expected, rtol=1e-9, atol=1e-12)


@ragged
def test_the_total_is_weighed_and_skips_what_weighs_nothing(masks, seed):
    """A token of weight zero may hold anything, also nan, and gets gradient zero."""
    batch, fields = pack(masks, seed, "weight", "per_token")
    weights = [np.where(mask, row, 0.0) for mask, row in zip(masks, fields["weight"], strict=True)]
    batch = batch.with_tokens(loss_weight=np.concatenate(weights))
    junk = torch.where(batch["loss_weight"] == 0, torch.nan, batch["per_token"]).requires_grad_()
    total, _ = total_loss(
        loss()(lambda outputs, batch: (outputs.logprobs, {})), TokenOutputs({"logprobs": junk}), batch
    )
    total.backward()
    expected = sum((w * x).sum() for w, x in zip(weights, fields["per_token"], strict=True))
    assert total.item() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(junk.grad, batch["loss_weight"])


def test_losses_add_subtract_and_scale():
    """Metrics report every term as it is, whatever its coefficient."""
    names = ("logprobs", "entropy", "old_log_probs", "advantages", "ref_log_prob", "loss_weight")
    batch, fields = pack(MULTI_TURN, 6, *names)
    outputs = {name: fields[name] for name in ("logprobs", "entropy")}
    whole = ppo_clip() + 0.5 * kl_to_reference("k2") - entropy() * 0.25
    assert whole.needs == {"logprobs", "entropy"}
    result, metrics = run(whole, batch, **outputs)
    policy, penalty = (run(term, batch, logprobs=fields["logprobs"]) for term in (ppo_clip(), kl_to_reference("k2")))
    bonus = run(entropy(), batch, entropy=fields["entropy"])
    for name, expected in (
        ("loss", policy[0]["loss"] + 0.5 * penalty[0]["loss"] - 0.25 * bonus[0]["loss"]),
        ("slope_logprobs", policy[0]["slope_logprobs"] + 0.5 * penalty[0]["slope_logprobs"]),
        ("slope_entropy", -0.25 * bonus[0]["slope_entropy"]),
    ):
        torch.testing.assert_close(result[name], expected)
    assert metrics == pytest.approx(policy[1] | penalty[1] | bonus[1])


def test_a_loss_of_ones_own_names_its_needs():
    @loss(needs=["logprobs", "values"])
    def product(outputs, batch):
        return outputs.logprobs * outputs.values, {}

    assert product.needs == {"logprobs", "values"}
    assert loss()(lambda outputs, batch: (outputs.logprobs, {})).needs == {"logprobs"}
    with pytest.raises(AttributeError, match=r"no 'values', only \['logprobs'\]"):
        product(TokenOutputs({"logprobs": torch.zeros(1)}), pack([[1]], 0)[0])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: (x.mean(), {}), r"has the shape \(\), but the batch has 2 tokens"),
        (lambda x: x, "returns a Tensor; a loss returns its values and its metrics"),
        (lambda x: (x, {}, 1), "returns a tuple of Tensor, dict, int;"),
        (lambda x: None, "returns None;"),
        (lambda x: (x, None), "returns None as its metrics"),
        (lambda x: (x, [3.0]), "returns a list as its metrics; they are a dict by name"),
        (lambda x: (x, {"n": 3.0}), "returns a float as the metric 'n'; it does not add up over .*steps.token_mean"),
        (lambda x: (x, {"n": x.mean()}), "returns a Tensor as the metric 'n'"),
        (lambda x: (x, {"loss": Sum(1)}), "returns a metric named 'loss', as the total is; give it another name"),
    ],
)
def test_what_is_no_loss_is_named_with_its_place(returned, message):
    @loss(needs=["logprobs"])
    def mine(outputs, batch):
        return returned(outputs.logprobs)

    batch = Batch.from_rows([[1, 2]], {"loss_weight": [[0.5, 0.5]]})
    for whole in (mine, mine + mine, 2.0 * mine):
        with pytest.raises(LossError, match=rf"the loss mine \({__file__}:\d+\) {message}"):
            total_loss(whole, TokenOutputs({"logprobs": torch.zeros(2)}), batch)


def test_losses_that_cannot_be_added():
    def rows(together):
        return loss(["row_values"], level="row", together=together)(lambda outputs, batch: (outputs.row_values, {}))

    with pytest.raises(ValueError, match=r"different fields \(group, pair\) cannot be added; use the same per-row"):
        rows("pair") + entropy() + rows("group")
    both = rows("pair") + rows(None) + entropy()
    assert both.together == "pair" and both.levels == {"row", "token"}
    batch = Batch.from_rows([[1]], {"response_mask": [[1.0]]})
    with pytest.raises(ValueError, match=r"terms of both levels, token and row; compute it with steps\.total_loss"):
        both(TokenOutputs({"row_values": torch.zeros(1), "entropy": torch.zeros(1)}), batch)
    with pytest.raises(TypeError):
        entropy() + 1.0


def test_metrics_of_rows_and_of_the_loss():
    batch = Batch.from_rows([[1], [2, 3], [4]], {"loss_weight": [[1.0], [1.0, 0.0], [1.0]]})
    batch = batch.with_rows(row_weight=[0.0, 0.25, 0.5])
    assert row_mean(batch, torch.tensor([math.nan, 1.0, 4.0])).value == 2.5, "all rows with a weight count alike"
    assert weighted_sum(batch, torch.tensor([math.inf, 4.0, 8.0]), "row").value == 5.0
    # Sums in float32 would lose the ones.
    assert weighted_sum(batch, torch.tensor([2.0**24, 1.0, math.nan, 1.0])).value == 2**24 + 2


def test_a_loss_without_a_gradient_warns():
    @loss(needs=["logprobs"])
    def mine(outputs, batch):
        return -outputs.logprobs.detach(), {}

    batch = Batch.from_rows([[1, 2]], {"loss_weight": [[0.5, 0.5]]})
    outputs = TokenOutputs({"logprobs": torch.zeros(2, requires_grad=True)})
    with pytest.warns(UserWarning, match=r"the gradient of the loss mine"):
        total_loss(mine, outputs, batch)[0].backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        total_loss(mine, outputs, batch)


def test_a_value_that_has_not_moved_has_its_full_gradient_also_at_range_0():
    batch = Batch.from_rows([[1]], {"values": [[1.0]], "returns": [[3.0]], "response_mask": [[1.0]]})
    for cliprange in (0.0, 0.5):
        leaf = torch.tensor([1.0], requires_grad=True)
        loss = value_clip(cliprange)
        values, _ = loss(TokenOutputs({"values": leaf}), batch.with_tokens(loss_weight=torch.ones(1)))
        values.sum().backward()
        assert leaf.grad.item() == -2.0


def test_a_capped_bonus_has_a_gradient_below_the_cap_only():
    batch = Batch.from_rows([[1, 1]], {"response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]]})
    leaf = torch.tensor([0.2, 3.0], requires_grad=True)
    values, metrics = entropy(cap=0.5)(TokenOutputs({"entropy": leaf}), batch)
    values.sum().backward()
    assert leaf.grad.tolist() == [1.0, 0.0] and metrics["actor/entropy_loss"].value == pytest.approx(0.35)
