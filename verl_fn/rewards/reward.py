"""From responses to scores: texts are read off a batch, judged, and the scores written back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from verl_fn.data.files import encode_answers, encode_prompts
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError
from verl_fn.rewards.worker import short
from verl_fn.state import Batch
from verl_fn.steps.aggregate import last_of_rows

LARGEST = 1e30


class RewardError(UserError, RuntimeError):
    """A reward that cannot be had; the message names the function and the answer."""


@attrs.frozen
class Answer:
    """A response to judge.

    Attributes:
        problem: what was asked.
        text: the response, special tokens left out.
        finished: whether it ended by itself, not at the length limit.
    """

    problem: Problem
    text: str
    finished: bool = True


Judge = Callable[[Sequence[Answer]], list[dict[str, Any]]]
"""Maps answers to ``score``, ``acc``, ``pred`` (the answer as a text) and numbers by other names, for metrics."""


class Reward:
    """Scores the responses of a batch.

    >>> from verl_fn.backends.hf.new_model import char_tokenizer
    >>> rows = Batch.from_rows([[4, 5, 2]], {"response_mask": [[0.0, 1.0, 1.0]]}, {"finished": [1.0]})
    >>> judge = lambda answers: [{"score": 0.5, "acc": 0.0, "pred": a.text, "length": 1} for a in answers]
    >>> scored = Reward(judge, char_tokenizer("ab"))(rows, [Problem("a", "b")])
    >>> scored["token_level_scores"].tolist(), scored["reward/length"].tolist()
    ([0.0, 0.0, 0.5], [1.0])
    """

    def __init__(self, judge: Judge, tokenizer: Any) -> None:
        self.judge = judge
        self.tokenizer = tokenizer

    def __call__(self, batch: Batch, problems: Sequence[Problem]) -> Batch:
        """The batch with what the judge says of each row, and the score on each row's last response token.

        Row fields are ``score``, ``acc``, ``pred`` (a hash of the text, int64) and ``reward/*``, one for each other
        number; token fields are ``token_level_scores`` and ``token_level_rewards``.

        Args:
            problems: the problem of each row, or of each group of equally many consecutive rows.

        Raises:
            RewardError: a reward function failed, a number is not finite, or rows differ in their metrics.
        """
        each = len(batch) // len(problems)
        rows = zip(response_texts(batch, self.tokenizer), batch["finished"].tolist(), strict=True)
        answers = [Answer(problems[i // each], text, bool(finished)) for i, (text, finished) in enumerate(rows)]
        fields = _columns(answers, self.judge(answers))
        on_last = batch.spread(fields["score"]) * last_of_rows(batch, batch["response_mask"])
        return batch.with_rows(**fields).with_tokens(token_level_scores=on_last, token_level_rewards=on_last)


def _columns(answers: Sequence[Answer], judged: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    names = list(dict.fromkeys(name for one in judged for name in one))
    for answer, one in zip(answers, judged, strict=True):
        for name in names:
            if name not in one:
                raise RewardError(f"the reward of {describe(answer)} lacks {name!r}, which other rows have")
            if name != "pred" and not -LARGEST < one[name] < LARGEST:
                raise RewardError(f"the reward of {describe(answer)} has {one[name]} as {name!r}")
    fields = {"pred": torch.tensor([fingerprint(one["pred"]) for one in judged])}
    for name in names:
        if name != "pred":
            field = name if name in ("score", "acc") else f"reward/{name}"
            fields[field] = torch.tensor([one[name] for one in judged], dtype=torch.float32)
    return fields


def describe(answer: Answer) -> str:
    """An answer in an error's words.

    >>> describe(Answer(Problem("2+2?", "4", id=7, data_source="sums"), "5"))
    "problem 7 of 'sums', response '5'"
    """
    return f"problem {answer.problem.id} of {answer.problem.data_source!r}, response {short(answer.text)!r}"


def fingerprint(text: str) -> int:
    """64 bits that stand for a text, the same in every process.

    >>> fingerprint("42") == fingerprint("4" + "2"), fingerprint("42") == fingerprint("43")
    (True, False)
    """
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def response_texts(batch: Batch, tokenizer: Any) -> list[str]:
    """The text of each row's response, special tokens left out."""
    rows = zip(batch.rows(), batch.rows("response_mask"), strict=True)
    ids = [tokens[mask.bool()].tolist() for tokens, mask in rows]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def pack_examples(problems: Sequence[Problem], tokenizer: Any) -> Batch:
    """Prompt, answer and end token of each problem as a row; ``response_mask`` marks answer and end.

    Raises:
        DataError: a text has characters that the tokenizer does not know.
    """
    prompts = encode_prompts(problems, tokenizer)
    answers = encode_answers(problems, tokenizer)
    mask = [[0.0] * len(p) + [1.0] * len(a) for p, a in zip(prompts, answers, strict=True)]
    return Batch.from_rows([p + a for p, a in zip(prompts, answers, strict=True)], {"response_mask": mask})
