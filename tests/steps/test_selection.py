"""Tokens that are selected over the whole update batch: which they are, and that neither order nor splits matter."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_builders import MODEST, MULTI_TURN, SEEDS, flat, pack, ragged, rows_of

from verl_fn.state import Key, TokenOutputs, split_by_count
from verl_fn.steps import kl_cov, ppo_clip, select_clip_cov, select_high_entropy, select_kl_cov, total_loss

FIELDS = ("old_log_probs", "advantages", "logprobs", "entropy", "loss_weight")
WIDE = {"clip_cov_lb": 0.2, "clip_cov_ub": 1.0}


def covariances(masks, fields):
    advantages, logprobs = flat(masks, fields["advantages"]), flat(masks, fields["logprobs"])
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean()) if len(advantages) else advantages


def selected(masks, batch, name="cov_selected"):
    assert not batch[name][batch["response_mask"] == 0].any()
    return flat(masks, rows_of(batch, name)).astype(bool)


@ragged
def test_kl_cov_takes_the_largest(masks, seed):
    batch, fields = pack(masks, seed, *FIELDS)
    found = selected(masks, select_kl_cov(batch, torch.tensor(np.concatenate(fields["logprobs"])), kl_cov_ratio=0.4))
    values = covariances(masks, fields)
    count = max(1, int(0.4 * len(values)))
    # The covariances of two tokens are equal, and then both are selected unless rounding tells them apart.
    lowest = np.sort(values)[-count:][:1]
    assert (found >= (values > lowest + 1e-12)).all() and (found <= (values > lowest - 1e-12)).all()
    assert found.sum() >= min(count, len(values))


@ragged
def test_clip_cov_draws_among_the_candidates(masks, seed):
    batch, fields = pack(masks, seed, *FIELDS)
    logprobs = torch.tensor(np.concatenate(fields["logprobs"]))
    old, advantages = flat(masks, fields["old_log_probs"]), flat(masks, fields["advantages"])
    ratio = np.exp(flat(masks, fields["logprobs"]) - old)
    values = covariances(masks, fields)
    clipped = np.where(advantages > 0, ratio > 1.2, ratio < 0.8)
    candidates = (values > 0.2) & (values < 1.0) & ~clipped
    everything = select_clip_cov(batch, logprobs, Key.from_seed(0), clip_cov_ratio=1.0, **WIDE)
    assert selected(masks, everything).tolist() == candidates.tolist()
    few = selected(masks, select_clip_cov(batch, logprobs, Key.from_seed(seed), clip_cov_ratio=0.2, **WIDE))
    assert few.sum() == min(max(1, int(0.2 * len(values))), candidates.sum())
    assert not (few & ~candidates).any()


def test_a_share_is_one_of_the_response_tokens():
    """It is a share neither of the candidates, nor of the tokens with the prompts, nor of each row."""
    masks = [[0] * 30 + [1] * 25, [1] * 7, [0] * 4 + [1] * 18]
    batch, _ = pack(masks, 3, *FIELDS)
    logprobs, entropy = batch["logprobs"], batch["entropy"]
    draw = functools.partial(select_clip_cov, batch, logprobs, clip_cov_lb=0.1, clip_cov_ub=9.0)
    assert 6 < draw(Key.from_seed(0), clip_cov_ratio=1.0)["cov_selected"].sum() < 25
    for share, count in ((0.12, 6), (0.0002, 1), (0.118, 5)):
        for found in (
            draw(Key.from_seed(1), clip_cov_ratio=share)["cov_selected"],
            select_kl_cov(batch, logprobs, kl_cov_ratio=share)["cov_selected"],
            select_high_entropy(batch, entropy, top_entropy_quantile=share)["high_entropy"],
        ):
            assert found.sum() == count and found[batch["response_mask"] == 0].sum() == 0


@ragged
def test_high_entropy_keeps_the_advantages_of_the_uncertain_tokens(masks, seed):
    batch, fields = pack(masks, seed, *FIELDS)
    after = select_high_entropy(batch, torch.tensor(np.concatenate(fields["entropy"])), top_entropy_quantile=0.5)
    entropy, advantages = flat(masks, fields["entropy"]), flat(masks, fields["advantages"])
    count = max(1, int(0.5 * len(entropy)))
    kept = np.isin(np.arange(len(entropy)), np.argsort(-entropy)[:count])
    assert selected(masks, after, "high_entropy").tolist() == kept.tolist()
    np.testing.assert_array_equal(flat(masks, rows_of(after, "advantages")), np.where(kept, advantages, 0.0))


SELECTIONS = {
    "clip_cov": lambda b: select_clip_cov(b, b["logprobs"], Key.from_seed(1), clip_cov_ratio=0.2, **WIDE),
    "kl_cov": lambda b: select_kl_cov(b, b["logprobs"], kl_cov_ratio=0.2),
    "high_entropy": lambda b: select_high_entropy(b, b["entropy"]),
}


@pytest.mark.parametrize("name", SELECTIONS)
@given(seed=SEEDS, data=st.data())
@MODEST
def test_the_order_of_rows_does_not_matter(name, seed, data):
    batch, _ = pack(MULTI_TURN, seed, *FIELDS)
    order = data.draw(st.permutations(range(len(MULTI_TURN))))
    field = "high_entropy" if name == "high_entropy" else "cov_selected"
    select = SELECTIONS[name]
    assert select(batch.take(order))[field].tolist() == select(batch).take(order)[field].tolist()


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_prompts_hold_does_not_matter(name):
    batch, _ = pack(MULTI_TURN, 2, *FIELDS)
    hole = batch["response_mask"] == 0
    other = batch.with_tokens(**{n: torch.where(hole, torch.nan, batch[n]) for n in FIELDS})
    field = "high_entropy" if name == "high_entropy" else "cov_selected"
    assert SELECTIONS[name](other)[field].tolist() == SELECTIONS[name](batch)[field].tolist()


def test_another_key_draws_other_tokens():
    batch, _ = pack([[1] * 40], 0, *FIELDS)
    drawn = {
        tuple(select_clip_cov(batch, batch["old_log_probs"], Key.from_seed(seed), **WIDE)["cov_selected"].tolist())
        for seed in range(8)
    }
    assert len(drawn) > 1


def test_equal_values_are_selected_together():
    batch, _ = pack([[1] * 5], 0, *FIELDS)
    flat_batch = select_high_entropy(batch, torch.tensor([1.0, 2.0, 2.0, 2.0, 0.5]), top_entropy_quantile=0.2)
    assert flat_batch["high_entropy"].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gradients_do_not_depend_on_the_split(rows):
    """Selecting before the split, as against verl's selection in each micro-batch."""
    batch, _ = pack(MULTI_TURN, 4, *FIELDS)
    batch = select_high_entropy(select_kl_cov(batch, batch["logprobs"], kl_cov_ratio=0.3), batch["entropy"])
    loss = ppo_clip() + kl_cov(0.5)

    def gradient(part):
        leaf = part["logprobs"].clone().requires_grad_()
        return torch.autograd.grad(total_loss(loss, TokenOutputs({"logprobs": leaf}), part)[0], leaf)[0]

    parts = [gradient(part) for part in split_by_count(batch, rows)]
    assert torch.cat(parts).tolist() == pytest.approx(gradient(batch).tolist())


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_outside_0_to_1_is_refused(share):
    batch, _ = pack([[1]], 0, *FIELDS)
    with pytest.raises(ValueError, match=f"top_entropy_quantile is {share}; it must be above 0 and at most 1"):
        select_high_entropy(batch, batch["entropy"], top_entropy_quantile=share)
