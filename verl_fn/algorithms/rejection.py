"""Rejection sampling: fine-tuning on the best of several sampled responses (Dong et al. 2023, arXiv 2304.06767)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from verl_fn.config.algorithms import Rejection
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, conversations
from verl_fn.steps import aggregate, cross_entropy

from .algorithm import ActorState, Algorithm
from .by_conversation import whole_conversations
from .contract import Experience, Report
from .experience import draw, loss_scale, update
from .policy import aggregation
from .reports import timing_report, update_report
from .workers import Clock, Workers


def rejection(options: Rejection) -> Algorithm[ActorState]:
    """Makes rejection sampling: a step samples groups of responses and fine-tunes on the best of each group.

    A step in which no response is good enough changes no weights.

    Example:
        >>> rejection(Rejection()).outline.min_n
        2

    Source:
        Dong et al. 2023, arXiv 2304.06767.
    """
    loss = cross_entropy()

    def sample(state: ActorState, problems: Sequence[Problem], w: Workers) -> Experience:
        experience = draw(state, problems, w)
        # The rows that are left out here count as dropped by the algorithm.
        return attrs.evolve(experience, batch=best_of_groups(experience.batch, options.min_score))

    def learn(state: ActorState, experience: Experience, w: Workers) -> tuple[ActorState, Report]:
        clock, actor = Clock(w.get, experience.seconds), state.actor
        rows, score, tokens = summary(experience.batch)
        report = {"rejection/rows_kept": float(rows), "perf/total_num_tokens": float(tokens)} | experience.report
        if rows:
            scale = loss_scale(options, w)
            batch = aggregate(experience.batch, aggregation(options), loss_scale_factor=scale)
            actor, metrics = clock.run("update_actor", update, w.trainers["actor"], actor, [batch], loss)
            report |= {"rejection/score/mean": score} | update_report("actor", metrics)
        report |= timing_report(clock, float(tokens))
        return ActorState(actor, state.key, state.step + 1), report

    return Algorithm(sample=sample, learn=learn, outline=options.outline)


def best_of_groups(batch: Batch, min_score: float | None = None) -> Batch:
    """Returns all rows of the conversation with the highest score of each group, the first of several.

    Without conversations, each row is one. Groups keep their order.

    Args:
        batch: has ``group``, ``score`` and ``response_mask``; what has no response token is never the best.
        min_score: groups whose best conversation has less are left out.

    Example:
        >>> fields = {"group": [4, 4, 9, 9], "score": [0.0, 1.0, 0.5, 0.5]}
        >>> batch = Batch.from_rows([[1], [2], [3], [4]], {"response_mask": [[1.0]] * 4}, fields)
        >>> best_of_groups(batch).tokens.tolist(), best_of_groups(batch, 1.0).tokens.tolist()
        ([2, 3], [2])
    """
    whole = whole_conversations(batch)
    live = (whole.sum_rows((whole["response_mask"] != 0).float()) > 0).tolist()
    best: dict[int, tuple[float, int]] = {}
    for number, (group, score) in enumerate(zip(whole["group"].tolist(), whole["score"].tolist(), strict=True)):
        good = live[number] and (min_score is None or score >= min_score)
        if good and (group not in best or score > best[group][0]):
            best[group] = (score, number)
    chosen = torch.tensor([number for _, number in best.values()], dtype=torch.int64)
    return batch.take(torch.isin(conversations(batch)[0], chosen))


def summary(batch: Batch) -> tuple[int, float, int]:
    """Returns the number of rows, the mean score of their conversations, and the number of tokens."""
    scores = batch["score"][conversations(batch)[1]].double()
    return len(batch), float(scores.mean()) if len(batch) else 0.0, batch.num_tokens
