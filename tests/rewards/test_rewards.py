"""Rewards: what a judge says of texts becomes fields of the batch."""

import warnings

import pytest
import torch

from verl_fn import build
from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.config.schema import RewardConfig
from verl_fn.data.examples import pack_examples
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError
from verl_fn.rewards.reward import Reward, RewardError, by_rules, prompt_texts, response_texts, texts_of
from verl_fn.state import Batch
from verl_fn.steps import reinforce_plus_plus

PROBLEM = Problem("abc>", "cba", id=3, data_source="reverse")


def responses(*texts, finished=None):
    tokenizer = char_tokenizer("abcdefgh>")
    prompt = [tokenizer.bos_token_id, *tokenizer.encode("abc>", add_special_tokens=False)]
    rows, masks = [], []
    for text in texts:
        answer = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append(prompt + answer)
        masks.append([0.0] * len(prompt) + [1.0] * len(answer))
    return Batch.from_rows(rows, {"response_mask": masks}, {"finished": finished or [1.0] * len(texts)}), tokenizer


def scored(*results, problems=(PROBLEM,)):
    """A batch whose rows a judge gives these results, with a score, acc and pred where they have none."""
    batch, tokenizer = responses(*["cba"] * len(results))
    usual = {"score": 1.0, "acc": 1.0, "pred": ""}
    return Reward(lambda answers: [usual | result for result in results], tokenizer)(batch, problems)


def test_a_function_with_verls_signature_is_not_taken_for_a_judge():
    def score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    with pytest.raises(ArgumentError, match=r"verl's signature; pass RewardFunctions\(\['FILE.py:NAME'\]\)"):
        Reward(score, char_tokenizer("ab"))


def test_scores_sit_on_the_last_response_token():
    batch, tokenizer = responses("cba", "cbb", "c")
    found = Reward(by_rules, tokenizer)(batch, [PROBLEM])
    assert found["score"].tolist() == pytest.approx([1.0, 1 / 3, 1 / 6])
    assert found["acc"].tolist() == [1.0, 0.0, 0.0]
    for name in ("token_level_scores", "token_level_rewards"):
        rows = found.rows(name)
        assert [row.nonzero().flatten().tolist() for row in rows] == [[8], [8], [6]]
        assert [float(row.sum()) for row in rows] == pytest.approx([1.0, 1 / 3, 1 / 6])


def test_a_score_sits_on_the_last_token_that_the_model_drew_and_is_lost_without_one():
    batch, tokenizer = responses("cba", "cba")
    tool_last = batch["response_mask"].clone()
    tool_last[batch.cu_seqlens[1] - 2 : batch.cu_seqlens[1]] = 0.0
    judge = lambda answers: [{"score": 1.0, "acc": 1.0, "pred": ""}] * 2  # noqa: E731
    with warnings.catch_warnings(action="error"):
        found = Reward(judge, tokenizer)(batch.with_tokens(response_mask=tool_last), [PROBLEM])
    assert found.rows("token_level_rewards")[0].nonzero().flatten().tolist() == [6]
    assert reinforce_plus_plus(found, gamma=0.5)["returns"].sum() != 0
    no_token = torch.where(batch.row_ids == 0, 0.0, batch["response_mask"])
    with pytest.warns(UserWarning, match="1 of 2 responses have no token that the model drew"):
        Reward(judge, tokenizer)(batch.with_tokens(response_mask=no_token), [PROBLEM])


def test_the_judge_sees_texts_their_problems_and_which_did_not_end():
    other = Problem("de>", "ed", id=4)
    batch, tokenizer = responses("cba", "a", "ed", "b", finished=[1.0, 0.0, 1.0, 1.0])
    seen = []

    def judge(answers):
        seen.extend((a.problem.id, a.text, a.finished) for a in answers)
        return [{"score": 0.0, "acc": 0.0, "pred": ""}] * len(answers)

    Reward(judge, tokenizer)(batch, [PROBLEM, other])
    assert seen == [(3, "cba", True), (3, "a", False), (4, "ed", True), (4, "b", True)]


def test_equal_predictions_have_equal_numbers_in_every_process():
    pred = scored({"pred": "42"}, {"pred": "43"}, {"pred": "42"}, {"pred": ""})["pred"]
    assert pred.dtype == torch.int64
    # From: b2sum -l 64 of "42", as a signed number.
    assert (
        pred.tolist()[0] == pred.tolist()[2] == int.from_bytes(bytes.fromhex("57b43cf02666687a"), "big", signed=True)
    )
    assert len(set(pred.tolist())) == 3


