"""Rows to learn from, made of problems that hold their answers: a prompt, a response, and a mask of the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_fn.backends.hf.config import ModelError
from verl_fn.data.columns import Messages
from verl_fn.data.conversations import Conversation, turn_tokens
from verl_fn.data.files import describe_unknown, encode_answers, encode_prompts, has_unknown, label_of, token_ids
from verl_fn.data.judged import Judged
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch

Example = tuple[list[int], list[float]]
"""The tokens of a row, and its ``response_mask``."""


def encode_examples(problems: Sequence[Problem], tokenizer: Any, end_token: int) -> list[Example]:
    """Returns the rows of problems: one for an answer or a conversation, one for each response of a judged problem.

    Args:
        problems: what is learned from.
        tokenizer: the model's tokenizer.
        end_token: the first of the model's ``end_tokens``, at which sampling stops.

    Raises:
        DataError: a prompt or a response has characters that the tokenizer does not know, or its template cannot
            render a conversation turn by turn.
    """
    answered = [p for p in problems if not isinstance(p, Conversation | Judged)]
    prompts = encode_prompts(answered, tokenizer)
    answers = encode_answers(answered, tokenizer, end_token)
    rows = iter([(p + a, [0.0] * len(p) + [1.0] * len(a)) for p, a in zip(prompts, answers, strict=True)])
    examples: list[Example] = []
    for problem in problems:
        if isinstance(problem, Conversation):
            examples.append(_turns(problem, problem.messages, 0, tokenizer, end_token))
        elif isinstance(problem, Judged):
            examples += _responses(problem, tokenizer, end_token)
        else:
            examples.append(next(rows))
    return examples


def pack_examples(problems: Sequence[Problem], tokenizer: Any, end_token: int) -> Batch:
    """Packs the rows of ``encode_examples``; ``response_mask`` marks answer and end token.

    Args:
        problems: their answers are what is learned.
        tokenizer: the model's tokenizer.
        end_token: the first of the model's ``end_tokens``, at which sampling stops.

    Raises:
        DataError: as ``encode_examples``.
    """
    return _packed(encode_examples(problems, tokenizer, end_token))


def pack_pairs(problems: Sequence[Judged], tokenizer: Any, end_token: int) -> Batch:
    """Packs two rows for each pair, with the per-row fields ``pair``, the problem's id, and ``chosen``, 1 or 0.

    Args:
        problems: each has one chosen and one rejected response.
        tokenizer: the model's tokenizer.
        end_token: the first of the model's ``end_tokens``, at which sampling stops.

    Raises:
        DataError: as ``encode_examples``.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> pair = Judged("a>", "b", id=7, chosen=("b",), rejected=("bb",))
        >>> batch = pack_pairs([pair], char_tokenizer("ab>"), end_token=2)
        >>> batch.lengths.tolist(), batch["pair"].tolist(), batch["chosen"].tolist()
        ([5, 6], [7, 7], [1.0, 0.0])
    """
    batch = _packed(encode_examples(problems, tokenizer, end_token))
    judged = [(problem.id, good) for problem in problems for _, good in problem.responses]
    return batch.with_rows(
        pair=torch.tensor([number for number, _ in judged]), chosen=torch.tensor([float(good) for _, good in judged])
    )


def pack_labelled(problems: Sequence[Judged], tokenizer: Any, end_token: int) -> Batch:
    """Packs a row for each response, with the per-row fields ``label``, 1 for a good one, and ``mismatched``.

    Behind them are as many rows with ``mismatched`` 1: each prompt with the response to the next problem's prompt, or
    the last one's with the first one's, from which ``kto_reference_point`` is estimated.

    Args:
        problems: have responses each.
        tokenizer: the model's tokenizer.
        end_token: the first of the model's ``end_tokens``, at which sampling stops.

    Raises:
        DataError: as ``encode_examples``, or there is only one problem.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> one, two = Judged("a>", "a", chosen=("a",)), Judged("b>", "b", rejected=("bb",))
        >>> batch = pack_labelled([one, two], char_tokenizer("ab>"), end_token=2)
        >>> batch["label"].tolist(), batch["mismatched"].tolist(), batch.lengths.tolist()
        ([1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0], [5, 6, 6, 5])
    """
    if len(problems) < 2:
        raise DataError("kto compares responses with those to other prompts; set data.train_batch_size to at least 2")
    examples = encode_examples(problems, tokenizer, end_token)
    labels = [float(good) for problem in problems for _, good in problem.responses]
    splits = [(ids[: mask.index(1.0)], ids[mask.index(1.0) :], mask[mask.index(1.0) :]) for ids, mask in examples]
    counts = [len(problem.responses) for problem in problems]
    # Rows of the next problem begin where those of this one end.
    owner = [i for i, count in enumerate(counts) for _ in range(count)]
    first = [sum(counts[:i]) for i in range(len(counts))]
    others = []
    for (prompt, _, _), place in zip(splits, owner, strict=True):
        _, response, mask = splits[first[(place + 1) % len(problems)]]
        others.append((prompt + response, [0.0] * len(prompt) + mask))
    zeros, ones = [0.0] * len(examples), [1.0] * len(examples)
    return _packed([*examples, *others]).with_rows(
        label=torch.tensor(labels + labels), mismatched=torch.tensor(zeros + ones)
    )


def _packed(examples: Sequence[Example]) -> Batch:
    return Batch.from_rows([ids for ids, _ in examples], {"response_mask": [mask for _, mask in examples]})


def _responses(problem: Judged, tokenizer: Any, end_token: int) -> list[Example]:
    rows: list[Example] = []
    (prompt,) = encode_prompts([problem], tokenizer)
    for response, _ in problem.responses:
        if not isinstance(response, str):
            assert not isinstance(problem.prompt, str)  # checked where files are read
            rows.append(_turns(problem, problem.prompt + response, len(problem.prompt), tokenizer, end_token))
            continue
        (ids,) = token_ids([response], tokenizer)
        if has_unknown(ids, tokenizer):
            raise DataError(f"{label_of(problem)}: {describe_unknown('response', response, tokenizer)}")
        rows.append(([*prompt, *ids, end_token], [0.0] * len(prompt) + [1.0] * (len(ids) + 1)))
    return rows


def _turns(problem: Problem, messages: Messages, start: int, tokenizer: Any, end_token: int) -> Example:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{label_of(problem)}: it is a list of chat messages, and the tokenizer has no chat template; use a "
            "tokenizer folder with chat_template.jinja"
        )
    try:
        ids, mask = turn_tokens(tokenizer, messages, end_token, start, problem.chat_template_kwargs, problem.tools)
    except (DataError, ModelError) as error:
        raise DataError(f"{label_of(problem)}: {error}") from error
    if has_unknown(ids, tokenizer):
        raise DataError(f"{label_of(problem)}: {describe_unknown('messages', messages, tokenizer)}")
    return ids, mask
