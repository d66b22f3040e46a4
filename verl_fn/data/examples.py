"""Rows to learn from, made of problems that hold their answers: a prompt, a response, and a mask of the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.tokenizer import ended, watched
from verl_fn.data.conversations import Conversation
from verl_fn.data.files import describe_unknown, encode_prompts, has_unknown, label_of, named
from verl_fn.data.images import fill, kept, seen_by
from verl_fn.data.judged import Judged
from verl_fn.data.notices import strings
from verl_fn.data.rendering import Example, Parts, all_ends, encode_parts, token_ids, turn_parts
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, RowImages, with_images


def encode_rows(
    problems: Sequence[Problem],
    tokenizer: Any,
    end_tokens: int | Sequence[int],
    images: list[RowImages | None] | None = None,
) -> list[list[Example]]:
    """Returns the rows of each problem.

    A problem with an answer has one row, and a judged problem one for each response. A conversation has one, or more
    where the chat template renders earlier messages otherwise once more follow.

    Args:
        problems: what is learned from.
        tokenizer: the model's tokenizer.
        end_tokens: the model's ``end_tokens``, or the first of them; it ends answers that no template writes.
        images: gets what each row holds of its images, or None.

    Raises:
        DataError: a prompt or a response has characters that the tokenizer does not know, or its template cannot
            render a conversation turn by turn.
    """
    ends = all_ends(tokenizer, end_tokens)
    rendered = watched(lambda: [_rendered(problem, tokenizer, ends) for problem in problems])
    seen = [_show(problem, parts, tokenizer) for problem, parts in zip(problems, rendered, strict=True)]
    rows = iter(encode_parts([parts for one in rendered for parts in one], tokenizer))
    # String prompts have no template.
    plain = [problem for problem in problems if _is_plain(problem)]
    shown: list[RowImages | None] = []
    prompts = iter(zip(encode_prompts(plain, tokenizer, images=shown), shown, strict=True))
    results, held = [], list[RowImages | None]()
    for problem, parts, of_problem in zip(problems, rendered, seen, strict=True):
        if _is_plain(problem):
            prompt, own = next(prompts)
            results.append(_answers(problem, prompt, tokenizer, ends))
            held += [own] * len(results[-1])
            continue
        results.append([next(rows) for _ in parts])
        for ids, _ in results[-1]:
            with named(problem):
                held.append(kept(ids, of_problem))
            if has_unknown(ids, tokenizer):
                raise DataError(f"{label_of(problem)}: {describe_unknown('messages', _texts(problem), tokenizer)}")
            if ids[-1] not in ends:
                raise DataError(
                    f"{label_of(problem)}: the text of the chat template ends with {tokenizer.decode(ids[-1:])!r}, "
                    "which the tokenizer does not make the token that ends an answer; take another template"
                )
    for problem, examples in zip(problems, results, strict=True):
        if isinstance(problem, Judged) and problem.chosen and problem.rejected and examples[0] == examples[-1]:
            raise DataError(
                f"{label_of(problem)}: chosen and rejected are the same tokens, so neither is preferred; remove the "
                "row"
            )
    if images is not None:
        images += held
    return results


def _show(problem: Problem, rows: list[Parts], tokenizer: Any) -> Any:
    """Returns the images of a problem of chat messages, and writes their tokens into the texts of its rows."""
    if _is_plain(problem):
        return None
    with named(problem):
        seen = seen_by(problem, tokenizer)
        if seen is not None:
            for parts in rows:
                texts = fill([text for text, _ in parts], seen, problem)
                parts[:] = [(text, learned) for text, (_, learned) in zip(texts, parts, strict=True)]
        return seen


def encode_examples(problems: Sequence[Problem], tokenizer: Any, end_tokens: int | Sequence[int]) -> list[Example]:
    """Returns the rows of all problems, one after the other, as ``encode_rows`` makes them.

    Raises:
        DataError: as ``encode_rows``.
    """
    return [row for rows in encode_rows(problems, tokenizer, end_tokens) for row in rows]


def pack_examples(problems: Sequence[Problem], tokenizer: Any, end_tokens: int | Sequence[int]) -> Batch:
    """Packs the rows of ``encode_examples``; ``response_mask`` marks answer and end token.

    Args:
        problems: their answers are what is learned.
        tokenizer: the model's tokenizer.
        end_tokens: as for ``encode_rows``.

    Raises:
        DataError: as ``encode_examples``.
    """
    images: list[RowImages | None] = []
    rows = encode_rows(problems, tokenizer, end_tokens, images)
    return packed([row for of_problem in rows for row in of_problem], images)


def pack_pairs(problems: Sequence[Judged], tokenizer: Any, end_tokens: int | Sequence[int]) -> Batch:
    """Packs two rows for each pair, with the per-row fields ``pair``, the problem's id, and ``chosen``, 1 or 0.

    Args:
        problems: each has one chosen and one rejected response.
        tokenizer: the model's tokenizer.
        end_tokens: as for ``encode_rows``.

    Raises:
        DataError: as ``encode_examples``.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> pair = Judged("a>", "b", id=7, chosen=("b",), rejected=("bb",))
        >>> batch = pack_pairs([pair], char_tokenizer("ab>"), end_tokens=2)
        >>> batch.lengths.tolist(), batch["pair"].tolist(), batch["chosen"].tolist()
        ([5, 6], [7, 7], [1.0, 0.0])
    """
    batch = packed(encode_examples(problems, tokenizer, end_tokens))
    judged = [(problem.id, good) for problem in problems for _, good in problem.responses]
    return batch.with_rows(
        pair=torch.tensor([number for number, _ in judged]), chosen=torch.tensor([float(good) for _, good in judged])
    )


def pack_labelled(problems: Sequence[Judged], tokenizer: Any, end_tokens: int | Sequence[int]) -> Batch:
    """Packs a row for each response, with the per-row fields ``label``, 1 for a good one, and ``mismatched``.

    Behind them are as many rows with ``mismatched`` 1: each prompt with the response to the next problem's prompt, or
    the last one's with the first one's, from which ``kto_reference_point`` is estimated.

    Args:
        problems: have responses each.
        tokenizer: the model's tokenizer.
        end_tokens: as for ``encode_rows``.

    Raises:
        DataError: as ``encode_examples``, or there is only one problem.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> one, two = Judged("a>", "a", chosen=("a",)), Judged("b>", "b", rejected=("bb",))
        >>> batch = pack_labelled([one, two], char_tokenizer("ab>"), end_tokens=2)
        >>> batch["label"].tolist(), batch["mismatched"].tolist(), batch.lengths.tolist()
        ([1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0], [5, 6, 6, 5])
    """
    if len(problems) < 2:
        raise DataError("kto also compares responses to other prompts; set data.train_batch_size to at least 2")
    examples = encode_examples(problems, tokenizer, end_tokens)
    labels = [float(good) for problem in problems for _, good in problem.responses]
    splits = [(ids[: mask.index(1.0)], ids[mask.index(1.0) :], mask[mask.index(1.0) :]) for ids, mask in examples]
    counts = [len(problem.responses) for problem in problems]
    # Rows of the next problem begin where this problem's rows end.
    owner = [i for i, count in enumerate(counts) for _ in range(count)]
    first = [sum(counts[:i]) for i in range(len(counts))]
    others = []
    for (prompt, _, _), place in zip(splits, owner, strict=True):
        _, response, mask = splits[first[(place + 1) % len(problems)]]
        others.append((prompt + response, [0.0] * len(prompt) + mask))
    zeros, ones = [0.0] * len(examples), [1.0] * len(examples)
    return packed([*examples, *others]).with_rows(
        label=torch.tensor(labels + labels), mismatched=torch.tensor(zeros + ones)
    )


def packed(examples: Sequence[Example], images: Sequence[RowImages | None] = ()) -> Batch:
    """Packs rows, their ``response_mask``, and their images if any row has some.

    Example:
        >>> packed([([4, 5], [0.0, 1.0])])["response_mask"].tolist()
        [0.0, 1.0]
    """
    batch = Batch.from_rows([ids for ids, _ in examples], {"response_mask": [mask for _, mask in examples]})
    return with_images(batch, images) if images else batch


def _is_plain(problem: Problem) -> bool:
    return isinstance(problem.prompt, str) and not isinstance(problem, Conversation)


def _rendered(problem: Problem, tokenizer: Any, ends: Sequence[int]) -> list[Parts]:
    """Returns the texts of the rows of a problem of chat messages; none for a string prompt."""
    if _is_plain(problem):
        return []
    if tokenizer.chat_template is None:
        raise DataError(
            f"{label_of(problem)}: it is a list of chat messages, and the tokenizer has no chat template; use a "
            "tokenizer folder with chat_template.jinja (`verl-fn new-model ... --chat-template` writes one)"
        )
    try:
        if isinstance(problem, Conversation):
            return turn_parts(tokenizer, problem, problem.messages, ends)
        responses = [one for one, _ in problem.responses] if isinstance(problem, Judged) else [problem.answer]
        rows = []
        assert not isinstance(problem.prompt, str)
        for response in responses:
            said = ({"role": "assistant", "content": response},) if isinstance(response, str) else response
            rows.append(turn_parts(tokenizer, problem, (*problem.prompt, *said), ends, len(problem.prompt)))
    except (DataError, ModelError) as error:
        raise DataError(f"{label_of(problem)}: {error}") from error
    if any(len(parts) > 1 for parts in rows):
        raise DataError(
            f"{label_of(problem)}: a response has several turns of the assistant, and the chat template renders the "
            "first ones otherwise once more follow, as templates do that drop earlier reasoning; let a response be "
            "one turn, with the turns before it in the prompt, or take another template"
        )
    return [parts for (parts,) in rows]


def _answers(problem: Problem, prompt: list[int], tokenizer: Any, ends: Sequence[int]) -> list[Example]:
    """Returns the rows of a string prompt: its answer, or its responses."""
    kind, texts = "answer", [problem.answer]
    if isinstance(problem, Judged):
        kind, texts = "response", [str(response) for response, _ in problem.responses]
    rows = []
    for text, ids in zip(texts, token_ids(texts, tokenizer), strict=True):
        if has_unknown(ids, tokenizer):
            raise DataError(f"{label_of(problem)}: {describe_unknown(kind, text, tokenizer)}")
        ids = ended(ids, tokenizer, ends)
        if inside := [token for token in ids[:-1] if token in ends]:
            raise DataError(
                f"{label_of(problem)}: the {kind} has {tokenizer.decode(inside[:1])!r}, the token that ends an "
                "answer, before its end, so the rest would never be said; remove it"
            )
        rows.append(([*prompt, *ids], [0.0] * len(prompt) + [1.0] * len(ids)))
    return rows


def _texts(problem: Problem) -> str:
    """Returns all texts of a problem's messages."""
    return "".join(strings((problem.prompt, getattr(problem, "messages", ()), getattr(problem, "responses", ()))))
