"""Laws of a task of the user's own: its environment and its reward function, called as runs call them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from verl_fn.data.columns import truth
from verl_fn.data.tasks import Problem
from verl_fn.pool import keeper, playing
from verl_fn.pool.scoring import NOTHING
from verl_fn.rewards.functions import RewardFunctions
from verl_fn.rewards.reward import Answer, RewardError, describe, odd_answers
from verl_fn.user_files import PACKAGE, is_library

from .violation import LawViolation, require, seeded

# What a model may write: nothing, a call that is no JSON, a call of nothing, odd characters.
ODD_REPLIES = (
    "",
    " \n",
    '<tool_call>{"name": </tool_call>',
    '<tool_call>{"name": "?"}</tool_call>',
    "\u00e9\u4e16\u0000",
)
_OWN_ERROR = "a value of another kind, or an error of the environment"
_SHARED = "a state that instances share, or randomness of another generator than random and numpy.random"
ROW = {"prompt": "", "answer": "", "id": 0, "data_source": "", "extra_info": {}}
CASE = ("ground_truth", "right", "wrong", "data_source", "extra_info")
NUMBER = "a number"
OWN_STATE = "a state that is kept between calls, the clock, or randomness other than random and numpy.random"


def check_environment(
    environment: Callable[..., Any],
    problems: Sequence[Any],
    replies: Sequence[str],
    *,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Checks that an environment answers as runs expect, and that its conversations can be repeated.

    * Signature: ``reset`` returns messages and ``step`` messages or ``Done``, with finite numbers, all as JSON.
    * Replies: at each turn an empty reply, or a tool call that is no JSON, is answered and raises nothing.
    * Repetition: the same problem and replies give the same answers from another instance, ``random`` and
      ``numpy.random`` being seeded before each call; so a run resumes and replays bitwise.
    * Independence: conversations that go on at the same time do not change each other.
    * Purity: the problem is not changed.
    * Group: ``score_group``, if there is one, returns ``Done`` for each conversation that has ended.

    Args:
        environment: the class that ``env.name`` would name.
        problems: at least one, with any of the attributes or keys ``prompt``, ``answer``, ``id``, ``data_source`` and
            ``extra_info``.
        replies: what the model says in each conversation, in order; a conversation may end before the last one.
        arguments: ``env.arguments``.

    Raises:
        LawViolation: a law is broken; the message names it, the problem and the reply.

    Example:
        >>> from verl_fn.environments import Done
        >>> class Echo:
        ...     def reset(self, problem):
        ...         self.answer = problem.answer
        ...         return [{"role": "user", "content": problem.prompt}]
        ...
        ...     def step(self, reply):
        ...         return Done(float(reply == self.answer))
        >>> check_environment(Echo, [{"prompt": "2+3?", "answer": "5"}], ["5"])
    """
    make = partial(environment, **(arguments or {}))
    rows = dict(enumerate(map(_row, problems)))
    require(bool(rows), "Signature", "there is no problem", "an empty list of problems")
    with seeded(0):
        alone = [_play(make, {i: row}, replies)[i] for i, row in rows.items()]
        for i, row in rows.items():
            _same("Repetition", i, replies, alone[i], _play(make, {i: row}, replies)[i], _SHARED)
        others = {len(rows) + i: row for i, row in rows.items()}
        together = _play(make, rows | others, replies)
        for i in rows:
            _same("Independence", i, replies, alone[i], together[i], "a state that instances share")
        # Instead of each reply in turn: an environment may read its first and its last one by other code.
        for turn in range(sum(not playing.is_end(answer) for answer in alone[0])):
            for odd in ODD_REPLIES:
                _play(make, {0: rows[0]}, [*replies[:turn], odd], "Replies", "a reply that is taken for well-formed")
        if playing.group_scorer(environment) is not None:
            first, second = (_group_scores(make, rows[0], replies) for _ in range(2))
            require(first == second, "Group", f"scores {second} came after {first}", _SHARED)


def _row(problem: Any) -> dict[str, Any]:
    """Returns the fields of a problem as an environment gets them."""
    read = problem.get if isinstance(problem, Mapping) else partial(getattr, problem)
    return {name: copy.deepcopy(read(name, default)) for name, default in ROW.items()}


