"""Our estimators give verl's advantages and returns on random ragged batches."""

from functools import partial

import pytest
import torch
from padded import BATCHES, TOLERANCE, gap, index, pad, ragged, unpad

from verl_fn.steps import (
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    tir_optimal_token_baseline,
)

algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed: make test-peers")


class Table(dict):
    """A config that answers ``config.gamma`` and ``config.get("gamma")``."""

    __getattr__ = dict.__getitem__


def common(batch, *names):
    return {name: pad(batch, batch[name]) for name in ("token_level_rewards", "response_mask", *names)}


def by_group(function, rows, **options):
    return function(**common(rows), index=index(rows), **options)


def of_gdpo(batch):
    prompts = torch.zeros(len(batch), int(batch["prompt_length"].max()))
    response = pad(batch, torch.ones(batch.num_tokens))
    config = Table(gdpo_reward_keys=["style", "truth"], gdpo_reward_weights=[1.0, 0.5])
    keys = {name: batch[f"reward/{name}"].numpy() for name in ("style", "truth")}
    tensors = {"prompts": prompts, "attention_mask": torch.cat([torch.ones_like(prompts), response], 1).long()}
    return by_group(algos.compute_gdpo_outcome_advantage, batch, config=config, non_tensor_batch=keys, batch=tensors)


def of_token_baseline(function, batch, weights=False, **options):
    extra = {"rollout_is_weights": pad(batch, batch["rollout_is_weights"])} if weights else {}
    fields = common(batch, "old_log_probs", "sum_pi_squared")
    return function(**fields, index=index(batch), **extra, **options)


otb, tir = algos.compute_optimal_token_baseline_advantage, algos.compute_multi_turn_optimal_token_baseline_advantage
grpo_of, passk_of = algos.compute_grpo_outcome_advantage, algos.compute_grpo_passk_outcome_advantage
# Ours, verl's on the same batch, and how the batch is drawn.
ESTIMATORS = {
    "gae": (
        partial(gae, gamma=0.9, lam=0.8),
        lambda b: algos.compute_gae_advantage_return(**common(b, "values"), gamma=0.9, lam=0.8),
        {"rewards": "every"},
    ),
    "grpo": (grpo, partial(by_group, grpo_of), {"pairs": True}),
    "dr_grpo": (dr_grpo, partial(by_group, grpo_of, norm_adv_by_std_in_grpo=False), {"pairs": True}),
    "grpo_passk": (grpo_passk, partial(by_group, passk_of, config=Table()), {"pairs": True}),
    "rloo": (rloo, partial(by_group, algos.compute_rloo_outcome_advantage), {"pairs": True}),
    "opo": (opo, partial(by_group, algos.compute_opo_outcome_advantage), {"pairs": True}),
    "reinforce_plus_plus": (
        partial(reinforce_plus_plus, gamma=0.9),
        lambda b: algos.compute_reinforce_plus_plus_outcome_advantage(**common(b), config=Table(gamma=0.9)),
        {"rewards": "every"},
    ),
    "reinforce_plus_plus_baseline": (
        reinforce_plus_plus_baseline,
        partial(by_group, algos.compute_reinforce_plus_plus_baseline_outcome_advantage),
        {"pairs": True},
    ),
    "remax": (
        remax,
        lambda b: algos.compute_remax_outcome_advantage(**common(b), reward_baselines=b["reward_baselines"]),
        {"rewards": "every"},
    ),
    "gdpo": (partial(gdpo, reward_keys=["style", "truth"], reward_weights=[1.0, 0.5]), of_gdpo, {"pairs": True}),
    "optimal_token_baseline": (
        optimal_token_baseline,
        partial(of_token_baseline, otb),
        {"holes": False, "pairs": True},
    ),
    "optimal_token_baseline without a tail": (
        partial(optimal_token_baseline, handle_zero_tail=False),
        partial(of_token_baseline, otb, handle_zero_tail=False),
        {"rewards": "every", "pairs": True},
    ),
    "tir_optimal_token_baseline": (tir_optimal_token_baseline, partial(of_token_baseline, tir), {"pairs": True}),
    "tir_optimal_token_baseline with importance weights": (
        partial(tir_optimal_token_baseline, rollout_is_weights=True),
        partial(of_token_baseline, tir, weights=True),
        {"rewards": "every", "pairs": True},
    ),
}


def drawn(number, pairs=False, **options):
    """A batch.

    Args:
        pairs: leave out groups of one, whose advantage is 0 here and their reward in verl, and batches whose rewards
            are all equal: there verl's whitening divides a rounding error by itself, since its means divide by the
            number of tokens plus 1e-8.
    """
    batch = ragged(number, **options)
    if not pairs:
        return batch
    _, groups, counts = batch["group"].unique(return_inverse=True, return_counts=True)
    batch = batch.take(counts[groups] > 1)
    scores = batch.sum_rows(batch["token_level_rewards"])
    if not len(batch) or bool((scores == scores[0]).all()):
        return drawn(number + 10_000, pairs, **options)
    return batch


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_verls(name, measured):
    ours, theirs, options = ESTIMATORS[name]
    worst = {"advantages": 0.0, "returns": 0.0}
    for number in range(BATCHES):
        batch = drawn(number, **options)
        estimated = ours(batch)
        for field, table in zip(worst, theirs(batch), strict=True):
            difference = gap(estimated[field], unpad(batch, table), batch["response_mask"])
            worst[field] = max(worst[field], difference)
    measured.setdefault("estimators", {})[name] = worst
    assert max(worst.values()) < TOLERANCE


def test_gpg_differs_by_its_scale_alone(measured):
    """verl's alpha counts rows with a reward that is not 0; the paper's, rows of groups whose rewards differ."""
    worst, scales = 0.0, []
    for number in range(BATCHES):
        batch = drawn(number, pairs=True)
        theirs, _ = by_group(algos.compute_gpg_outcome_advantage, batch)
        scores = batch.sum_rows(batch["token_level_rewards"])
        ours = gpg(batch)["advantages"]
        plain = dr_grpo(batch)["advantages"]
        differ = batch.sum_rows((plain != 0).double()) > 0
        alpha, of_verl = len(batch) / max(int(differ.sum()), 1), len(batch) / max(int((scores != 0).sum()), 1)
        worst = max(worst, gap(ours / alpha, unpad(batch, theirs) / of_verl, batch["response_mask"]))
        scales.append(alpha / of_verl)
    measured.setdefault("estimators", {})["gpg, without its scale alpha"] = {"advantages": worst}
    measured.setdefault("named differences", {})["gpg: alpha over verl's"] = {"min": min(scales), "max": max(scales)}
    assert worst < TOLERANCE and min(scales) < 1.0 < max(scales)


def test_the_tail_begins_after_the_second_row_also_where_tools_speak(measured):
    """verl counts response tokens to find the end of the second-longest row, in a table that has tools' outputs."""
    differing = 0
    for number in range(BATCHES):
        batch = drawn(number, pairs=True)
        theirs, _ = of_token_baseline(otb, batch)
        ours = optimal_token_baseline(batch)["advantages"]
        differing += gap(ours, unpad(batch, theirs), batch["response_mask"]) > TOLERANCE
    share = differing / BATCHES
    measured.setdefault("named differences", {})["optimal_token_baseline: batches with another tail"] = {
        "share": share
    }
    assert 0.0 < share < 1.0
