"""Tasks: problems from keys, held-out problems apart, rewards by string code."""

import pytest

from verl_fn.models import char_tokenizer
from verl_fn.rewards import Reward, RewardError, encode_prompts, pack_examples, response_texts
from verl_fn.state import Batch, Key
from verl_fn.tasks import TASKS, Problem, Task


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda t: t.name)
def test_problems_are_functions_of_key_and_number(task):
    key = Key.from_seed(3)
    assert task.train(key, 5, 10) == task.train(key, 0, 15)[5:]
    assert task.train(key, 0, 10) != task.train(Key.from_seed(4), 0, 10)
    assert [p.id for p in task.train(key, 7, 3)] == [7, 8, 9]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda t: t.name)
def test_held_out_problems_are_never_trained_on(task):
    held_out = {p.prompt for p in task.held_out(512)}
    assert len(held_out) >= 20
    trained = {p.prompt for seed in range(2) for p in task.train(Key.from_seed(seed), 0, 2000)}
    assert not held_out & trained


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda t: t.name)
def test_answers_are_right_and_fit(task):
    for p in task.train(Key.from_seed(0), 0, 300):
        assert task.score(p, p.answer) == 1.0
        assert task.score(p, p.answer + "a") < 1.0
        assert task.score(p, "") < 1.0
        assert set(p.prompt + p.answer) <= set(task.alphabet)
        assert len(p.prompt) <= task.max_prompt
        assert len(p.answer) <= task.max_answer


def test_countdown_takes_any_right_expression():
    score = TASKS["countdown"].score
    problem = Problem("2,3,6>", "2*3")
    assert [score(problem, t) for t in ("3*2", "2+3", "2*4", "2**3", "6", "__import__")] == [
        1.0,
        0.1,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


def responses(texts, finished=None):
    tokenizer = char_tokenizer(TASKS["reverse"].alphabet)
    prompt = encode_prompts([Problem("abc>", "cba")], tokenizer)[0]
    rows, masks = [], []
    for text in texts:
        answer = [*tokenizer.encode(text), tokenizer.eos_token_id]
        rows.append(prompt + answer)
        masks.append([0.0] * len(prompt) + [1.0] * len(answer))
    fields = {"finished": finished or [1.0] * len(texts)}
    return Batch.from_rows(rows, {"response_mask": masks}, fields), tokenizer


def test_scores_sit_on_the_last_response_token():
    batch, tokenizer = responses(["cba", "cbb"])
    scored = Reward(TASKS["reverse"], tokenizer)(batch, [Problem("abc>", "cba")])
    assert scored["score"].tolist() == pytest.approx([1.0, 0.5 * 2 / 3])
    assert scored["acc"].tolist() == [1.0, 0.0]
    assert [row.nonzero().flatten().tolist() for row in scored.rows("token_level_scores")] == [[8], [8]]
    assert response_texts(batch, tokenizer) == ["cba", "cbb"]


def test_a_response_that_did_not_end_gets_nothing():
    batch, tokenizer = responses(["cba", "cba"], finished=[1.0, 0.0])
    assert Reward(TASKS["reverse"], tokenizer)(batch, [Problem("abc>", "cba")])["score"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("result", [ZeroDivisionError("oops"), float("nan"), float("inf"), "much"])
def test_a_reward_that_fails_names_row_and_text(result):
    def score(problem, text):
        if text == "ba":
            if isinstance(result, Exception):
                raise result
            return result
        return 1.0

    task = Task("mine", "abcdefgh>", None, score, 9, 8)
    batch, tokenizer = responses(["cba", "ba"])
    with pytest.raises(RewardError, match=r"'mine'.* row 1, 'ba'"):
        Reward(task, tokenizer)(batch, [Problem("abc>", "cba")])


def test_unknown_characters_in_a_prompt_are_refused():
    with pytest.raises(ValueError, match=r"every character of the prompt 'xyz>'"):
        encode_prompts([Problem("xyz>", "")], char_tokenizer("abc>"))


def test_examples_teach_answer_and_end():
    tokenizer = char_tokenizer("abc>")
    batch = pack_examples([Problem("ab>", "ba")], tokenizer)
    assert batch["response_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.tokens[-1] == tokenizer.eos_token_id
    assert batch.tokens[0] == tokenizer.bos_token_id
