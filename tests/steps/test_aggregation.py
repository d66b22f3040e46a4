"""The weights written by aggregate give each mode's loss, and the parts of any split add up to it."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from step_builders import MODEST, MULTI_TURN, chosen, pack, ragged

from verl_fn.errors import ArgumentError
from verl_fn.state import Batch, split_by_count, split_by_tokens, tree
from verl_fn.steps import aggregate, aggregate_rows

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def weigh(batch, mode, scale=6.0):
    return aggregate(batch, mode, loss_scale_factor=scale if mode == "seq-mean-token-sum-norm" else None)


def loss_of(batch):
    return float((batch["loss_weight"].double() * batch["loss"]).sum())


def by_hand(mode, rows, scale=6.0):
    """The modes over rows of per-token losses; rows without a token are not rows."""
    rows = [row for row in rows if len(row)]
    sums, lengths = [row.sum() for row in rows], [len(row) for row in rows]
    if mode == "token-mean":
        return sum(sums) / sum(lengths)
    if mode == "token-sum":
        return sum(sums)
    if mode == "seq-mean-token-sum":
        return np.mean(sums)
    if mode == "seq-mean-token-sum-norm":
        return np.mean(sums) / scale
    if mode == "seq-mean-token-mean":
        return np.mean([row.mean() for row in rows])
    return np.mean([row[-1] for row in rows])


@pytest.mark.parametrize("mode", MODES)
@ragged
def test_each_mode_is_its_definition(mode, masks, seed):
    assume(any(map(any, masks)))
    batch, fields = pack(masks, seed, "loss")
    weighted = weigh(batch, mode)
    assert loss_of(weighted) == pytest.approx(by_hand(mode, chosen(masks, fields["loss"])), rel=1e-5, abs=1e-6)
    assert not weighted["loss_weight"][weighted["response_mask"] == 0].any()


@pytest.mark.parametrize("scale", [1.0, 4.0, 1024.0])
@ragged
def test_the_scale_of_token_sum_norm_is_a_constant(scale, masks, seed):
    assume(any(map(any, masks)))
    batch, fields = pack(masks, seed, "loss")
    weighted = aggregate(batch, "seq-mean-token-sum-norm", loss_scale_factor=scale)
    expected = by_hand("seq-mean-token-sum-norm", chosen(masks, fields["loss"]), scale)
    assert loss_of(weighted) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@ragged
def test_rows_without_a_token_change_nothing(mode, masks, seed):
    assume(any(map(any, masks)))
    batch, _ = pack(masks, seed, "loss")
    some = batch.take([i for i, mask in enumerate(masks) if any(mask)])
    assert loss_of(weigh(batch, mode)) == pytest.approx(loss_of(weigh(some, mode)), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("mode", MODES)
@given(budget=st.integers(7, 20), seed=st.integers(0, 99))
@MODEST
def test_micro_batches_add_up_by_plain_summation(mode, budget, seed):
    """Weights are data of the whole batch, so any split into parts gives the same loss."""
    whole = weigh(pack(MULTI_TURN, seed, "loss")[0], mode)
    for split in (split_by_tokens(whole, budget), split_by_count(whole, budget % 4 + 1)):
        assert sum(loss_of(part) for part in split) == pytest.approx(loss_of(whole), rel=1e-6, abs=1e-7)


def test_the_weights_themselves():
    batch, _ = pack([[0, 1, 1], [0], [1, 0, 1, 1]], 0)
    expected = {
        "token-mean": [0, 0.2, 0.2, 0, 0.2, 0, 0.2, 0.2],
        "token-sum": [0, 1, 1, 0, 1, 0, 1, 1],
        "seq-mean-token-sum": [0, 0.5, 0.5, 0, 0.5, 0, 0.5, 0.5],
        "seq-mean-token-sum-norm": [0, 1 / 12, 1 / 12, 0, 1 / 12, 0, 1 / 12, 1 / 12],
        "seq-mean-token-mean": [0, 1 / 4, 1 / 4, 0, 1 / 6, 0, 1 / 6, 1 / 6],
    }
    for mode in MODES:
        weights = weigh(batch, mode)["loss_weight"]
        assert weights.dtype == torch.float32
        assert weights.tolist() == pytest.approx(expected[mode], rel=1e-6)


@given(groups=st.lists(st.integers(-2, 2), min_size=5, max_size=5))
@MODEST
def test_the_weights_of_rows(groups):
    """Rows without a response have no weight, and groups without such rows are not counted."""
    batch, _ = pack(MULTI_TURN, 0, pair=groups)
    live = [any(mask) for mask in MULTI_TURN]
    by_group = {g: [row for row in range(5) if live[row] and groups[row] == g] for g in groups}
    counted = [rows for rows in by_group.values() if rows]
    expected = {
        "row-mean": [row / sum(live) for row in live],
        "row-sum": [float(row) for row in live],
        "group-mean": [1 / (len(counted) * len(by_group[groups[row]])) if live[row] else 0.0 for row in range(5)],
    }
    for mode, weights in expected.items():
        weighted = aggregate_rows(batch, mode, group="pair")["row_weight"]
        assert weighted.dtype == torch.float32
        assert weighted.tolist() == pytest.approx(weights, rel=1e-6)


def test_rows_of_a_batch_without_responses_all_count():
    batch = Batch.from_rows([[1], [2]])
    assert aggregate_rows(batch)["row_weight"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="row-mean, row-sum, group-mean"):
        aggregate_rows(batch, "mean")
    with pytest.raises(ValueError, match="group-mean needs group"):
        aggregate_rows(batch, "group-mean")


def test_token_mean_is_the_default():
    batch, _ = pack(MULTI_TURN, 0)
    assert tree.equal(aggregate(batch), aggregate(batch, "token-mean"))


def test_bool_and_integer_masks_do_as_well():
    batch, _ = pack(MULTI_TURN, 0)
    for dtype in (torch.bool, torch.int64):
        other = batch.with_tokens(response_mask=batch["response_mask"].to(dtype))
        for mode in MODES:
            assert torch.equal(weigh(other, mode)["loss_weight"], weigh(batch, mode)["loss_weight"])


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_with_nothing_to_learn_from_is_refused(mode):
    with pytest.raises(ValueError, match="nothing to learn from"):
        weigh(pack([[0, 0], [0]], 0)[0], mode)


def test_token_sum_norm_needs_its_scale():
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        aggregate(pack(MULTI_TURN, 0)[0], "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda weight: weight[:-1],
            r"returns \(8,\); it must return a tensor with a finite weight for each",
        ),
        (lambda weight: weight[:, None], r"returns \(9, 1\); it must"),
        (lambda weight: weight.tolist(), "returns list; it must"),
        (lambda weight: weight / 0.0, "returns inf or nan; it must"),
    ],
)
def test_a_function_that_returns_no_weights_is_refused(returned, message):
    batch = pack([[1, 0, 1], [0, 1, 1], [1, 1, 1]], 0)[0]
    assert aggregate(batch, lambda batch: batch["response_mask"].bool())["loss_weight"].dtype == torch.float32
    with pytest.raises(ArgumentError, match=f"a function of loss_agg_mode, {message}"):
        aggregate(batch, lambda batch: returned(batch["response_mask"].float()))


@pytest.mark.parametrize("mode", ["mean", ["mean"]])
def test_an_unknown_mode_is_refused_with_the_known_ones(mode):
    with pytest.raises(ValueError, match=r"unknown loss_agg_mode .*mean.*; it is one of token-mean, token-sum"):
        aggregate(pack(MULTI_TURN, 0)[0], mode)


def test_the_batch_passed_in_is_unchanged():
    batch, _ = pack(MULTI_TURN, 0)
    before = tree.digest(batch)
    aggregate(batch)
    aggregate_rows(batch)
    assert tree.digest(batch) == before and "loss_weight" not in batch and "row_weight" not in batch
