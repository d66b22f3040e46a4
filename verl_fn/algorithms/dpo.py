"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) and its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_fn.config.algorithms import DPO
from verl_fn.data.judged import Judged
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, Key, Node, node
from verl_fn.steps import Loss, cdpo, ipo, kto, kto_reference_point, orpo, simpo, total_loss
from verl_fn.steps import dpo as dpo_loss
from verl_fn.steps.losses.pairs import row_log_probs, row_mean_log_probs

from .algorithm import Algorithm
from .contract import Experience, Report
from .experience import update, with_outputs
from .judged import held_out_pairs, label_report, labelled_batch, pair_batch, pair_report
from .reports import timing_report, update_report
from .workers import Clock, Workers


@node
class DPOState(Node):
    """The state of a run that learns from preferences.

    Attributes:
        actor: the policy's training state.
        reference: the policy's training state at the start; None for losses without a reference, and with LoRA: the
            actor's frozen base is the reference then.
        key: the run's key.
        step: the number of steps done.
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
    if options.loss_type == "cdpo":
        return cdpo(beta, options.label_smoothing)
    if options.loss_type == "ipo":
        return ipo(beta)
    if options.loss_type == "simpo":
        return simpo(beta, options.simpo_gamma)
    if options.loss_type == "orpo":
        return orpo(beta)
    if options.loss_type == "kto":
        return kto(beta, options.desirable_weight, options.undesirable_weight)
    return dpo_loss(beta)


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
        batch = labelled_batch(problems, w) if labels else pair_batch(problems, w)
        return Experience(batch, len(problems), report={"train/global_tokens": float(batch.num_tokens)})

    def learn(state: DPOState, experience: Experience, w: Workers) -> tuple[DPOState, Report]:
        clock = Clock(w.get, experience.seconds)
        batch = annotated(state, experience.batch, w, clock, options)
        actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, [batch], loss)
        report = update_report("train", metrics) | experience.report
        report |= timing_report(clock, report["train/global_tokens"])
        return DPOState(actor, state.reference, state.key, state.step + 1), report

    def evaluate(state: DPOState, problems: Sequence[Problem], w: Workers) -> Report:
        known = [p for p in problems if isinstance(p, Judged)] if labels else held_out_pairs(problems)
        # The reference point of labelled responses needs another prompt.
        if len(known) < 1 + labels:
            return {}
        batch = labelled_batch(known, w) if labels else pair_batch(known, w)
        batch = annotated(state, batch, w, Clock(w.get), options)
        outputs = w.get(w.trainers["actor"].forward(state.actor.params, batch, ("logprobs",)))
        report = {"val/loss": float(total_loss(loss, outputs, batch)[0])}
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
        outputs = clock.run("ref", reference_log_probs, state, batch, w)
        batch = with_outputs(batch, outputs, logprobs="ref_log_prob")
    if options.loss_type != "kto":
        return batch
    batch, others = apart(batch)
    forward = w.trainers["actor"].forward
    outputs = clock.run("old_log_prob", forward, state.actor.params, others, ("logprobs",))
    others = with_outputs(others, outputs, logprobs="old_log_probs")
    return kto_reference_point(batch, others)


def reference_log_probs(state: DPOState, batch: Batch, w: Workers) -> Any:
    """Returns the reference's log-probabilities; with LoRA the actor's frozen base is the reference."""
    if state.reference is None:
        return w.trainers["actor"].forward(state.actor.params.base, batch, ("logprobs",))
    return w.trainers["reference"].forward(state.reference.params, batch, ("logprobs",))


def apart(batch: Batch) -> tuple[Batch, Batch]:
    """Returns the rows to learn from, and the rows with responses to other prompts.

    Example:
        >>> own, others = apart(Batch.from_rows([[1], [2]], per_row={"mismatched": [1.0, 0.0]}))
        >>> own.tokens.tolist(), others.tokens.tolist()
        ([2], [1])
    """
    others = batch["mismatched"] != 0
    return batch.take((~others).nonzero()[:, 0]), batch.take(others.nonzero()[:, 0])
