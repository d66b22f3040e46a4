"""Rows to learn from, of problems that hold their answers, or of conversations: tokens and a mask of the response.

The assistant's turns are found in what the chat template makes of a conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from verl_fn.backends.hf.tokenizer import ended
from verl_fn.data.columns import (
    BEHIND,
    OPTIONAL,
    Messages,
    check_turns,
    fields_of,
    ground_truth_of,
    learned_turns,
    prompt_of,
)
from verl_fn.data.entries import Kind
from verl_fn.data.files import describe_unknown, encode_prompts, has_unknown, named
from verl_fn.data.images import fill, kept, seen_by
from verl_fn.data.judged import Judged, repeated
from verl_fn.data.rendering import Example, Parts, all_ends, encode_parts, following, turn_parts
from verl_fn.data.rows import DataError, Row, strings
from verl_fn.data.tasks import Problem, Task
from verl_fn.state import Batch, Key, RowImages, with_images

MESSAGES, COMPLETION = "messages", "completion"


@attrs.frozen
class Conversation(Problem):
    """A conversation; its prompt is all before the last turn of the assistant, and that turn is its answer.

    Attributes:
        messages: the conversation up to the last turn of the assistant.
    """

    messages: Messages = ()


def conversation_rows(prompt_key: str = "prompt") -> Kind:
    """Returns the kind of rows with a column ``messages``.

    Optional columns are ``data_source``, ``ability``, ``extra_info``, ``tools``, JSON schemas that the chat template
    shows, ``chat_template_kwargs``, and ``reward_model``: sampled answers are judged by its ``ground_truth``, or else
    by the last turn. The messages must begin with the prompt and end with the ``completion`` if the row has them.
    Messages after the last turn that is learned are left out, and their rows are counted.

    A row is refused if it has no turn of the assistant, begins with one, has one without content, or another prompt.
    """

    def make(place: str, row: Row, number: int, unused: Counter[str]) -> Problem:
        fields = fields_of(place, row, number, MESSAGES)
        images = len(fields["images"])
        value = prompt_of(place, row[MESSAGES], MESSAGES, images)
        if isinstance(value, str):
            raise DataError(f"{place}: {MESSAGES} must be a list of messages, not the string {value!r:.80}")
        check_turns(place, value, MESSAGES)
        first, *_, last = (*learned_turns(value)[:1], *learned_turns(value))
        if first == 0:
            raise DataError(
                f"{place}: {MESSAGES} begins with a turn of the assistant; add what it answers, or mark the turn "
                'with "weight": 0'
            )
        if row.get(prompt_key) is not None:
            _check_prompt(place, prompt_of(place, row[prompt_key], prompt_key, images), value, prompt_key)
        if row.get(COMPLETION) not in (None, "", []):
            _check_completion(place, prompt_of(place, row[COMPLETION], COMPLETION, None), value, last)
        if value[last + 1 :]:
            unused[BEHIND] += 1
        judged_by = row.get("reward_model")
        return Conversation(
            prompt=value[:last],
            answer=value[last]["content"] or "" if judged_by is None else ground_truth_of(place, judged_by),
            **fields,
            messages=value[: last + 1],
        )

    return Kind((MESSAGES,), (prompt_key, COMPLETION, "data_source", "reward_model", *OPTIONAL), make)


def completion_rows(prompt_key: str = "prompt") -> Kind:
    """Returns the kind of rows with prompts and their completions, each a string or chat messages.

    Turns of the assistant in a prompt are not learned. A completion of messages may begin with the prompt. Optional
    are the columns of ``conversation_rows`` other than ``reward_model``.
    """
    required = (prompt_key, COMPLETION)

    def make(place: str, row: Row, number: int, unused: Counter[str]) -> Problem:
        common = fields_of(place, row, number, COMPLETION)
        prompt = prompt_of(place, row[prompt_key], prompt_key, len(common["images"]))
        repeats = bool(common["images"]) and isinstance(row[COMPLETION], list)
        shown = len(common["images"]) if repeats else None
        completion = prompt_of(place, row[COMPLETION], COMPLETION, shown, counted=False)
        if isinstance(completion, str):
            return Problem(prompt, completion, **common)
        begun = repeated(prompt, completion)
        if begun == completion and begun[-1]["role"] == "assistant":
            begun = ()  # both are said once more
        completion = completion[len(begun) :]
        if begun and not learned_turns(completion):
            raise DataError(
                f"{place}: {COMPLETION} repeats {prompt_key}, and nothing behind it is learned; add the turn of the "
                "assistant to learn"
            )
        if repeats:  # the rest shows no image
            prompt_of(place, row[COMPLETION][len(begun) :], COMPLETION, None)
        check_turns(place, completion, COMPLETION)
        before: Messages = prompt if not isinstance(prompt, str) else begun or ({"role": "user", "content": prompt},)
        messages = (*({**m, "weight": 0} if m["role"] == "assistant" else m for m in before), *completion)
        *_, last = learned_turns(messages)
        if messages[last + 1 :]:
            unused[BEHIND] += 1
        answer = messages[last]["content"] or ""
        return Conversation(messages[:last], answer, **common, messages=messages[: last + 1])

    hint = f"required are {' and '.join(required)}, and data.prompt_key names the prompts' column"
    return Kind(required, ("data_source", *OPTIONAL), make, hint)


def _check_prompt(place: str, prompt: str | Messages, messages: Messages, column: str) -> None:
    """Checks that the messages begin with the prompt: with its messages, or with the user's words."""
    words = next((message["content"] for message in messages if message["role"] == "user"), None)
    if prompt != (words if isinstance(prompt, str) else messages[: len(prompt)]):
        raise DataError(
            f"{place}: {MESSAGES} does not begin with {column}, so it is not clear what is learned; correct or "
            f"remove one of them: the user says {words!r:.80}, and {column} is {prompt!r:.80}"
        )