def test_other_numbers_become_metrics_of_rows():
    found = scored({"length": 3.0, "f/format": 0.5}, {"length": 4.0, "f/format": 1.0})
    assert found["reward/length"].tolist() == [3.0, 4.0]
    assert found["reward/f/format"].tolist() == [0.5, 1.0]
    assert found.take([1])["reward/length"].tolist() == [4.0]


def test_a_number_that_a_row_lacks_is_missing_there():
    found = scored({"length": 3.0}, {})
    assert found["reward/length"].isnan().tolist() == [False, True]


def test_a_score_beside_which_the_others_vanish_is_named():
    with pytest.warns(UserWarning, match=r"problem 3 of 'reverse', response 'c.*' is 1e\+29, and half of the others"):
        scored({"score": 1.0}, {"score": 1e29}, {"score": 0.0})
    with warnings.catch_warnings(action="error"):
        scored({"score": 1e7}, {"score": -3e9}, {"score": 2e8})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e31])
@pytest.mark.parametrize("name", ["score", "acc", "length"])
def test_numbers_that_are_not_finite_name_the_row(name, value):
    usual = {"length": 0.0}
    with pytest.raises(RewardError, match=rf"problem 3 of 'reverse', response 'cba' has .* as '{name}'"):
        scored(usual, usual | {name: value})


def test_examples_teach_answer_and_end():
    tokenizer = char_tokenizer("abc>")
    batch = pack_examples([Problem("ab>", "ba")], tokenizer, tokenizer.eos_token_id)
    assert batch["response_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.tokens[-1] == tokenizer.eos_token_id
    assert response_texts(batch, tokenizer) == ["ba"]


def test_a_config_without_functions_takes_the_rules(tiny):
    batch, _ = responses("cba", "ab")
    reward = build.reward(RewardConfig(), tiny)
    assert reward(batch, [PROBLEM])["acc"].tolist() == [1.0, 0.0]


def test_a_config_with_functions_takes_those_of_the_current_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def length(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    )
    batch, _ = responses("cba", "ab")
    table = RewardConfig(functions=("mine.py:length",), weights=(0.5,), env=("HOME",))
    assert build.reward(table, tiny)(batch, [PROBLEM])["score"].tolist() == [1.5, 1.0]


def test_problems_may_have_different_numbers_of_rows(tiny):
    tokenizer = char_tokenizer("abcdefgh>")
    tokens = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in ("ab", "ba", "cd")]
    batch = Batch.from_rows(
        tokens, {"response_mask": [[1.0] * 3] * 3}, {"group": [5, 3, 5], "finished": [1.0, 1.0, 0.0]}
    )
    problems = [Problem("x", "ab", id=3), Problem("y", "ab", id=5)]

    def judge(answers):
        return [
            {"score": float(a.problem.id), "acc": float(a.text == a.problem.answer), "pred": a.text} for a in answers
        ]

    scored = Reward(judge, tokenizer)(batch, problems)
    assert scored["score"].tolist() == [5.0, 3.0, 5.0] and scored["acc"].tolist() == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"rows of the batch are of problems \[5\]"):
        Reward(judge, tokenizer)(batch, problems[:1])
    with pytest.raises(ValueError, match="two of the problems of one batch have the same id"):
        Reward(judge, tokenizer)(batch, [*problems, problems[0]])


def test_texts_keep_special_tokens_that_do_not_end_an_answer():
    """A reward that looks for a special <think> finds it."""
    tokenizer = char_tokenizer("ab")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    think, close = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    pad = tokenizer.pad_token_id

    def texts(*responses, ends=()):
        return texts_of([torch.tensor(tokens, dtype=torch.int64) for tokens in responses], tokenizer, ends)

    answers = [think, 4, close, 5, 2, pad], [think, 4], [], [pad, pad]
    assert texts(*answers, ends=[2]) == ["<think>a</think>b", "<think>a", "", ""]
    # Any of the model's end tokens ends an answer, and the tokenizer's own if none is named.
    assert texts([4, close], [5, 2], ends=[2, close]) == ["a", "b"]
    assert texts([4, close, 2]) == ["a</think>"]


def test_the_text_that_the_model_read():
    tokenizer = char_tokenizer("ab")
    rows = [[1, 4, 5], [1, 4], [4, *[3] * 5, 4, 4], [*[5] * 6, 4], [*[3] * 3, 4]]
    mask = [[0, 0, 1], [0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1]]
    batch = Batch.from_rows(rows, {"response_mask": mask})
    assert prompt_texts(batch, tokenizer) == ["<bos>a", "<bos>a", "a<unk> (5 times)a", "bbbbbb", "<unk><unk><unk>"]
