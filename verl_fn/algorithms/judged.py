"""Algorithms that learn from judged responses: direct preference optimization with its family, and reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_fn import steps
from verl_fn.config.algorithms import DPO, RewardModel
from verl_fn.data.examples import pack_labelled, pack_pairs
from verl_fn.data.judged import Judged
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError
from verl_fn.state import Batch, Key, Node, node
from verl_fn.steps import Loss
from verl_fn.steps.losses.preference import row_log_probs, row_mean_log_probs

from .algorithm import ActorState, Algorithm
from .experience import one_update, reference_outputs, with_outputs
from .workers import Clock, Experience, Report, Workers


def judged(problems: Sequence[Problem]) -> list[Judged]:
    """Returns problems after checking that they hold judged responses.

    Raises:
        ArgumentError: one does not.
    """
    judged_ones = [problem for problem in problems if isinstance(problem, Judged)]
    if len(judged_ones) < len(problems):
        raise ArgumentError(
            "this algorithm learns from judged responses, and a problem has none; the source of problems must give "
            "verl_fn.data.judged.Judged, as files with the columns chosen and rejected do"
        )
    return judged_ones


def pair_batch(problems: Sequence[Problem], w: Workers) -> Batch:
    """Returns the rows of pairs, weighted for the mean over pairs."""
    batch = pack_pairs(judged(problems), w.tokenizer, w.end_tokens)
    return steps.aggregate_rows(batch, "group-mean", group="pair")


def labelled_batch(problems: Sequence[Problem], w: Workers) -> Batch:
    """Returns the rows of labelled responses, and behind them rows with responses to other prompts.

    Only the former have a weight.
    """
    batch = pack_labelled(judged(problems), w.tokenizer, w.end_tokens)
    weight = 1.0 - batch["mismatched"]
    return batch.with_rows(row_weight=weight / weight.sum())


def held_out_pairs(problems: Sequence[Problem]) -> list[Judged]:
    """Returns the held-out problems that are pairs."""
    return [p for p in problems if isinstance(p, Judged) and len(p.chosen) == len(p.rejected) == 1]


def pair_report(pairs: Sequence[Judged], scores: Float[Tensor, " B"], prefix: str, suffix: str) -> Report:
    """Returns, by data source, the share of pairs whose chosen response has the higher score, and the mean margin.

    A tie does not count, as in TRL's metrics.

    Args:
        scores: of the rows of ``pack_pairs``.
        prefix: the first part of the metrics' names.
        suffix: the name of the share.

    Example:
        >>> pair = Judged("a", "", data_source="mine", chosen=("b",), rejected=("c",))
        >>> pair_report([pair], torch.tensor([2.0, 0.5]), "val-core", "acc/mean@1")
        {'val-core/mine/acc/mean@1': 1.0, 'val-aux/mine/margin/mean@1': 1.5}
        >>> pair_report([pair], torch.tensor([0.5, 0.5]), "val-core", "acc/mean@1")["val-core/mine/acc/mean@1"]
        0.0
    """
    chosen, rejected = scores.reshape(-1, 2).unbind(1)
    report: Report = {}
    for source in dict.fromkeys(pair.data_source for pair in pairs):
        rows = torch.tensor([pair.data_source == source for pair in pairs])
        margin = (chosen - rejected)[rows].double()
        report[f"{prefix}/{source}/{suffix}"] = float((margin > 0).double().mean())
        report[f"val-aux/{source}/margin/mean@1"] = float(margin.mean())
    return report


def label_report(problems: Sequence[Judged], gained: Bool[Tensor, " B"]) -> Report:
    """Returns, by data source, the share of labelled responses that the policy prefers if and only if they are good.

    Args:
        gained: whether each response has gained more than the reference point.

    Example:
        >>> good, bad = Judged("a", "", 0, "mine", chosen=("b",)), Judged("c", "", 1, "mine", rejected=("d",))
        >>> label_report([good, bad], torch.tensor([True, True]))
        {'val-aux/mine/label_acc/mean@1': 0.5}
    """
    rows = [(problem.data_source, good) for problem in problems for _, good in problem.responses]
    right = gained == torch.tensor([good for _, good in rows])
    report: Report = {}
    for source in dict.fromkeys(name for name, _ in rows):
        own = torch.tensor([name == source for name, _ in rows])
        report[f"val-aux/{source}/label_acc/mean@1"] = float(right[own].double().mean())
    return report


@node
class DPOState(Node):
    """The state of a run that learns from preferences.

    Attributes:
        actor: the policy's training state.
        reference: the policy's training state at the start; None for losses without a reference, and with LoRA: the
            actor's frozen base is the reference then.
    """

    actor: Any
    reference: Any
    key: Key
    step: int


def preference_loss(options: DPO) -> Loss:
    """Makes the loss that ``loss_type`` names.

    Example:
        >>> preference_loss(DPO(loss_type="simpo")).together
        'pair'
    """
    beta = (2.0 if options.loss_type == "simpo" else 0.1) if options.beta is None else options.beta
    makers: Mapping[str, Callable[[], Loss]] = {
        "dpo": lambda: steps.dpo(beta),
        "cdpo": lambda: steps.cdpo(beta, options.label_smoothing),
        "ipo": lambda: steps.ipo(beta),
        "simpo": lambda: steps.simpo(beta, options.simpo_gamma),
        "orpo": lambda: steps.orpo(beta),
        "kto": lambda: steps.kto(beta, options.desirable_weight, options.undesirable_weight),
    }
    return makers[options.loss_type]()


def dpo(options: DPO) -> Algorithm[DPOState]:
    """Makes DPO: a step is one update of the policy on the judged responses of its problems.

    Example:
        >>> list(dpo(DPO()).outline.roles), list(dpo(DPO(loss_type="simpo")).outline.roles)
        (['actor', 'reference'], ['actor'])

    Source:
        Rafailov et al. 2023, arXiv 2305.18290; the other losses name theirs.
    """
    loss, outline = preference_loss(options), options.outline
    needs_reference, labels = "reference" in outline.roles, outline.learns_from == "labels"

    def init(states: Mapping[str, Any], key: Key) -> DPOState:
        return DPOState(states["actor"], states.get("reference"), key, step=0)

    def sample(state: DPOState, problems: Sequence[Problem], w: Workers) -> Experience:
        return Experience(labelled_batch(problems, w) if labels else pair_batch(problems, w), len(problems))

    def learn(state: DPOState, experience: Experience, w: Workers) -> tuple[DPOState, Report]:
        clock = Clock(w.get, experience.seconds)
        batch = annotated(state, experience.batch, w, clock, options)
        return one_update(state, batch, loss, experience, w, clock)

    def evaluate(state: DPOState, problems: Sequence[Problem], w: Workers) -> Report:
        known = [p for p in problems if isinstance(p, Judged)] if labels else held_out_pairs(problems)
        # The reference point of labelled responses needs another prompt.
        if len(known) < 1 + labels:
            return {}
        batch = labelled_batch(known, w) if labels else pair_batch(known, w)
        batch = annotated(state, batch, w, Clock(w.get), options)
        outputs = w.get(w.trainers["actor"].forward(state.actor.params, batch, ("logprobs",)))
        report = {"val/loss": float(steps.total_loss(loss, outputs, batch)[0])}
        if not needs_reference:
            scores = row_mean_log_probs(batch, outputs.logprobs)
        else:
            scores = row_log_probs(batch, outputs.logprobs - batch["ref_log_prob"])
        if labels:
            report |= label_report(known, scores > batch["reference_point"])
        pairs = held_out_pairs(known)
        if not pairs:
            return report
        rows = [len(held_out_pairs([problem])) > 0 for problem in known for _ in problem.responses]
        return report | pair_report(pairs, scores[torch.tensor(rows)], "val-aux", "preference/mean@1")

    return Algorithm(init=init, sample=sample, learn=learn, outline=outline, evaluate=evaluate)


def annotated(state: DPOState, batch: Batch, w: Workers, clock: Clock, options: DPO) -> Batch:
    """Writes into a batch what the loss compares the policy with: reference and reference point."""
    if "reference" in options.outline.roles:
        outputs = clock.run("ref", reference_outputs, batch, state, w)
        batch = with_outputs(batch, outputs, logprobs="ref_log_prob")
    if options.loss_type != "kto":
        return batch
    batch, others = apart(batch)
    forward = w.trainers["actor"].forward
    outputs = clock.run("old_log_prob", forward, state.actor.params, others, ("logprobs",))
    others = with_outputs(others, outputs, logprobs="old_log_probs")
    return steps.kto_reference_point(batch, others)


def apart(batch: Batch) -> tuple[Batch, Batch]:
    """Returns the rows to learn from, and the rows with responses to other prompts.

    Example:
        >>> own, others = apart(Batch.from_rows([[1], [2]], per_row={"mismatched": [1.0, 0.0]}))
        >>> own.tokens.tolist(), others.tokens.tolist()
        ([2], [1])
    """
    others = batch["mismatched"] != 0
    return batch.take((~others).nonzero()[:, 0]), batch.take(others.nonzero()[:, 0])


def reward_model(options: RewardModel) -> Algorithm[ActorState]:
    """Makes the training of a reward model: a step is one update on the pairs of its problems.

    Its folder serves as the reward of ``ppo`` and ``grpo`` (``algorithm.reward_model``).

    Example:
        >>> reward_model(RewardModel()).outline.roles["actor"].head
        'value'

    Source:
        Ouyang et al. 2022, arXiv 2203.02155.
    """
    loss = steps.bradley_terry(center_rewards_coefficient=options.center_rewards_coefficient)

    def sample(state: ActorState, problems: Sequence[Problem], w: Workers) -> Experience:
        return Experience(pair_batch(problems, w), len(problems))

    def learn(state: ActorState, experience: Experience, w: Workers) -> tuple[ActorState, Report]:
        return one_update(state, experience.batch, loss, experience, w)

    def evaluate(state: ActorState, problems: Sequence[Problem], w: Workers) -> Report:
        pairs = held_out_pairs(problems)
        batch = pair_batch(pairs, w)
        outputs = w.get(w.trainers["actor"].forward(state.actor.params, batch, ("row_values",)))
        report = {"val/loss": float(steps.total_loss(loss, outputs, batch)[0])}
        return report | pair_report(pairs, outputs.row_values, "val-core", "acc/mean@1")

    return Algorithm(sample=sample, learn=learn, outline=options.outline, evaluate=evaluate)