def _check_completion(place: str, completion: str | Messages, messages: Messages, last: int) -> None:
    """Checks that the messages end with the completion, or with its words; space and an end token are no difference.

    Args:
        completion: as the row has it.
        messages: all of the row.
        last: the number of the last one that is learned.
    """
    if isinstance(completion, str):
        rest = completion.strip().removeprefix(said := str(messages[last]["content"]).strip())
        agrees = completion.strip().startswith(said) and (not rest or (rest[0] + rest[-1] == "<>"))
    else:
        turns = [(m["role"], str(m["content"]).strip()) for m in completion]
        ends = (messages, messages[: last + 1])
        agrees = turns in [[(m["role"], str(m["content"]).strip()) for m in end[-len(turns) :]] for end in ends]
    if not agrees:
        raise DataError(
            f"{place}: {MESSAGES} does not end with {COMPLETION}, so it is not clear what is learned; correct or "
            f"remove one of them: the assistant says {messages[last]['content']!r:.80}, and {COMPLETION} is "
            f"{completion!r:.80}"
        )


@attrs.frozen(eq=False)
class TaskDialogues:
    """A generated task whose conversations are learned from; held-out problems are the task's.

    Attributes:
        task: has a ``dialogue``.
        max_row: tokens of the longest conversation, with a line break, end or begin token for each message.

    Example:
        >>> from verl_fn.data.tasks import TASKS
        >>> problem = TaskDialogues(TASKS["calculator"]).train(Key.from_seed(0), 0, 1)[0]
        >>> [message["content"] for message in problem.messages]
        ['78*97', '=78*97', '7566', '7566']
    """

    task: Task

    @property
    def max_prompt(self) -> int:
        """Returns the length of the task's longest prompt."""
        return self.task.max_prompt

    @property
    def max_row(self) -> int:
        """Returns the tokens of the longest conversation: the most messages of 64, each as long as the longest."""
        longest = max(self.task.max_prompt, self.task.max_answer) + 2
        return max(len(one.messages) for one in self.train(Key.from_seed(0), 0, 64)) * longest

    def train(self, key: Key, start: int, count: int) -> tuple[Conversation, ...]:
        """Returns the conversations of the task's problems ``start`` to ``start + count``."""
        return tuple(self._of(problem) for problem in self.task.train(key, start, count))

    def held_out(self, count: int | None) -> tuple[Conversation, ...]:
        """Returns the task's held-out problems with conversations; an evaluation lets the model talk about them."""
        problems = self.task.held_out(count)
        return tuple(
            attrs.evolve(self._of(problem), prompt=problem.prompt, answer=problem.answer) for problem in problems
        )

    def _of(self, problem: Problem) -> Conversation:
        assert self.task.dialogue is not None
        messages = self.task.dialogue(problem)
        prompt, answer = messages[:-1], messages[-1]["content"]
        return Conversation(prompt, answer, id=problem.id, data_source=problem.data_source, messages=messages)


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
        end_tokens: the model's ``end_tokens``, or the first of them; it ends answers that no template writes.
        images: gets what each row holds of its images, or None.

    Raises:
        DataError: a prompt or a response has characters that the tokenizer does not know, or its template cannot
            render a conversation turn by turn.
    """
    ends = all_ends(tokenizer, end_tokens)
    rendered = [_rendered(problem, tokenizer, ends) for problem in problems]
    seen = [_show(problem, parts, tokenizer) for problem, parts in zip(problems, rendered, strict=True)]
    rows = iter(encode_parts([parts for one in rendered for parts in one], tokenizer))
    # String prompts have no template.
    plain = [problem for problem in problems if _is_plain(problem)]
    shown: list[RowImages | None] = []
    prompts = iter(zip(encode_prompts(plain, tokenizer, images=shown), shown, strict=True))
    results, held = [], list[RowImages | None]()
    for problem, parts, of_problem in zip(problems, rendered, seen, strict=True):
        with named(problem):
            if _is_plain(problem):
                prompt, own = next(prompts)
                examples = _answers(problem, prompt, tokenizer, ends)
                held += [own] * len(examples)
            else:
                examples = [next(rows) for _ in parts]
                for ids, _ in examples:
                    _check_rendered(problem, ids, tokenizer, ends)
                    held.append(kept(ids, of_problem))
            if isinstance(problem, Judged) and problem.chosen and problem.rejected and examples[0] == examples[-1]:
                raise DataError("chosen and rejected are the same tokens, so neither is preferred; remove the row")
        results.append(examples)
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
    rows = encode_rows(problems, tokenizer, end_tokens)
    examples = [row for of_problem in rows for row in of_problem]
    others = []
    for of_problem, ((response, said), *_) in zip(rows, [*rows[1:], rows[0]], strict=True):
        start = said.index(1.0)
        for ids, mask in of_problem:
            prompt = ids[: mask.index(1.0)]
            others.append((prompt + response[start:], [0.0] * len(prompt) + said[start:]))
    labels = [float(good) for problem in problems for _, good in problem.responses]
    mismatched = [0.0] * len(examples) + [1.0] * len(others)
    return packed([*examples, *others]).with_rows(
        label=torch.tensor(labels + labels), mismatched=torch.tensor(mismatched)
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
    with named(problem):
        if isinstance(problem, Conversation):
            return turn_parts(tokenizer, problem, problem.messages, ends)
        responses = [one for one, _ in problem.responses] if isinstance(problem, Judged) else [problem.answer]
        rows = []
        assert not isinstance(problem.prompt, str)
        for response in responses:
            said = ({"role": "assistant", "content": response},) if isinstance(response, str) else response
            rows.append(turn_parts(tokenizer, problem, (*problem.prompt, *said), ends, len(problem.prompt)))
        if any(len(parts) > 1 for parts in rows):
            raise DataError(
                "a response has several turns of the assistant, and the chat template renders the first ones "
                "otherwise once more follow, as templates do that drop earlier reasoning; let a response be one "
                "turn, with the turns before it in the prompt, or take another template"
            )
    return [parts for (parts,) in rows]


def _check_rendered(problem: Problem, ids: list[int], tokenizer: Any, ends: Sequence[int]) -> None:
    if has_unknown(ids, tokenizer):
        texts = (problem.prompt, getattr(problem, "messages", ()), getattr(problem, "responses", ()))
        raise DataError(describe_unknown("messages", "".join(strings(texts)), tokenizer))
    if ids[-1] not in ends:
        raise DataError(
            f"the text of the chat template ends with {tokenizer.decode(ids[-1:])!r}, which the tokenizer does not "
            "make the token that ends an answer; take another template"
        )


def _answers(problem: Problem, prompt: list[int], tokenizer: Any, ends: Sequence[int]) -> list[Example]:
    """Returns the rows of a string prompt: its answer, or its responses."""
    kind, texts = "answer", [problem.answer]
    if isinstance(problem, Judged):
        kind, texts = "response", [str(response) for response, _ in problem.responses]
    rows = []
    for text, ids in zip(texts, following(texts, tokenizer), strict=True):
        if has_unknown(ids, tokenizer):
            raise DataError(describe_unknown(kind, text, tokenizer))
        ids = ended(ids, tokenizer, ends)
        if inside := [token for token in ids[:-1] if token in ends]:
            raise DataError(
                f"the {kind} has {tokenizer.decode(inside[:1])!r}, the token that ends an answer, before its end, so "
                "the rest would never be said; remove it"
            )
        rows.append(([*prompt, *ids], [0.0] * len(prompt) + [1.0] * len(ids)))
    return rows
