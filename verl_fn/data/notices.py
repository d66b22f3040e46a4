"""Notices about problems from files: what a run can be trained on, but its user may not have meant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from verl_fn.backends.hf.tokenizer import prints_date, template_text
from verl_fn.config.schema import DataConfig
from verl_fn.data.files import label_of
from verl_fn.data.tasks import Problem
from verl_fn.data.traits import (
    EMPTY,
    JSON,
    SPECIAL,
    SPECIAL_ANSWER,
    Traits,
    special_pattern,
    strings,
    traits_of,
)


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
    trained, held_out = traits_of(training, tokenizer), traits_of(validation, tokenizer)
    different = np.unique(trained.prompts)
    if repeated := len(trained) - len(different):
        yield f"data.train_files: {repeated} of {len(trained)} prompts repeat an earlier one"
    if known := int(np.isin(held_out.prompts, different).sum()):
        yield f"data.val_files: {known} of {len(held_out)} held-out prompts are also in data.train_files"
    for file, size, weight in zip(table.train_files, sizes, table.weights, strict=False):
        drawn = table.train_batch_size * weight / sum(table.weights)
        if drawn > size:
            yield (
                f"data.weights give {file} {drawn:.0f} of the {table.train_batch_size} prompts of a step, and it has "
                f"only {size}: a step takes some of them more than once"
            )
    if not sizes and 0 < len(trained) < table.train_batch_size:
        yield (
            f"data.train_batch_size is {table.train_batch_size}, but data.train_files has only {len(trained)} "
            "prompts: a step takes some of them more than once"
        )
    evaluated = {group.data_source for group, _ in held_out[: table.val_size].rows_of()}
    if left_out := sorted({group.data_source for group, _ in held_out.rows_of()} - evaluated):
        yield (
            f"data.val_size = {table.val_size} leaves out all held-out problems of {', '.join(map(repr, left_out))}; "
            "raise it, or mix the rows of data.val_files"
        )
    if encoded := trained.count(JSON):
        yield f"data.train_files: {encoded} of {len(trained)} prompts are JSON, which the model sees as text"
    if answers and (empty := trained.count(EMPTY)):
        yield f"data.train_files: {empty} of {len(trained)} ground truths are empty: the model learns to say nothing"
    yield from _special("data.train_files", training, trained, tokenizer, answers)
    yield from _special("data.val_files", validation, held_out, tokenizer, False)


def of_template(traits: Traits, table: DataConfig, tokenizer: Any) -> Iterator[str]:
    """Yields a line if the chat template prints the date, and for each argument that the template does not use.

    Args:
        traits: of the problems; their rows may have arguments of their own.
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer, with the run's arguments.
    """
    if prints_date(tokenizer):
        yield (
            f"the chat template prints the date; this run prints {table.date} on all days (data.date sets another)"
        )
    text = template_text(tokenizer)
    groups = traits.rows_of()
    for name in sorted({*table.chat_template_kwargs, *(n for group, _ in groups for n in group.arguments)}):
        if not re.search(rf"\b{re.escape(name)}\b", text):
            yield f"chat_template_kwargs.{name} has no effect: the chat template has no variable of that name"
    if re.search(r"\b(m|msg|message)\s*\|\s*tojson", text):
        return  # it shows all fields
    unread: Counter[str] = Counter()
    for group, count in groups:
        unread.update({name: count for name in group.fields if not re.search(rf"\b{name}\b", text)})
    if unread and tokenizer.chat_template is not None:
        fields = ", ".join(f"{name} ({count} rows)" for name, count in sorted(unread.items()))
        yield f"the chat template does not show these fields of messages, so the model does not see them: {fields}"


def _special(key: str, problems: Sequence[Problem], traits: Traits, tokenizer: Any, answers: bool) -> Iterator[str]:
    """Yields a line if the tokenizer reads special tokens in texts as control tokens, not as text."""
    places = np.flatnonzero(traits.flags & (SPECIAL | SPECIAL_ANSWER if answers else SPECIAL))
    pattern = special_pattern(tokenizer)
    if not len(places) or pattern is None:
        return
    first = problems[int(places[0])]
    token = next(filter(None, map(pattern.search, [*strings(first.prompt), first.answer])))[0]
    yield (
        f"{key}: {len(places)} of {len(problems)} problems have special tokens in their texts, such as {token!r} "
        f"in {label_of(first)}; they become control tokens"
    )
