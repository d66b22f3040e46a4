"""Conversations of several rows count once, whatever an algorithm, a filter or a metric does with them."""

import math

import pytest
import torch

from verl_fn.algorithms.experience import batch_report, explained_variance
from verl_fn.algorithms.imitation import best_of_groups, mean_score
from verl_fn.algorithms.policy import whole_conversations
from verl_fn.algorithms.policy_optimization import joined, split_by_signal
from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.data.tasks import Problem
from verl_fn.runs.evaluate import evaluation_of
from verl_fn.state import Batch
from verl_fn.steps import grpo, penalize_overlong


def batch_of(**rows) -> Batch:
    """Problem 3 has two conversations: 0 fails in one row, 1 is right in three. Problem 8 has one, without a reply.

    The rows of a conversation have its score, and their prompts and replies differ.
    """
    tokens = [[4, 9], [4, 5], [4, 5, 6, 6], [4, 5, 6, 6, 7], [4, 4]]
    masks = [[0.0, 1.0], [0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0] * 4 + [1.0], [0.0, 0.0]]
    fields = {"group": [3, 3, 3, 3, 8], "conversation": [0, 1, 1, 1, 0], "score": [0.0, 1.0, 1.0, 1.0, 5.0]}
    fields |= {"finished": [0.0, 1.0, 1.0, 1.0, 1.0], "near_ties": [0, 1, 2, 0, 0], "prompt_length": [1, 1, 2, 4, 2]}
    batch = Batch.from_rows(tokens, {"response_mask": masks}, fields | {"acc": [0.0, 1.0, 1.0, 1.0, 1.0]})
    last = batch.spread(batch["score"]) * torch.tensor([0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0.0])
    zero = torch.zeros(batch.num_tokens)
    names = ("entropys", "advantages", "returns", "old_log_probs", "rollout_log_probs")
    batch = batch.with_tokens(token_level_scores=last, token_level_rewards=last, **dict.fromkeys(names, zero))
    return batch.with_rows(**rows)


def test_metrics_of_rows_are_those_of_conversations_with_a_response():
    batch = batch_of(**{"reward/calls": [0.0, 3.0, 3.0, 3.0, 9.0]})
    penalty = torch.zeros(batch.num_tokens)
    penalty[[3, 6]] = 0.25  # on two rows of the second conversation
    report = batch_report(
        batch.with_tokens(token_level_rewards=batch["token_level_rewards"] - penalty), compares=True
    )
    expected = {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/rewards/mean": 0.25,
        "critic/rewards/max": 0.5,
        "training/acc": 0.5,
        "reward/calls/mean": 1.5,
        "response_length/mean": 5 / 3,
        "response_length/max": 4.0,
        "response_length/clip_ratio": 1 / 3,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 4 / 3,
        "training/rollout_near_ties": 1.0,
        "rollout/rows_compared_with_none": 0.0,
    }
    assert {name: report[name] for name in expected} == pytest.approx(expected)
    assert "reward/calls/count" not in report and "training/acc/count" not in report
    assert "rollout/rows_compared_with_none" not in batch_report(batch)


def test_a_conversation_that_is_left_by_itself_is_counted():
    rest = batch_of().take([1, 2, 3, 4])
    assert not grpo(whole_conversations(rest))["advantages"].any()
    assert batch_report(rest, compares=True)["rollout/rows_compared_with_none"] == 1.0


def test_missing_numbers_are_left_out_of_means_and_counted():
    nan = math.nan
    report = batch_report(batch_of(acc=[nan, 1.0, 1.0, 1.0, nan], **{"reward/calls": [2.0, *[nan] * 4]}))
    assert (report["training/acc"], report["training/acc/count"]) == (1.0, 1.0)
    assert (report["reward/calls/mean"], report["reward/calls/count"]) == (2.0, 1.0)
    report = batch_report(batch_of(**{"reward/calls": [nan] * 5}))
    assert "reward/calls/mean" not in report and report["reward/calls/count"] == 0.0


def test_all_rows_of_the_best_conversation_are_learned_from():
    batch = batch_of()
    best = best_of_groups(batch)
    assert [row.tolist() for row in best.rows()] == [[4, 5], [4, 5, 6, 6], [4, 5, 6, 6, 7]]
    assert mean_score(best) == 1.0 and mean_score(batch.take([0, 1, 2, 3])) == 0.5
    assert len(best_of_groups(batch, 2.0)) == 0
    silent = batch.with_tokens(response_mask=torch.where(torch.arange(15) < 2, batch["response_mask"], 0.0))
    assert [row.tolist() for row in best_of_groups(silent).rows()] == [[4, 9]]


def test_a_filter_of_groups_asks_rows_with_a_response_that_have_the_number():
    batch = batch_of()
    assert [len(part) for part in split_by_signal(batch)[:2]] == [4, 1] and split_by_signal(batch)[2] == 1
    quiet = batch.with_tokens(response_mask=torch.where(torch.arange(15) < 2, 0.0, batch["response_mask"]))
    assert split_by_signal(quiet)[2] == 0
    for other, groups in ((1.0, 0), (0.0, 1)):
        assert split_by_signal(batch_of(acc=[math.nan, 1.0, 1.0, other, 0.0]), "acc")[2] == groups


def test_batches_with_other_numbers_of_a_reward_make_one():
    batch = batch_of()
    whole = joined(batch.with_rows(**{"reward/a": [1.0] * 5}), batch.with_rows(**{"reward/b": [2.0] * 5}))
    assert whole["reward/a"].isnan().sum() == whole["reward/b"].isnan().sum() == 5


def test_the_penalty_on_long_responses_sees_the_whole_conversation_once():
    batch = penalize_overlong(batch_of(), 5, 2, 4.0)
    assert batch["reward/overlong"].tolist() == [0.0, -2.0, -2.0, -2.0, 0.0]
    rewards = whole_conversations(batch)["token_level_rewards"]
    assert rewards[2:13].tolist() == [0.0] * 10 + [-1.0] and rewards.sum() == -1.0


def test_an_answer_of_several_rows_is_shown_whole():
    tokenizer = char_tokenizer("abcdef")
    batch = batch_of(pred=[1, 2, 2, 2, 3]).take([1, 2, 3])
    _, (row,) = evaluation_of(batch, [Problem("a", "b", id=3)], tokenizer, [])
    assert row["response"] == "\n".join(tokenizer.decode(part) for part in ([5], [6, 6], [7])) and row["score"] == 1.0
    first = next(iter(batch.rows())).tolist()
    assert row["input"] == tokenizer.decode(first[: first.index(5)]) != ""


def test_a_constant_offset_of_the_values_is_explained():
    returns = torch.tensor([1.0, 2.0, 5.0, 7.0])
    assert explained_variance(returns + 3.0, returns, torch.ones(4)) == 1.0


def test_the_explained_variance_of_equal_returns_is_0_in_every_size():
    for value in (1000.1, 10000.1, 1e29):
        returns = torch.full((7,), value)
        assert explained_variance(torch.arange(7.0), returns, torch.ones(7)) == 0.0
    assert explained_variance(torch.tensor([1e6, 1e6 + 2]), torch.tensor([1e6, 1e6 + 1]), torch.ones(2)) == 0.0
