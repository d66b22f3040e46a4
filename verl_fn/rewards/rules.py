"""Rewards by rule: the data source of a problem decides how its answers are scored."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from verl_fn.data.tasks import ARITHMETIC, GSM8K, SQUARES, TASKS, Problem, Task
from verl_fn.rewards.reward import Answer, RewardError, describe
from verl_fn.scores import boxed, equal

Rule = Callable[[Problem, str, bool], dict[str, Any]]

MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
GEOMETRY3K = "hiyouga/geometry3k"
SOURCES = (*TASKS, GSM8K, ARITHMETIC, SQUARES, *MATH, GEOMETRY3K)

GSM8K_TAIL = 300  # characters at the end of a response in which verl looks for the answer


def rule_for(data_source: str) -> Rule:
    """Returns the rule of a data source.

    A rule takes a problem, a response and whether the response ended with the end token. It returns the numbers
    ``score`` and ``acc``, and ``pred``, the final answer as a string.

    Raises:
        RewardError: the data source has no rule.

    Example:
        >>> rule_for("openai/gsm8k")(Problem("What is 6 * 7?", "42"), "6 * 7 is #### 42", True)
        {'score': 1.0, 'acc': 1.0, 'pred': '42'}
    """
    if data_source in TASKS:
        return _of_task(TASKS[data_source])
    if data_source.endswith("gsm8k"):
        return gsm8k
    if data_source == ARITHMETIC:
        return arithmetic
    if data_source == SQUARES:
        return one_word
    if data_source in MATH:
        return mathematics
    if data_source == GEOMETRY3K:
        return geometry
    raise RewardError(
        f"the data source {data_source!r} has no rule of its own, only {', '.join(SOURCES)} do; set reward.functions "
        "or reward.url"
    )


def has_rule(data_source: str) -> bool:
    """Returns whether a data source has a rule.

    Example:
        >>> has_rule("reverse"), has_rule("mine")
        (True, False)
    """
    return data_source in SOURCES or data_source.endswith("gsm8k")


def by_rules(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Scores each answer by the rule of its problem's data source.

    Raises:
        RewardError: a data source has no rule, or its rule does not fit the problem.
    """
    return [_scored(answer) for answer in answers]


def unscored(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Gives each answer the score 0, if only an environment gives the reward.

    Example:
        >>> unscored([Answer(Problem("2+3?", "5"), "5 ")])
        [{'score': 0.0, 'pred': '5'}]
    """
    return [{"score": 0.0, "pred": answer.text.strip()} for answer in answers]


def gsm8k(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    """Scores a response by verl's strict GSM8K rule.

    The score is 1.0 if the last ``#### number``, without its commas, is the same string as the ground truth.
    """
    numbers = re.findall(r"#### (\-?[0-9\.\,]+)", response[-GSM8K_TAIL:])
    pred = numbers[-1].replace(",", "") if numbers else ""
    score = float(bool(numbers) and pred == problem.answer)
    return {"score": score, "acc": score, "pred": pred}


def arithmetic(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    """Scores 1 if the last whole number of a response is the ground truth.

    Example:
        >>> arithmetic(Problem("What is 6 + 7?", "13"), "6 + 7 = 13.", True)
        {'score': 1.0, 'acc': 1.0, 'pred': '13'}
    """
    numbers = re.findall(r"-?\d+", response)
    pred = numbers[-1] if numbers else ""
    score = float(pred == problem.answer)
    return {"score": score, "acc": score, "pred": pred}


def one_word(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    """Scores 1 if a response is the ground truth and nothing else, whatever its case and a last full stop.

    Example:
        >>> one_word(Problem("<image>Which colour?", "red"), " Red.", True)
        {'score': 1.0, 'acc': 1.0, 'pred': 'red'}
    """
    pred = response.strip().lower().removesuffix(".")
    score = float(finished and pred == problem.answer)
    return {"score": score, "acc": score, "pred": pred}


def mathematics(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    r"""Scores 1 if the last box of a response to a problem of MATH is the ground truth, written in some way.

    Example:
        >>> mathematics(Problem("Half of 1?", r"\frac{1}{2}"), r"It is \boxed{\tfrac12}.", True)["score"]
        1.0
    """
    pred = boxed(response)
    score = float(pred is not None and equal(pred, problem.answer))
    return {"score": score, "acc": score, "pred": pred or ""}


def geometry(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    r"""Scores 0.9 for the right box, as ``mathematics`` does, and 0.1 for thoughts in their tags before a box.

    Example:
        >>> geometry(Problem("<image>Find x.", "3"), r"<think>1 + 2</think> \boxed{3}", True)["score"]
        1.0

    Source:
        verl's ``geo3k.compute_score``, whose comparison of answers is mathruler's.
    """
    found = mathematics(problem, response, finished)
    formed = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", response, re.DOTALL) is not None
    return found | {"score": 0.9 * found["acc"] + 0.1 * formed}


def _of_task(task: Task) -> Rule:
    def rule(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
        score = float(task.score(problem, response)) if finished else 0.0
        return {"score": score, "acc": float(score >= 1.0), "pred": response}

    return rule


def _scored(answer: Answer) -> dict[str, Any]:
    rule = rule_for(answer.problem.data_source)
    try:
        return rule(answer.problem, answer.text, answer.finished)
    except Exception as error:
        # Files may use the name of a generated task for problems of another form.
        raise RewardError(
            f"the rule of its data source failed on {describe(answer)}: {error}; set reward.functions or reward.url"
        ) from error
