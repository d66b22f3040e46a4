"""Judges answers with a reward function of the user, in processes as a run starts them, and checks the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from verl_fn.data.columns import truth
from verl_fn.data.tasks import Problem
from verl_fn.pool import keeper
from verl_fn.pool.scoring import NOTHING
from verl_fn.rewards.functions import RewardFunctions
from verl_fn.rewards.reward import Answer, RewardError, describe, odd_answers
from verl_fn.user_files import LIBRARIES, PACKAGE

from .violation import LawViolation, require

FIELDS = ("ground_truth", "right", "wrong", "data_source", "extra_info")
OWN_STATE = "a state that is kept between calls, the clock, or randomness other than random and numpy.random"


def check_reward(
    function: Callable[..., Any], cases: Sequence[Mapping[str, Any]], *, arguments: Mapping[str, Any] | None = None
) -> None:
    """Checks that a reward function scores as runs expect, in processes as runs start them.

    * Signature: the function stands at the top of a file, so that a process can import it. It takes the keywords of
      a run, and returns a finite number, or a dict with one as ``score``.
    * Answers: it also scores an empty answer, one that ends in the middle, odd characters, and an answer to a problem
      whose ground truth is empty.
    * Keys: a dict has the same keys each time; an entry that an answer lacks is ``None``.
    * Repetition: the same answers get the same results again, and in another process, ``random`` and
      ``numpy.random`` being seeded before each call; so a run resumes and replays bitwise.
    * Order: the right answer of a case scores above its wrong one.

    Args:
        function: what ``reward.functions`` would name.
        cases: at least one, each with ``ground_truth`` and any of ``right``, ``wrong`` (answers), ``data_source`` and
            ``extra_info``.
        arguments: ``reward.arguments``.

    Raises:
        LawViolation: a law is broken; the message names it and the answer.
        ValueError: there is no case, or one has no ground truth or another key.
        RuntimeError: a process of this check calls it while it imports the function's file.

    Example:
        >>> from verl_fn.scores import tagged
        >>> check_reward(tagged, [{"ground_truth": "5", "right": "2+3 is <answer>5</answer>", "wrong": "5"}])
        >>> check_reward(tagged, [{"ground_truth": "5", "right": "5", "wrong": "6"}])
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Order: case 0: right '5' scores 0, wrong '6' 0. Usual ...
    """
    problems = [_problem(number, case) for number, case in enumerate(cases)]
    if not problems:
        raise ValueError("there is no case; give at least one, such as {'ground_truth': '5', 'right': '5'}")
    reference = _reference(function)
    usual, odd = [], []
    for problem, case in zip(problems, cases, strict=True):
        texts = [case[name] for name in ("right", "wrong") if name in case] or [problem.answer]
        usual += [Answer(problem, text) for text in texts]
        odd += [*odd_answers(problem, texts[0]), Answer(attrs.evolve(problem, answer=""), texts[0])]
    functions = _started(reference, arguments)
    results = _judged(functions, usual, "Signature", "a value that is no score, or a misspelled key")
    results += _judged(functions, odd, "Answers", "an answer or a ground truth that is taken for well-formed")
    _check_keys(usual + odd, results)
    for where, judging in (("again", functions), ("in another process", _started(reference, arguments))):
        repeated = [one for part in (usual, odd) for one in _judged(judging, part, "Repetition", OWN_STATE)]
        for answer, before, after in zip(usual + odd, results, repeated, strict=True):
            seen = f"{describe(answer)}, judged {where}, gets {after!r:.200}, after {before!r:.200}"
            require(before == after, "Repetition", seen, OWN_STATE)
    scores = {
        (answer.problem.id, answer.text): result["score"] for answer, result in zip(usual, results, strict=False)
    }
    for number, case in enumerate(cases):
        if "right" in case and "wrong" in case:
            right, wrong = (scores[number, case[name]] for name in ("right", "wrong"))
            seen = f"right {case['right']!r:.200} scores {right:g}, wrong {case['wrong']!r:.200} {wrong:g}"
            require(right > wrong, "Order", f"case {number}: {seen}", "another sign, or an answer that is not found")


def _problem(number: int, case: Mapping[str, Any]) -> Problem:
    """Returns the problem of a case; its ground truth is the string that a run makes of it.

    Raises:
        ValueError: the case has no ground truth, or another key.
    """
    if unknown := sorted(set(case) - set(FIELDS)):
        raise ValueError(f"case {number} has the key {unknown[0]!r}; the keys are {', '.join(FIELDS)}")
    if case.get("ground_truth") is None:
        raise ValueError(f"case {number} has no ground_truth")
    return Problem(
        "", truth(case["ground_truth"]), number, case.get("data_source", ""), dict(case.get("extra_info") or {})
    )


def _reference(function: Callable[..., Any]) -> str:
    """Returns what ``reward.functions`` would name: the module of a library, or else the file.

    Raises:
        LawViolation: a process cannot import it.
    """
    if getattr(sys.modules["__main__"], "__file__", None) == keeper.__file__:
        # The process would start a process that imports this file as well, and so on.
        raise RuntimeError(
            'a process imports a file that calls check_reward; call it below if __name__ == "__main__"'
        )
    name, module = getattr(function, "__name__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None) if getattr(module, name, None) is function else None
    if module is None or file is None:
        raise LawViolation(
            "Signature",
            f"a process cannot import {function!r:.200} from a file",
            "a function in a function, a lambda, a cell of a notebook, or functools.partial in place of arguments",
        )
    return f"{module.__name__ if file.startswith((*LIBRARIES, PACKAGE)) else file}:{name}"


def _started(reference: str, arguments: Mapping[str, Any] | None) -> RewardFunctions:
    try:
        return RewardFunctions([reference], arguments=arguments)
    except RewardError as error:
        raise LawViolation("Signature", str(error), "other parameters than the keywords of a run") from error


def _judged(functions: RewardFunctions, answers: Sequence[Answer], law: str, cause: str) -> list[dict[str, Any]]:
    """Returns what the function returned for each answer; the name of a type stands for a value that is no number."""
    try:
        (judged,) = functions.judged(answers)
    except RewardError as error:
        raise LawViolation(law, str(error), cause) from error
    return [
        {
            "score": score,
            **({} if acc is None else {"acc": acc}),
            **({} if pred is None else {"pred": pred}),
            **metrics,
        }
        for score, acc, pred, metrics in judged
    ]


def _check_keys(answers: Sequence[Answer], results: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all results have the keys of the first one, and numbers where it has numbers, or nothing."""
    for answer, result in zip(answers, results, strict=True):
        for key in sorted({*results[0], *result} - {"pred"}):
            first, own = ("no key" if key not in r else _kind(r[key]) for r in (results[0], result))
            require(
                first == own or ("no key" not in (first, own) and NOTHING in (first, own)),
                "Keys",
                f"{key!r} is {first} for {describe(answers[0])}, and {own} for {describe(answer)}",
                "an early return; a metric would be the mean of fewer answers. Return None where there is no number",
            )


def _kind(value: Any) -> str:
    return value if isinstance(value, str) else "a number"
