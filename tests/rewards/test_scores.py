"""The reward functions that come with the project, by themselves and where a run calls them."""

from types import SimpleNamespace

import pytest

from verl_fn import scores
from verl_fn.data.tasks import Problem
from verl_fn.rewards.functions import RewardFunctions
from verl_fn.rewards.reward import MATH, Answer, rule_for
from verl_fn.scores import boxed, equal, exact, matches, tagged, thinks, verified


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac 1 {2}", r"\frac12"),
        ("-1/2", r"-\frac{1}{2}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"x = 5", "5"),
        ("1{,}000".replace("{,}", ","), "1000"),
        (r"90^\circ", "90"),
        (r"50\%", "50"),
        (r"\$5", "5"),
        ("5.00", "5"),
        (".5", "0.5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("7.", "7"),
    ],
)
def test_the_same_answer_in_another_writing(answer, truth):
    assert equal(answer, truth) and equal(truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("12", "1"), ("0.5", r"\frac12"), ("(1,2)", "12"), ("1,2", "12"), ("-5", "5"), ("", "5"), ("5.5", "5"),
     ("10000", "1000"), (r"\frac{1}{23}", r"\frac{12}{3}"), ("1,234,56", "123456")],
)  # fmt: skip
def test_other_answers(answer, truth):
    assert not equal(answer, truth)


def test_the_last_box_that_ends():
    assert boxed(r"\boxed{1} and \boxed{\sqrt{2}} .") == r"\sqrt{2}"
    assert boxed(r"\boxed{1} no, \fbox{2}") == "2" and boxed(r"\fbox{2} no, \boxed{1}") == "1"
    assert boxed(r"\fbox{3}") == "3" and boxed("no box") is None and boxed(r"\boxed{1} \boxed{\frac{1}{2}") is None


@pytest.mark.parametrize("source", MATH)
def test_math_is_judged_by_its_box(source):
    rule, problem = rule_for(source), Problem("q", r"\frac{1}{2}")
    assert rule(problem, r"so $\boxed{\dfrac{1}{2}}$", True) == {"score": 1.0, "acc": 1.0, "pred": r"\dfrac{1}{2}"}
    assert rule(problem, r"so \frac{1}{2}", True) == {"score": 0.0, "acc": 0.0, "pred": ""}
    assert rule(Problem("q", ""), "no box", True)["score"] == 0.0


def test_strings_expressions_and_tags():
    assert exact("s", " 5 ", "5")["acc"] == 1.0 and exact("s", "55", "5")["acc"] == 0.0
    assert (
        matches("s", "Paris.", r"(?i)paris\.?")["score"] == 1.0 and matches("s", "in Paris", "Paris")["score"] == 0.0
    )
    assert tagged("s", "<answer>1</answer> <answer>\n5</answer>", "5") == {"score": 1.0, "acc": 1.0, "pred": "5"}
    assert tagged("s", "", "")["score"] == 0.0, "no tag is not an empty answer"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think><answer>5</answer> more", 0.0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>5</answer>", 0.0),
        ("<answer>5</answer><think>a</think>", 0.0),
        ("5", 0.0),
    ],
)
def test_the_form_of_thoughts_and_an_answer(response, score):
    assert thinks("s", response, "5") == score


def test_a_run_calls_them_in_its_processes():
    rewards = RewardFunctions(["verl_fn.scores:tagged", "verl_fn.scores:thinks"], [1.0, 0.5])
    answers = [
        Answer(Problem("q", "5"), text) for text in ("<answer>5</answer>", "<think></think><answer>4</answer>")
    ]
    assert [(one["score"], one["acc"]) for one in rewards(answers)] == [(1.0, 1.0), (0.5, 0.0)]


def test_verified_answers_need_math_verify():
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"verl_fn\[math\]"):
            verified("s", r"\boxed{0.5}", r"\frac{1}{2}")
        return
    cases = ((r"so \boxed{0.5}", r"\frac{1}{2}", 1.0), (r"\boxed{x+1}", "1+x", 1.0), (r"\boxed{3}", "4", 0.0),
             ("I do not know", "4", 0.0), (r"it is $\frac{2}{4}$", r"so \boxed{0.5}", 1.0),
             ("<think>9</think><answer>18</answer>", "18", 1.0), (r"<answer>\frac12</answer>", r"\frac{1}{2}", 1.0),
             ("<answer> $18$ </answer> 7", "18", 1.0), ("<think>18</think><answer>9</answer>", "18", 0.0),
             (r"<think>\boxed{18}</think><answer>9</answer>", "18", 1.0),
             ("<answer></answer>", "18", 0.0), (r"<answer>2\pi</answer>", "2", 0.0),
             (r"<answer>2\pi</answer>", r"2\pi", 1.0), ("<answer>10^{6}</answer>", "10", 0.0),
             ("<answer>3+4i</answer>", "3", 0.0))  # fmt: skip
    assert [verified("s", text, truth)["score"] for text, truth, _ in cases] == [score for *_, score in cases]


@pytest.mark.parametrize(("score", "acc"), [(0.0, 0.0), (0.5, 0.0), (1.0, 1.0)])
def test_a_partial_score_of_a_set_is_no_right_answer(score, acc, monkeypatch):
    made = SimpleNamespace(score_answer=lambda answer, entry: score)
    monkeypatch.setattr(scores, "_made", lambda *_: (made, {"question": "q"}))
    found = scores.reasoning_gym("reasoning_gym/x", " 5", "5", {"seed": 1, "options": {}, "question": "q"})
    assert found == {"score": score, "acc": acc, "pred": "5", "scorer_failed": 0.0}
