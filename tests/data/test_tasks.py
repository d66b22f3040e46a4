"""Tasks: problems from keys, held-out problems apart, rewards by string code."""

import itertools

import pytest

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.data.files import FileData, describe_unknown, encode_prompts, prompt_lengths
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import HELD_OUT, TASKS, Problem, content_of, is_held_out, text_of
from verl_fn.state import Key


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


def test_the_search_for_held_out_problems_ends_when_nothing_new_is_found():
    task = TASKS["guess_number"]
    prompts = {f"{''.join(letters)}>" for letters in itertools.product("abcdefg", repeat=4)}
    found, all_of_them = {p.prompt for p in task.held_out(10**6)}, set(filter(is_held_out, prompts))
    assert found <= all_of_them and len(found) >= len(all_of_them) - 1
    assert [len(TASKS["reverse"].held_out(count)) for count in (0, 3, None)] == [0, 3, HELD_OUT]


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


def test_unknown_characters_in_a_prompt_are_refused():
    with pytest.raises(ValueError, match=r"every character of the prompt 'xyz>': it lacks 'x', 'y', 'z'$"):
        encode_prompts([Problem("xyz>", "")], char_tokenizer("abc>"))


def test_characters_of_messages_are_named():
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    said = describe_unknown("prompt", [{"role": "user", "content": "axb"}, called], char_tokenizer("abc"))
    assert said.endswith(": it lacks 'x'")


def test_a_prompt_without_a_token_is_refused():
    tokenizer = char_tokenizer("abc")
    assert encode_prompts([Problem("", "")], tokenizer) == [[tokenizer.bos_token_id]]
    tokenizer.bos_token = None
    for problems in ([Problem("", "", id=3, data_source="mine")], [Problem("a", ""), Problem("", "")]):
        for encode in (encode_prompts, prompt_lengths):
            with pytest.raises(DataError, match=r"problem [03] of .*: the tokenizer makes no token of the prompt ''"):
                encode(problems, tokenizer)


def test_as_many_held_out_problems_of_files_as_are_asked_for():
    problems = tuple(Problem(letter, "", id=i) for i, letter in enumerate("abc"))
    data = FileData((), problems, True, 1)
    assert [len(data.held_out(count)) for count in (0, 2, 9, None)] == [0, 2, 3, 3]


def test_people_see_content_and_calls():
    called = {"role": "assistant", "content": "Let me add.", "tool_calls": [{"name": "add"}]}
    assert content_of(called) == "Let me add.\n[{'name': 'add'}]"
    said = ({"role": "user", "content": "2+2?"}, called)
    assert text_of(said) == "user: 2+2?\nassistant: Let me add.\n[{'name': 'add'}]"


def test_what_follows_an_answer_costs():
    task = TASKS["reverse"]
    problem = Problem("abc>", "cba")
    assert [task.score(problem, said) for said in ("cba", "cbab", "cb")] == [1.0, 0.5 * 3 / 4, 0.5 * 2 / 3]
