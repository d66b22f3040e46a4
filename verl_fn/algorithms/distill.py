"""Distillation on policy (Agarwal et al. 2023, arXiv 2306.13649): a teacher judges each token of the student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_fn.config.algorithms import Distill
from verl_fn.state import Key, Node, node
from verl_fn.steps import aggregate, distill_top_k
from verl_fn.steps import distill as distill_loss

from .algorithm import Algorithm
from .contract import Experience, Report
from .experience import loss_scale, update, with_outputs
from .policy import aggregation
from .reports import timing_report, update_report
from .workers import Clock, Workers


@node
class DistillState(Node):
    """The state of a run that distils; the actor is the student.

    Attributes:
        actor: the student's training state.
        teacher: the teacher's.
        key: the run's key.
        step: the number of steps done.
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
    loss = distill_top_k(options.kl) if options.top_k else distill_loss(options.kl)
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
        batch = with_outputs(batch, outputs, **fields)
        batch = aggregate(batch, aggregation(options), loss_scale_factor=loss_scale(options, w))
        actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, [batch], loss)
        report = update_report("actor", metrics) | experience.report
        tokens = float(batch.num_tokens)
        report |= {"perf/total_num_tokens": tokens} | timing_report(clock, tokens)
        return DistillState(actor, state.teacher, state.key, state.step + 1), report

    return Algorithm(init=init, learn=learn, outline=options.outline)
