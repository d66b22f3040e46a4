"""Rewards by rule: what an answer is worth, by the data source of its problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from verl_fn.data.tasks import TASKS, Problem, Task
from verl_fn.rewards.reward import Answer, RewardError, describe

Rule = Callable[[Problem, str, bool], dict[str, Any]]

SOURCES = (*TASKS, "openai/gsm8k")

# verl looks no further back than this either.
GSM8K_TAIL = 300


def rule_for(data_source: str) -> Rule:
    """The rule of a data source: from a problem, a response's text and whether it ended by itself.

    It gives ``score`` and ``acc`` as numbers and ``pred``, the answer as a text.

    Raises:
        RewardError: the data source has none.

    >>> rule_for("openai/gsm8k")(Problem("What is 6 * 7?", "42"), "6 * 7 is #### 42", True)
    {'score': 1.0, 'acc': 1.0, 'pred': '42'}
    """
    if data_source in TASKS:
        return _of_task(TASKS[data_source])
    if data_source.endswith("gsm8k"):
        return gsm8k
    raise RewardError(
        f"the data source {data_source!r} has no rule of its own, only {', '.join(SOURCES)} do; set reward.functions"
    )


def by_rules(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Judge each answer by the rule of its problem's data source.

    Raises:
        RewardError: a data source has no rule, or its rule does not fit the problem.
    """
    return [_judged(answer) for answer in answers]


def gsm8k(problem: Problem, text: str, finished: bool) -> dict[str, Any]:
    """verl's strict GSM8K rule: 1.0 where the last ``#### number``, less its commas, is the ground truth as text."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", text[-GSM8K_TAIL:])
    pred = found[-1].replace(",", "") if found else ""
    score = float(bool(found) and pred == problem.answer)
    return {"score": score, "acc": score, "pred": pred}


def _of_task(task: Task) -> Rule:
    def rule(problem: Problem, text: str, finished: bool) -> dict[str, Any]:
        score = float(task.score(problem, text)) if finished else 0.0
        return {"score": score, "acc": float(score >= 1.0), "pred": text}

    return rule


def _judged(answer: Answer) -> dict[str, Any]:
    rule = rule_for(answer.problem.data_source)
    try:
        return rule(answer.problem, answer.text, answer.finished)
    except Exception as error:
        # Files may use a made task's name for problems of another form.
        raise RewardError(
            f"the rule of its data source failed on {describe(answer)}: {error}; set reward.functions"
        ) from error
