"""The check of rewards passes good functions, and names the law that each kind of mistake breaks."""

import subprocess

import pytest

from verl_fn import scores, user_files
from verl_fn.testing import LawViolation, check_reward

FUNCTIONS = """
import os, random, time
import numpy as np

calls = 0
WORDS = "data_source, solution_str, ground_truth, extra_info=None"

def good(data_source, solution_str, ground_truth, extra_info=None, bonus=1.0):
    right = bonus * (solution_str.strip() == ground_truth)
    return {"score": right, "acc": right > 0, "length": len(solution_str), "note": "x",
            "words": len(solution_str.split()) if solution_str else None, "draw": random.random() + np.random.rand()}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str == ground_truth

def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(a == b) for a, b in zip(solution_strs, ground_truths)]

def source(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"level": 2}
    return solution_str == ground_truth

def counts(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    return calls

def of_process(data_source, solution_str, ground_truth, extra_info=None):
    return os.getpid()

def reads_number(data_source, solution_str, ground_truth, extra_info=None):
    return float(int(solution_str) == 5) if solution_str.isdigit() else 0.0

def reads_digits(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(int(c) for c in solution_str if c.isdigit()) == 5)

def divides(data_source, solution_str, ground_truth, extra_info=None):
    return (solution_str == ground_truth) / len(solution_str)

def last(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[len(solution_str) - 1] == ground_truth)

def early(data_source, solution_str, ground_truth, extra_info=None):
    if not solution_str:
        return 0.0
    return {"score": solution_str == ground_truth, "length": len(solution_str)}

def some_accuracy(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "acc": 1.0 if solution_str else None}

def other_kind(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "length": len(solution_str) or "none"}

def late_kind(data_source, solution_str, ground_truth, extra_info=None):
    length = {"5": None, "": "none"}.get(solution_str, len(solution_str))
    return {"score": solution_str == ground_truth, "length": length}

def notes(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "note": solution_str or [1, 2]}

def reads_json(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == str(__import__("json").loads(ground_truth)))

def upside_down(data_source, solution_str, ground_truth, extra_info=None):
    return -float(solution_str == ground_truth)

def text(data_source, solution_str, ground_truth, extra_info=None):
    return "1.0"

def infinite(data_source, solution_str, ground_truth, extra_info=None):
    return float("inf")

def of_two(solution_str, ground_truth):
    return 1.0

def makes():
    def inner(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0
    return inner
"""
CASES = [{"ground_truth": "5", "right": "5", "wrong": "6"}, {"ground_truth": "7"}]
BROKEN = {
    "Signature": ["text", "infinite", "of_two"],
    "Answers": ["reads_digits", "divides", "last"],
    "Keys": ["early", "other_kind", "late_kind"],
    "Repetition": ["counts", "of_process"],
    "Order": ["upside_down"],
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(FUNCTIONS)
    return user_files.load(file)


def test_good_functions_pass(mine):
    for name in ("good", "later", "batched", "reads_number", "some_accuracy", "notes", "reads_json"):
        check_reward(getattr(mine, name), CASES)
    check_reward(mine.source, [{"ground_truth": 5, "right": "5", "data_source": "sums", "extra_info": {"level": 2}}])
    check_reward(scores.exact, CASES)


def test_a_case_without_what_the_function_reads_is_a_probable_cause(mine):
    case = {"ground_truth": "5", "data_source": "sums"}
    without = "a case without the extra_info that the function reads"
    for more, named in (({}, True), ({"extra_info": {"level": 3}}, False)):
        with pytest.raises(LawViolation, match="Signature: ") as error:
            check_reward(mine.source, [case | more])
        assert (without in str(error.value)) is named


def test_arguments_reach_the_function(mine):
    check_reward(mine.good, CASES, arguments={"bonus": 0.5})
    with pytest.raises(LawViolation, match="Order: case 0: right '5' scores -1, wrong '6' -0"):
        check_reward(mine.good, CASES, arguments={"bonus": -1.0})


@pytest.mark.parametrize(("law", "name"), [(law, name) for law, names in BROKEN.items() for name in names])
def test_each_mistake_breaks_its_law(mine, law, name):
    with pytest.raises(LawViolation) as error:
        check_reward(getattr(mine, name), CASES)
    assert error.value.law == law, error.value


def test_a_function_that_no_process_can_import_is_refused(mine):
    for function in (mine.makes(), lambda **_: 1.0):
        with pytest.raises(LawViolation, match="Signature: a process cannot import"):
            check_reward(function, CASES)


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([], "there is no case"),
        ([{"right": "5"}], "has no ground_truth"),
        ([{"answer": "5"}], "has the key 'answer'"),
        ([{"ground_truth": 5, "right": 5}], "case 0 has 5 as right; an answer is a string"),
    ],
)
def test_cases_that_say_too_little_are_refused(mine, cases, said):
    with pytest.raises(ValueError, match=said):
        check_reward(mine.good, cases)


def test_a_script_that_checks_its_own_function_is_told_to_guard_the_call(warm, tmp_path):
    script = tmp_path / "script.py"
    lines = (
        "from verl_fn.testing import check_reward\n{}check_reward(good, [{{'ground_truth': '5', 'wrong': '6'}}])\n"
    )
    for guard, said in (("", 'call it below if __name__ == "__main__"'), ("if __name__ == '__main__': ", "")):
        script.write_text(FUNCTIONS + lines.format(guard))
        ended = subprocess.run([warm, script], capture_output=True, text=True, timeout=300)
        assert said in ended.stderr and (ended.returncode == 0) == (not said), ended.stderr
