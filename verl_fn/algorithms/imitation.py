"""Imitation: supervised fine-tuning, rejection sampling, and distillation on policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from verl_fn import steps
from verl_fn.config.algorithms import SFT, Distill, Rejection
from verl_fn.data.examples import encode_rows, pack_examples, packed
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, Key, Node, RowImages, TokenOutputs, conversations, node

from .algorithm import ActorState, Algorithm
from .experience import draw, one_update, timing_report, weighted, with_outputs
from .policy import whole_conversations
from .workers import Clock, Experience, Report, Workers

LIKELIEST = "top_ids_1"  # the output with the likeliest token of each place


def sft(options: SFT) -> Algorithm[ActorState]:
    """Makes supervised fine-tuning: a step is one update on the answers to its problems.

    Example:
        >>> list(sft(SFT()).outline.roles)
        ['actor']
    """

    def sample(state: ActorState, problems: Sequence[Problem], w: Workers) -> Experience:
        batch = pack_examples(problems, w.tokenizer, w.end_tokens)
        return Experience(weighted(batch, options, w), len(problems))

    def learn(state: ActorState, experience: Experience, w: Workers) -> tuple[ActorState, Report]:
        return one_update(state, experience.batch, steps.cross_entropy(), experience, w)

    def evaluate(state: ActorState, problems: Sequence[Problem], w: Workers) -> Report:
        images: list[RowImages | None] = []
        groups = encode_rows(problems, w.tokenizer, w.end_tokens, images)
        sources = [problem.data_source for problem, rows in zip(problems, groups, strict=True) for _ in rows]
        batch = packed([row for rows in groups for row in rows], images)
        needs = ("logprobs", LIKELIEST) if w.gives_likeliest else ("logprobs",)
        outputs = w.get(w.trainers["actor"].forward(state.actor.params, batch, needs))
        report = {"val/loss": float(steps.total_loss(steps.cross_entropy(), outputs, weighted(batch, options, w))[0])}
        return report | answer_report(sources, batch, outputs)

    return Algorithm(sample=sample, learn=learn, outline=options.outline, evaluate=evaluate)


def answer_report(sources: Sequence[str], batch: Batch, outputs: TokenOutputs) -> Report:
    """Returns, by data source, the mean of -log p over tokens of held-out answers, and how many are the likeliest.

    Args:
        outputs: ``logprobs``, and ``top_ids_1`` if the backend gives it.

    Example:
        >>> batch = Batch.from_rows([[4, 5, 6]], {"response_mask": [[0.0, 1.0, 1.0]]})
        >>> ids = torch.tensor([[0], [5], [7]])
        >>> outputs = TokenOutputs({"logprobs": torch.tensor([0.0, -1.0, -2.0]), "top_ids_1": ids})
        >>> answer_report(["mine"], batch, outputs)
        {'val-aux/mine/nll/mean@1': 1.5, 'val-aux/mine/token_acc/mean@1': 0.5}
    """
    report: Report = {}
    for source in dict.fromkeys(sources):
        own = torch.tensor([name == source for name in sources])[batch.row_ids] & (batch["response_mask"] != 0)
        report[f"val-aux/{source}/nll/mean@1"] = float(-outputs.logprobs[own].double().mean())
        if LIKELIEST in outputs.by_name:
            right = outputs.by_name[LIKELIEST][:, 0] == batch.tokens
            report[f"val-aux/{source}/token_acc/mean@1"] = float(right[own].double().mean())
    return report


def rejection(options: Rejection) -> Algorithm[ActorState]:
    """Makes rejection sampling: a step samples groups of responses and fine-tunes on the best of each group.

    A step in which no response is good enough changes no weights.

    Example:
        >>> rejection(Rejection()).outline.min_n
        2

    Source:
        Dong et al. 2023, arXiv 2304.06767.
    """
    loss = steps.cross_entropy()

    def sample(state: ActorState, problems: Sequence[Problem], w: Workers) -> Experience:
        experience = draw(state, problems, w)
        # The rows that are left out here count as dropped by the algorithm.
        return attrs.evolve(experience, batch=best_of_groups(experience.batch, options.min_score))

    def learn(state: ActorState, experience: Experience, w: Workers) -> tuple[ActorState, Report]:
        clock, batch = Clock(w.get, experience.seconds), experience.batch
        if not len(batch):
            report = {"rejection/rows_kept": 0.0, "perf/total_num_tokens": 0.0} | experience.report
            return attrs.evolve(state, step=state.step + 1), report | timing_report(clock, 0.0)
        # Fine-tuning fits the model at temperature 1, whatever the temperature of the draws.
        batch = weighted(batch, options, w).without("temperature")
        after, report = one_update(state, batch, loss, experience, w, clock, "actor")
        return after, report | {"rejection/rows_kept": float(len(batch)), "rejection/score/mean": mean_score(batch)}

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


def mean_score(batch: Batch) -> float:
    """Returns the mean score of the conversations of a batch."""
    return float(batch["score"][conversations(batch)[1]].double().mean())


@node
class DistillState(Node):
    """The state of a run that distils; the actor is the student.

    Attributes:
        actor: the student's training state.
    """

    actor: Any
    teacher: Any
    key: Key
    step: int


def distill(options: Distill) -> Algorithm[DistillState]:
    """Makes distillation on policy: a step samples from the student and is one update towards the teacher.

    Example:
        >>> distill(Distill(teacher="runs/teacher/model")).outline.roles["teacher"].trained
        False

    Source:
        Agarwal et al. 2023, arXiv 2306.13649.
    """
    loss = steps.distill_top_k(options.kl) if options.top_k else steps.distill(options.kl)
    fields = {"logprobs": "teacher_log_probs"}
    if options.top_k:
        fields = {
            f"top_logprobs_{options.top_k}": "teacher_candidate_log_probs",
            f"top_ids_{options.top_k}": "candidates",
        }

    def init(states: Mapping[str, Any], key: Key) -> DistillState:
        return DistillState(states["actor"], states["teacher"], key, step=0)

    def learn(state: DistillState, experience: Experience, w: Workers) -> tuple[DistillState, Report]:
        clock, batch = Clock(w.get, experience.seconds), experience.batch
        outputs = clock.run("teacher", w.trainers["teacher"].forward, state.teacher.params, batch, tuple(fields))
        batch = weighted(with_outputs(batch, outputs, **fields), options, w)
        return one_update(state, batch, loss, experience, w, clock, "actor")

    return Algorithm(init=init, learn=learn, outline=options.outline)
