"""Supervised fine-tuning on the problems' own answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_fn.config.algorithms import SFT
from verl_fn.data.examples import encode_rows, pack_examples, packed
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, TokenOutputs
from verl_fn.steps import aggregate, cross_entropy, total_loss

from .algorithm import ActorState, Algorithm
from .contract import Experience, Report
from .experience import loss_scale, update
from .policy import aggregation
from .reports import timing_report, update_report
from .workers import Clock, Workers

LIKELIEST = "top_ids_1"  # the output with the likeliest token of each place


def sft(options: SFT) -> Algorithm[ActorState]:
    """Makes supervised fine-tuning: a step is one update on the answers to its problems.

    Example:
        >>> list(sft(SFT()).outline.roles)
        ['actor']
    """

    def sample(state: ActorState, problems: Sequence[Problem], w: Workers) -> Experience:
        batch = pack_examples(problems, w.tokenizer, w.end_tokens)
        batch = aggregate(batch, aggregation(options), loss_scale_factor=loss_scale(options, w))
        return Experience(batch, len(problems), report={"train/global_tokens": float(batch.num_tokens)})

    def learn(state: ActorState, experience: Experience, w: Workers) -> tuple[ActorState, Report]:
        clock = Clock(w.get, experience.seconds)
        batches = [experience.batch]
        actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, batches, cross_entropy())
        report = update_report("train", metrics) | experience.report
        report |= timing_report(clock, report["train/global_tokens"])
        return ActorState(actor, state.key, state.step + 1), report

    def evaluate(state: ActorState, problems: Sequence[Problem], w: Workers) -> Report:
        groups = encode_rows(problems, w.tokenizer, w.end_tokens)
        sources = [problem.data_source for problem, rows in zip(problems, groups, strict=True) for _ in rows]
        batch = packed([row for rows in groups for row in rows])
        needs = ("logprobs", LIKELIEST) if w.gives_likeliest else ("logprobs",)
        outputs = w.get(w.trainers["actor"].forward(state.actor.params, batch, needs))
        weighted = aggregate(batch, options.loss_agg_mode, loss_scale_factor=loss_scale(options, w))
        report = {"val/loss": float(total_loss(cross_entropy(), outputs, weighted)[0])}
        return report | answer_report(sources, batch, outputs)

    return Algorithm(sample=sample, learn=learn, outline=options.outline, evaluate=evaluate)


def answer_report(sources: Sequence[str], batch: Batch, outputs: TokenOutputs) -> Report:
    """Returns, by data source, the mean of -log p over tokens of held-out answers, and how many are the likeliest.

    Args:
        sources: the data source of each row.
        batch: the rows.
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
