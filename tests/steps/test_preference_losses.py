"""Preference losses against their formulas, written for one pair or one row in plain Python floats and in float64."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from verl_fn.state import Batch, Key, TokenOutputs
from verl_fn.steps import (
    aggregate_rows,
    bradley_terry,
    cdpo,
    dpo,
    ipo,
    kto,
    kto_reference_point,
    orpo,
    simpo,
    total_loss,
)
from verl_fn.testing import compare_loss, tiny_batch, tiny_pairs


def gains(outputs, row):
    """log(policy / reference) of the preferred row and of the other one, by loops over rows."""
    sums = []
    for wanted in (1.0, 0.0):
        number = row["chosen"].tolist().index(wanted)
        old, masks = row.rows("ref_log_prob")[number], row.rows("response_mask")[number]
        parts = zip(rows_of(outputs.logprobs, row)[number], old, masks, strict=True)
        sums.append(sum((new - old for new, old, mask in parts if mask), start=outputs.logprobs.sum() * 0.0))
    return sums


def rows_of(values, row):
    return values.split(row.lengths.tolist())


def means(outputs, row):
    """Mean log-probability per token of the preferred row and of the other one."""
    found = []
    for wanted in (1.0, 0.0):
        number = row["chosen"].tolist().index(wanted)
        mask = row.rows("response_mask")[number].bool()
        tokens = rows_of(outputs.logprobs, row)[number][mask]
        found.append(tokens.sum() / max(len(tokens), 1))
    return found


def both(value):
    return value.expand(2)


def by_dpo(beta):
    def reference(outputs, row):
        won, lost = gains(outputs, row)
        return both(-logsigmoid(beta * won - beta * lost))

    return reference


def by_cdpo(beta, share):
    def reference(outputs, row):
        won, lost = gains(outputs, row)
        return both(-(1 - share) * logsigmoid(beta * (won - lost)) - share * logsigmoid(beta * (lost - won)))

    return reference


def by_ipo(tau):
    def reference(outputs, row):
        won, lost = gains(outputs, row)
        return both((won - lost - 1 / (2 * tau)) ** 2)

    return reference


def by_simpo(beta, gamma):
    def reference(outputs, row):
        won, lost = means(outputs, row)
        return both(-torch.log(1 / (1 + torch.exp(gamma - beta * won + beta * lost))))

    return reference


def by_orpo(weight):
    def reference(outputs, row):
        won, lost = (m.clamp(max=-1e-12) for m in means(outputs, row))
        odds = [torch.exp(m) / (1 - torch.exp(m)) for m in (won, lost)]
        return both(-won - weight * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))

    return reference


def by_bradley_terry(outputs, row):
    first, second = outputs.row_values
    margin = first - second if row["chosen"][0] else second - first
    return both(torch.log(1 + torch.exp(-margin)))


def by_centered(outputs, row):
    first, second = outputs.row_values
    return by_bradley_terry(outputs, row) + 0.3 * (first + second) ** 2


def full_pairs(key):
    """Pairs in which every row has a response."""
    batch = tiny_pairs(key)
    last = torch.zeros(batch.num_tokens).index_fill(0, batch.last, 1.0)
    mask = torch.maximum(batch["response_mask"], last)
    return aggregate_rows(batch.with_tokens(response_mask=mask), "group-mean", group="pair")


@pytest.mark.parametrize("make", [tiny_pairs, full_pairs])
@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        (dpo(), by_dpo(0.1)),
        (dpo(2.0), by_dpo(2.0)),
        (cdpo(0.5, 0.2), by_cdpo(0.5, 0.2)),
        (cdpo(0.3, 0.0), by_dpo(0.3)),
        (ipo(0.1), by_ipo(0.1)),
        (ipo(1.5), by_ipo(1.5)),
        (simpo(), by_simpo(2.0, 1.0)),
        (simpo(0.7, 0.2), by_simpo(0.7, 0.2)),
        (bradley_terry(), by_bradley_terry),
        (bradley_terry(center_rewards_coefficient=0.3), by_centered),
    ],
    ids=lambda case: getattr(case, "__name__", None),
)
def test_pairs(loss, reference, make):
    compare_loss(loss, reference, make)


@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_orpo(weight):
    """Rows without a response have odds of their own in every implementation, so all have one here."""
    compare_loss(orpo(weight), by_orpo(weight), full_pairs)


def labelled(key):
    batch = tiny_batch(key)
    labels = torch.arange(len(batch)) % 3 != 0
    return batch.with_rows(label=labels.float(), reference_point=torch.full((len(batch),), 0.3))


@pytest.mark.parametrize(("good", "bad"), [(1.0, 1.0), (1.5, 0.5)])
def test_kto(good, bad):
    def reference(outputs, row):
        mask = row["response_mask"].bool()
        gain = (outputs.logprobs - row["ref_log_prob"])[mask].sum()
        point = row["reference_point"]
        if row["label"].item():
            return good - good / (1 + torch.exp(-0.4 * (gain - point)))
        return bad - bad / (1 + torch.exp(-0.4 * (point - gain)))

    compare_loss(kto(0.4, good, bad), reference, labelled)


def test_the_reference_point_is_a_mean_over_rows_with_a_response_and_not_negative():
    fields = {
        "response_mask": [[0.0, 1.0, 1.0], [0.0, 1.0], [0.0]],
        "old_log_probs": [[9.0, -1.0, -1.0], [9.0, -1.0], [9.0]],
        "ref_log_prob": [[0.0, -2.0, -2.5], [0.0, -1.5], [0.0]],
    }
    mismatched = Batch.from_rows([[1, 2, 3], [1, 2], [1]], fields)
    batch = Batch.from_rows([[1], [2]])
    assert kto_reference_point(batch, mismatched)["reference_point"].tolist() == [1.5, 1.5]
    swapped = mismatched.with_tokens(
        old_log_probs=mismatched["ref_log_prob"], ref_log_prob=mismatched["old_log_probs"]
    )
    assert kto_reference_point(batch, swapped)["reference_point"].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="no mismatched row has a response"):
        kto_reference_point(batch, mismatched.take([2]))


def test_where_the_policy_is_the_reference_dpo_is_log_two_and_pushes_by_half_of_beta():
    batch = full_pairs(Key.from_seed(3))
    logprobs = batch["ref_log_prob"].clone().requires_grad_()
    total, metrics = total_loss(dpo(0.2), TokenOutputs({"logprobs": logprobs}), batch)
    total.backward()
    assert total.item() == pytest.approx(math.log(2), rel=1e-6)
    pairs = len(batch["pair"].unique())
    sign = 2.0 * batch.spread(batch["chosen"]) - 1.0
    torch.testing.assert_close(logprobs.grad, -0.5 * 0.2 * sign * batch["response_mask"] / pairs)
    assert metrics["rewards/margins"].value == 0.0 and metrics["rewards/accuracies"].value == 0.0


@pytest.mark.parametrize("make", [dpo, simpo, orpo])
def test_the_metrics_are_means_over_pairs_and_over_their_rows(make):
    """The third pair has no response, and therefore no weight."""
    fields = {"response_mask": [[1.0]] * 4 + [[0.0]] * 2, "ref_log_prob": [[0.0]] * 6}
    rows = {"pair": [3, 3, 8, 8, 9, 9], "chosen": [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]}
    batch = aggregate_rows(Batch.from_rows([[1]] * 6, fields, rows), "group-mean", group="pair")
    outputs = TokenOutputs({"logprobs": torch.tensor([-4.0, -2.0, -3.0, -1.0, 0.0, 0.0])})
    values = {name: metric.value for name, metric in make(0.5)(outputs, batch)[1].items()}
    if make is dpo:
        assert values["dpo/loss"] == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(1))) / 2)
    assert {name: value for name, value in values.items() if name.startswith("rewards/")} == {
        "rewards/chosen": -1.25, "rewards/rejected": -1.25, "rewards/margins": 0.0, "rewards/accuracies": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("loss", [dpo(), cdpo(), ipo(), simpo(), orpo(), bradley_terry()])
@pytest.mark.parametrize("chosen", [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
def test_pairs_without_a_partner_are_named(loss, chosen):
    batch = Batch.from_rows(
        [[1]] * 3,
        {"response_mask": [[1.0]] * 3, "ref_log_prob": [[0.0]] * 3},
        {"pair": [4, 4, 7], "chosen": chosen, "row_weight": [0.5] * 3},
    )
    outputs = TokenOutputs({"logprobs": torch.zeros(3), "row_values": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"pair \[.*7\] of this batch do not have two rows"):
        loss(outputs, batch)


@pytest.mark.parametrize("loss", [dpo(), cdpo(), ipo(), simpo(), orpo(), bradley_terry()])
def test_two_pairs_with_one_number_are_refused(loss):
    batch = Batch.from_rows(
        [[1]] * 4,
        {"response_mask": [[1.0]] * 4, "ref_log_prob": [[0.0]] * 4},
        {"pair": [7] * 4, "chosen": [1.0, 0.0, 1.0, 0.0], "row_weight": [0.5] * 4},
    )
    outputs = TokenOutputs({"logprobs": torch.zeros(4), "row_values": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"pair \[7\] of this batch do not have two rows"):
        loss(outputs, batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpo(0.0), "beta is 0.0"),
        (lambda: kto(-1.0), "beta is -1.0"),
        (lambda: simpo(float("nan")), "beta is nan"),
        (lambda: cdpo(label_smoothing=0.5), "label_smoothing is 0.5"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
