"""From responses to scores: texts are read off a batch, judged, and the scores written back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_fn.state import Batch
from verl_fn.steps.aggregate import last_of_rows

from .tasks import Problem, Task


class RewardError(RuntimeError):
    """A reward function that failed, with the row and its text."""


class Reward:
    """Scores the responses of a batch with a task's reward. A response that did not end by itself gets 0."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.task = task
        self.tokenizer = tokenizer

    def __call__(self, batch: Batch, problems: Sequence[Problem]) -> Batch:
        """The batch with ``score`` and ``acc`` a row, and the score on each row's last response token.

        Args:
            problems: the problem of each row, or of each group of equally many consecutive rows.

        Raises:
            RewardError: the reward raised, or returned something that is not a finite number.
        """
        each = len(batch) // len(problems)
        texts = response_texts(batch, self.tokenizer)
        scores = []
        for row, (text, finished) in enumerate(zip(texts, batch["finished"].tolist(), strict=True)):
            scores.append(self._score(row, problems[row // each], text) if finished else 0.0)
        score = torch.tensor(scores, dtype=torch.float32)
        on_last = batch.spread(score) * last_of_rows(batch, batch["response_mask"])
        scored = batch.with_rows(score=score, acc=(score >= 1.0).float())
        return scored.with_tokens(token_level_scores=on_last, token_level_rewards=on_last)

    def _score(self, row: int, problem: Problem, text: str) -> float:
        try:
            score = float(self.task.score(problem, text))
        except Exception as error:
            raise RewardError(f"the reward of {self.task.name!r} failed on row {row}, {text!r}: {error}") from error
        if not -1e30 < score < 1e30:
            raise RewardError(f"the reward of {self.task.name!r} gave {score} for row {row}, {text!r}")
        return score


def response_texts(batch: Batch, tokenizer: Any) -> list[str]:
    """The text of each row's response, special tokens left out."""
    rows = zip(batch.rows(), batch.rows("response_mask"), strict=True)
    ids = [tokens[mask.bool()].tolist() for tokens, mask in rows]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def encode_prompts(problems: Sequence[Problem], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt, after the tokenizer's bos token where it has one.

    Raises:
        ValueError: a prompt has characters that the tokenizer does not know.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    found = [start + tokenizer.encode(p.prompt, add_special_tokens=False) for p in problems]
    for problem, ids in zip(problems, found, strict=True):
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer does not know every character of the prompt {problem.prompt!r}")
    return found


def pack_examples(problems: Sequence[Problem], tokenizer: Any) -> Batch:
    """Prompt, answer and end token of each problem as a row; ``response_mask`` marks answer and end."""
    prompts = encode_prompts(problems, tokenizer)
    answers = [[*tokenizer.encode(p.answer, add_special_tokens=False), tokenizer.eos_token_id] for p in problems]
    mask = [[0.0] * len(p) + [1.0] * len(a) for p, a in zip(prompts, answers, strict=True)]
    return Batch.from_rows([p + a for p, a in zip(prompts, answers, strict=True)], {"response_mask": mask})