def _play(
    make: Callable[[], Any],
    rows: Mapping[int, dict[str, Any]],
    replies: Sequence[str],
    law: str = "Signature",
    cause: str = _OWN_ERROR,
) -> dict[int, list[Any]]:
    """Plays conversations as the process of a run does, turn by turn side by side, and closes their instances.

    Returns:
        The answers of each conversation, by its number.
    """
    sent: list[Any] = []
    server = playing.Server(make, sent.append)
    answers: dict[int, list[Any]] = {number: [] for number in rows}
    for turn in range(len(replies) + 1):
        for number, row in rows.items():
            if turn and playing.is_end(answers[number][-1]):
                continue
            given = copy.deepcopy(row)
            server.answer(0, number, number, given, replies[:turn])
            _, answer = sent[-1]
            said = f"reply {turn}, {replies[turn - 1]!r}," if turn else "reset"
            require(not isinstance(answer, str), law, f"problem {number}: {said} {answer}", cause)
            require(given == row, "Purity", f"problem {number} was changed by reset", "an update in place")
            answers[number].append(answer)
    server.forget()
    return answers


def _group_scores(make: Callable[[], Any], row: dict[str, Any], replies: Sequence[str]) -> Any:
    """Returns the scores of the conversations of a group that have ended."""
    sent: list[Any] = []
    server = playing.Server(make, sent.append)
    jobs = []
    for number in range(2):
        for turn in range(len(replies) + 1):
            server.answer(0, number, number, row, replies[:turn])
            if playing.is_end(sent[-1][1]):
                jobs.append((number, number, row, replies[:turn]))
                break
    if not jobs:
        return None
    server.score(0, 0, jobs)
    _, outcome = sent[-1]
    server.forget()
    require(not isinstance(outcome, str), "Group", f"score_group {outcome}", "it takes a list of instances")
    return outcome


def _same(law: str, number: int, replies: Sequence[str], expected: Any, found: Any, cause: str) -> None:
    for turn, (before, after) in enumerate(zip(expected, found, strict=False)):
        said = f"reply {turn}, {replies[turn - 1]!r}," if turn else "reset"
        require(
            before == after,
            law,
            f"problem {number}: another instance answered {said} with {after!r:.200}, after {before!r:.200}",
            cause,
        )


def check_reward(
    function: Callable[..., Any], cases: Sequence[Mapping[str, Any]], *, arguments: Mapping[str, Any] | None = None
) -> None:
    """Checks that a reward function scores as runs expect, in processes as runs start them.

    * Signature: the function stands at the top of a file, so that a process can import it. It takes the keywords of
      a run, and returns a finite number, or a dict with one as ``score``.
    * Answers: it also scores an empty answer, one that ends in the middle, and odd characters.
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
        ValueError: there is no case, or one has no ground truth, another key, or an answer that is no string.
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
        odd += odd_answers(problem, texts[0])
    functions = _started(reference, arguments)
    cause = "a value that is no score, or a misspelled key"
    if not all("extra_info" in case for case in cases):
        cause += ", or a case without the extra_info that the function reads"
    results = _judged(functions, usual, "Signature", cause)
    results += _judged(functions, odd, "Answers", "an answer that is taken for well-formed")
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
        ValueError: the case has no ground truth, another key, or an answer that is no string.
    """
    if unknown := sorted(set(case) - set(CASE)):
        raise ValueError(f"case {number} has the key {unknown[0]!r}; the keys are {', '.join(CASE)}")
    if case.get("ground_truth") is None:
        raise ValueError(f"case {number} has no ground_truth")
    for name in ("right", "wrong"):
        if not isinstance(answer := case.get(name, ""), str):
            raise ValueError(f"case {number} has {answer!r:.80} as {name}; an answer is a string")
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
    return f"{module.__name__ if is_library(file) or file.startswith(PACKAGE) else file}:{name}"


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
            "acc": NOTHING if acc is None else acc,
            **({} if pred is None else {"pred": pred}),
            **metrics,
        }
        for score, acc, pred, metrics in judged
    ]


def _check_keys(answers: Sequence[Answer], results: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all results have the same keys, and under each key numbers only or none, as a run does."""
    cause = "an early return; a metric would be the mean of fewer answers. Return None where there is no number"
    kinds: dict[str, tuple[str, Answer]] = {}
    for answer, result in zip(answers, results, strict=True):
        for key in sorted({*results[0], *result} - {"pred"}):
            here = "no key" if key not in result else _kind(result[key])
            if here != NOTHING and (key in result) == (key in results[0]):
                first, where = kinds.setdefault(key, (here, answer))
                same = (first == NUMBER) == (here == NUMBER)
            else:
                first, where = "no key" if key not in results[0] else _kind(results[0][key]), answers[0]
                same = key in result and key in results[0]
            require(
                same, "Keys", f"{key!r} is {first} for {describe(where)}, and {here} for {describe(answer)}", cause
            )


def _kind(value: Any) -> str:
    return value if isinstance(value, str) else NUMBER
