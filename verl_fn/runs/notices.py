"""Sentences about data and rewards that are allowed, but hardly meant. Each is said once, and ends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from verl_fn.algorithms import Report
from verl_fn.config import Plan
from verl_fn.data.files import FileData
from verl_fn.data.tasks import Source

from .screen import text_of


def data_notices(plan: Plan, source: Source, tokenizer: Any) -> list[str]:
    """Returns sentences about the problems of files; a generated task has nothing of the kind.

    Args:
        plan: the plan of the run.
        source: its problems.
        tokenizer: the model's tokenizer.
    """
    return list(_about_files(plan, source, tokenizer)) if isinstance(source, FileData) else []


def _about_files(plan: Plan, source: FileData, tokenizer: Any) -> Iterator[str]:
    training, held_out, d = source.training, source.held_out(plan.data.val_size), plan.data
    prompts = [text_of(problem.prompt) for problem in training]
    known = set(prompts)
    if training and d.train_batch_size > len(training):
        yield (
            f"data.train_batch_size = {d.train_batch_size} is more than the {_rows(training)} of data.train_files: a "
            "step takes some of them several times"
        )
    if repeated := len(prompts) - len(known):
        yield f"data.train_files: {repeated} of {_rows(prompts)} repeat the prompt of an earlier one"
    if shared := sum(text_of(problem.prompt) in known for problem in held_out):
        yield f"data.val_files: {shared} of {_rows(held_out)} have a prompt that is trained on as well"
    left_out = {p.data_source for p in source.validation} - {p.data_source for p in held_out}
    if left_out:
        yield f"data.val_size = {d.val_size} leaves out all held-out rows of {', '.join(sorted(left_out))}"
    if plan.algorithm == "sft" and (empty := sum(not problem.answer for problem in training)):
        yield f"data.train_files: {empty} of {_rows(training)} have an empty answer, which teaches to say nothing"
    names = [name for name in tokenizer.all_special_tokens if name]
    texts = [text_of(p.prompt) + (p.answer if plan.algorithm == "sft" else "") for p in (*training, *held_out)]
    if held := [name for text in texts if (name := next((n for n in names if n in text), None))]:
        yield f"{len(held)} of {_rows(texts)} hold the name of a special token, such as {held[0]}, which it becomes"


def _rows(rows: Sequence[Any]) -> str:
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}"


def without_signal(step: int, report: Report) -> str:
    """Returns a sentence about a step whose rewards are all equal, or whose advantages are all 0; or nothing.

    Example:
        >>> names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
        >>> without_signal(3, dict.fromkeys(names, 0.0))
        'all rewards of step 3 are 0, and all advantages are 0: the policy learns nothing from it'
        >>> without_signal(3, dict(zip(names, (0.0, 1.0, -1.0, 1.0))))
        ''
    """
    names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
    if any(name not in report for name in names):
        return ""
    lowest, highest, *advantages = (report[name] for name in names)
    idle = advantages == [0.0, 0.0]
    if lowest == highest:
        also = ", and all advantages are 0: the policy learns nothing from it" if idle else ""
        return f"all rewards of step {step} are {lowest:g}{also}"
    if idle:
        return (
            f"all advantages of step {step} are 0, although rewards go from {lowest:g} to {highest:g}: they differ "
            "between prompts alone, or are so large that their differences are rounded away"
        )
    return ""
