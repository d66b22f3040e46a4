"""Notices about problems from files: what a run can be trained on, but its user may not have meant."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_fn.backends.hf.chat import prints_date, template_text
from verl_fn.config.schema import DataConfig
from verl_fn.data.columns import MARKS
from verl_fn.data.tasks import Problem


def notices(
    training: Sequence[Problem],
    validation: Sequence[Problem],
    table: DataConfig,
    tokenizer: Any,
    *,
    answers: bool,
    sizes: Sequence[int] = (),
) -> Iterator[str]:
    """Yields a line for each unusual property of the problems.

    Args:
        training: the training problems.
        validation: the held-out problems.
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        answers: whether the run trains on the answers.
        sizes: the number of training problems of each file, if each has a weight.
    """
    different = {_hashable(problem.prompt) for problem in training}
    if repeated := len(training) - len(different):
        yield f"data.train_files: {repeated} of {len(training)} prompts repeat an earlier one"
    if known := sum(_hashable(problem.prompt) in different for problem in validation):
        yield f"data.val_files: {known} of {len(validation)} held-out prompts are also in data.train_files"
    for file, size, weight in zip(table.train_files, sizes, table.weights, strict=False):
        drawn = table.train_batch_size * weight / sum(table.weights)
        if drawn > size:
            yield (
                f"data.weights give {file} {drawn:.0f} of the {table.train_batch_size} prompts of a step, and it has "
                f"only {size}: a step takes some of them more than once"
            )
    if not sizes and 0 < len(training) < table.train_batch_size:
        yield (
            f"data.train_batch_size is {table.train_batch_size}, but data.train_files has only {len(training)} "
            "prompts: a step takes some of them more than once"
        )
    evaluated = {problem.data_source for problem in validation[: table.val_size]}
    if left_out := sorted({problem.data_source for problem in validation} - evaluated):
        yield (
            f"data.val_size = {table.val_size} leaves out all held-out problems of {', '.join(map(repr, left_out))}; "
            "raise it, or mix the rows of data.val_files"
        )
    if encoded := sum(map(_is_json, training)):
        yield f"data.train_files: {encoded} of {len(training)} prompts are JSON, which the model sees as text"
    if answers and (empty := sum(not problem.answer for problem in training)):
        yield f"data.train_files: {empty} of {len(training)} ground truths are empty: the model learns to say nothing"
    yield from _special("data.train_files", training, tokenizer, answers)
    yield from _special("data.val_files", validation, tokenizer, False)


def of_template(problems: Sequence[Problem], table: DataConfig, tokenizer: Any) -> Iterator[str]:
    """Yields a line if the chat template prints the date, and for each argument that the template does not use.

    Args:
        problems: the problems, whose rows may have arguments of their own.
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer, with the run's arguments.
    """
    if prints_date(tokenizer):
        yield (
            f"the chat template prints the date; this run prints {table.date} on all days (data.date sets another)"
        )
    text = template_text(tokenizer)
    for name in sorted({*table.chat_template_kwargs, *(n for one in problems for n in one.chat_template_kwargs)}):
        if not re.search(rf"\b{re.escape(name)}\b", text):
            yield f"chat_template_kwargs.{name} has no effect: the chat template has no variable of that name"
    if re.search(r"\b(m|msg|message)\s*\|\s*tojson", text):
        return  # it shows all fields
    unread = Counter(name for one in problems for name in _fields(one) if not re.search(rf"\b{name}\b", text))
    if unread and tokenizer.chat_template is not None:
        fields = ", ".join(f"{name} ({count} rows)" for name, count in sorted(unread.items()))
        yield f"the chat template does not show these fields of messages, so the model does not see them: {fields}"


def _fields(problem: Problem) -> set[str]:
    """Returns the names of fields of a problem's messages, without role, content and marks that are followed."""
    said: list[Any] = [*getattr(problem, "chosen", ()), *getattr(problem, "rejected", ())]
    parts: list[Any] = [problem.prompt, getattr(problem, "messages", ()), *said]
    messages = [message for part in parts if not isinstance(part, str) for message in part]
    names = {name for message in messages for name in message}
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    followed = MARKS if said or parts[1] else ()
    return (names | {name for call in calls for name in call}) - {"role", "content", "function", "type", *followed}


def _is_json(problem: Problem) -> bool:
    if not isinstance(problem.prompt, str) or not problem.prompt.lstrip().startswith(("{", "[")):
        return False
    try:
        return isinstance(json.loads(problem.prompt), dict | list)
    except (ValueError, RecursionError):
        return False


def _special(key: str, problems: Sequence[Problem], tokenizer: Any, answers: bool) -> Iterator[str]:
    """Yields a line if texts contain special tokens, which the tokenizer reads as control tokens, not as text."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if not special:
        return
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    places = []
    for problem in problems:
        texts = _strings(problem.prompt) + ([problem.answer] if answers else [])
        if match := next(filter(None, map(pattern.search, texts)), None):
            places.append((problem, match[0]))
    if places:
        first, token = places[0]
        yield (
            f"{key}: {len(places)} of {len(problems)} problems have special tokens in their texts, such as {token!r} "
            f"in problem {first.id} of {first.data_source!r}; they become control tokens"
        )


def _strings(value: Any) -> list[str]:
    """Returns all strings in a prompt.

    Example:
        >>> _strings(({"role": "user", "content": "hi"},))
        ['user', 'hi']
    """
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [string for one in inner for string in _strings(one)]


def _hashable(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
