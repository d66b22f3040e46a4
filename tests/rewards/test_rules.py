"""Rules: what an answer is worth, by the data source of its problem."""

import pytest

from verl_fn.data.tasks import Problem
from verl_fn.rewards.reward import MATH, RULES, Answer, RewardError, by_rules, rule_for, unattainable


def gsm8k(text, truth="1234", finished=True, source="openai/gsm8k"):
    return rule_for(source)(Problem("q", truth), text, finished)


@pytest.mark.parametrize(
    ("text", "score", "pred"),
    [
        ("so it is\n#### 1234", 1.0, "1234"),
        ("#### 1,234", 1.0, "1234"),
        ("#### 7 no, #### 1234", 1.0, "1234"),
        ("#### 1234 no, #### 7", 0.0, "7"),
        ("#### -1234", 0.0, "-1234"),
        ("#### 1234.0", 0.0, "1234.0"),
        ("####1234", 0.0, ""),
        ("#### $1234", 0.0, ""),
        ("1234", 0.0, ""),
        ("", 0.0, ""),
        ("#### 1234" + "x" * 290, 1.0, "1234"),
        ("#### 1234" + "x" * 300, 0.0, ""),
    ],
)
def test_gsm8k_takes_the_last_number_after_four_hashes_near_the_end(text, score, pred):
    assert gsm8k(text) == {"score": score, "acc": score, "pred": pred}


def test_gsm8k_keeps_a_sign_and_judges_a_response_that_was_cut_off():
    assert gsm8k("#### -3", "-3", finished=False)["score"] == 1.0


def test_no_number_is_not_an_empty_ground_truth():
    assert gsm8k("no idea", "")["score"] == 0.0


def test_any_source_of_that_name_takes_the_rule():
    assert gsm8k("#### 1234", source="mirror/of/gsm8k")["score"] == 1.0


def test_made_tasks_give_their_own_score_and_nothing_to_what_did_not_end():
    rule, problem = rule_for("reverse"), Problem("abc>", "cba")
    assert rule(problem, "cba", True) == {"score": 1.0, "acc": 1.0, "pred": "cba"}
    assert rule(problem, "cbb", True) == {"score": pytest.approx(1 / 3), "acc": 0.0, "pred": "cbb"}
    assert rule(problem, "cba", False) == {"score": 0.0, "acc": 0.0, "pred": "cba"}


def test_a_word_that_was_cut_off_may_be_another_one():
    rule, problem = rule_for("squares"), Problem("<image>Which colour?", "red")
    assert [rule(problem, "red", finished)["acc"] for finished in (True, False)] == [1.0, 0.0]


def test_geometry_pays_for_thoughts_before_a_wrong_box_too():
    rule, problem = rule_for("hiyouga/geometry3k"), Problem("<image>Find x.", "3")
    scores = [rule(problem, text, True)["score"] for text in (r"<think>a</think> \boxed{4}", r"\boxed{3}", "3")]
    assert scores == [0.1, 0.9, 0.0]


def test_each_answer_is_judged_by_its_own_source():
    answers = [
        Answer(Problem("2,3,6>", "2*3", data_source="countdown"), "3*2"),
        Answer(Problem("q", "6", data_source="openai/gsm8k"), "#### 5"),
    ]
    assert [(one["score"], one["pred"]) for one in by_rules(answers)] == [(1.0, "3*2"), (0.0, "5")]


def test_an_unknown_source_is_named_with_the_known_ones_and_the_way_out():
    with pytest.raises(
        RewardError,
        match=r"'my/data' has no rule .*count, reverse, countdown, .*guess_number, openai/gsm8k.* reward\.f",
    ):
        rule_for("my/data")
    assert all(map(rule_for, RULES))


def test_a_rule_that_does_not_fit_the_problem_names_it():
    chat = Problem(({"role": "user", "content": "reach 6"},), "6", id=5, data_source="countdown")
    with pytest.raises(RewardError, match=r"problem 5 of 'countdown', response '2\*3': .*; set reward\.functions"):
        by_rules([Answer(chat, "2*3")])


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("my/gsm8k", ("5", "-3.5", "1000"), ("#### 5", "1,000", "$5", " 5", "five", '{"a": 1}')),
        ("arithmetic", ("5", "-3"), ("+5", "5.0", "five")),
        ("squares", ("red",), ("Red", "red.")),
        *((source, (r"\frac12", "1,000", "x = 5"), (r"\boxed{5}", "{5")) for source in (*MATH, "hiyouga/geometry3k")),
        ("reverse", ("anything",), ()),
        ("mine", ("anything",), ()),
    ],
)
def test_ground_truths_that_no_response_equals_by_rule(source, right, wrong):
    found = {truth: unattainable(Problem("q", truth, data_source=source)) for truth in (*right, *wrong)}
    assert found == dict.fromkeys(right, False) | dict.fromkeys(wrong, True)
