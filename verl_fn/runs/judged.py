"""Metrics of judged answers to held-out problems, by data source, under verl's names, and the answers as rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl_fn.algorithms import Report
from verl_fn.data.tasks import Problem, text_of
from verl_fn.rewards.reward import joined, response_texts
from verl_fn.state import Batch, conversations

Evaluation = tuple[Report, list[dict[str, Any]]]


def judged(batch: Batch, problems: Sequence[Problem], tokenizer: Any, end_tokens: Sequence[int]) -> Evaluation:
    """Returns accuracy and reward by data source, and every answer as a row.

    As in verl, the reward is the core metric where the reward functions return no ``acc``.

    Args:
        batch: scored rows, or conversations of one or several rows, the same number for each problem.
        problems: the held-out problems.
        tokenizer: decodes the answers.
        end_tokens: those of the model, which are no part of an answer's text.
    """
    conversation, last = conversations(batch)
    texts = joined(response_texts(batch, tokenizer, end_tokens), conversation)
    batch = batch.take(last)
    n = len(batch) // len(problems)
    score, pred = (batch[name].reshape(-1, n) for name in ("score", "pred"))
    acc = batch["acc"].reshape(-1, n) if "acc" in batch else None
    report: dict[str, float] = {}
    for source in dict.fromkeys(p.data_source for p in problems):
        rows = torch.tensor([p.data_source == source for p in problems])
        if acc is not None:
            report |= spread(f"val-core/{source}/acc", acc[rows], pred[rows])
            report |= {f"val-aux/{source}/acc/pass@{k}": pass_at(acc[rows], k) for k in _ks(n)}
            report |= spread(f"val-aux/{source}/reward", score[rows])
        else:
            report |= spread(f"val-core/{source}/reward", score[rows], pred[rows])
    return report, _rows(batch, problems, texts)


def _rows(batch: Batch, problems: Sequence[Problem], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the answers as rows; ``problem`` is the number of the problem, ``sample`` that of its answer."""
    n = len(batch) // len(problems)
    prompts = [text_of(problem.prompt) for problem in problems]
    values = {name: field.tolist() for name, field in batch.per_row.items() if name.startswith("reward/")}
    score, finished = batch["score"].tolist(), batch["finished"].tolist()
    acc = batch["acc"].tolist() if "acc" in batch else [None] * len(batch)
    return [
        {
            "data_source": problems[i // n].data_source,
            "problem": problems[i // n].id,
            "sample": i % n,
            "prompt": prompts[i // n],
            "response": response,
            "answer": problems[i // n].answer,
            "score": score[i],
            "acc": acc[i],
            "finished": bool(finished[i]),
        }
        | {name: field[i] for name, field in values.items()}
        for i, response in enumerate(texts)
    ]


def spread(name: str, values: torch.Tensor, pred: torch.Tensor | None = None) -> dict[str, float]:
    """Returns the mean, the best and the majority value of the N answers to each problem, averaged over problems.

    Args:
        name: the first part of the metrics' names.
        values: the value of each answer, [problems, N].
        pred: a number that stands for each final answer, [problems, N]. The majority value is that of the most
            frequent final answer; among equally frequent ones the first counts.

    Example:
        >>> values = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
        >>> spread("acc", values, torch.tensor([[5, 7, 7], [5, 6, 5]]))
        {'acc/mean@3': 0.5, 'acc/best@3/mean': 1.0, 'acc/maj@3/mean': 0.5}
    """
    n = values.shape[1]
    report = {f"{name}/mean@{n}": float(values.mean())}
    if n > 1:
        report[f"{name}/best@{n}/mean"] = float(values.max(dim=1).values.mean())
    if n > 1 and pred is not None:
        majority = [
            row[preds.index(Counter(preds).most_common(1)[0][0])]
            for row, preds in zip(values.tolist(), pred.tolist(), strict=True)
        ]
        report[f"{name}/maj@{n}/mean"] = sum(majority) / len(majority)
    return report


def pass_at(acc: torch.Tensor, k: int) -> float:
    """Estimates the probability that at least one of k answers to a problem is right, averaged over problems.

    With c right ones among n answers, 1 - C(n - c, k) / C(n, k) is the share of all choices of k answers that have a
    right one. Its mean over draws of the n answers is exact for every n of at least k, while 1 - (1 - c / n)^k is too
    low. An answer is right if its ``acc`` is at least 1.

    Args:
        acc: of each answer, [problems, n].
        k: at most n.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, https://arxiv.org/abs/2107.03374.

    Example:
        >>> acc = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        >>> pass_at(acc, 1), pass_at(acc, 2), pass_at(acc, 4)
        (0.125, 0.25, 0.5)
    """
    n = acc.shape[1]
    right = (acc >= 1).sum(dim=1).tolist()
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for c in right) / len(right)


def _ks(n: int) -> Iterator[int]:
    """Yields the powers of two up to n; none for a single answer, whose pass@1 is its mean."""
    k = 1
    while 1 < n >= k:
        yield k
        k *= 2
