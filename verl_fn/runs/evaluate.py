"""Evaluation on held-out problems: answers are sampled and judged, and reported under verl's metric names."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_fn.algorithms import Clock, Report, Workers
from verl_fn.algorithms.experience import requests_of
from verl_fn.config import ConfigError, Plan
from verl_fn.config.names import verifiers_name
from verl_fn.data.tasks import Problem
from verl_fn.driver.build import validation_sampling
from verl_fn.state import Key, pack

from .checks import samples_answers
from .judged import Evaluation, judged
from .prepare import prepare, workers
from .progress import Say
from .residency import give_to_engine
from .state import RunState, algorithm_of


def validate(state: RunState, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    """Returns metrics on held-out problems, and all answers of the actor to them.

    The metrics are of sampled answers, if these can be judged, and of the algorithm's own evaluation.
    """
    # The engine may still draw experience from earlier weights.
    w.get([one.drawn for one in state.waiting])
    algorithm = algorithm_of(plan)
    own = algorithm.evaluate(state.algorithm, problems, w) if algorithm.evaluate is not None else {}
    if not samples_answers(plan, problems):
        return own, []
    # Every evaluation uses the same random numbers, so that results differ only by the weights.
    key = state.key.fold_in("evaluation")
    report, answers = _answers(state.role("actor"), state.step, key, problems, w, plan)
    return report | own, answers


def _answers(actor: Any, version: int, key: Key, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    clock = Clock(w.get)
    give_to_engine(plan, w, actor, version, clock)
    sampling = validation_sampling(plan.rollout.val_kwargs, plan.data.max_response_length)
    samples = clock.run("gen", w.rollout.generate, requests_of(problems, w, sampling, key), version=version)
    scored = clock.run("reward", w.reward, pack(samples), problems)
    return judged(scored, problems, w.tokenizer, w.end_tokens, samples)


def evaluate_model(plan: Plan, say: Say) -> Evaluation:
    """Evaluates a plan's model on its held-out problems and returns metrics and all answers.

    Args:
        plan: a plan made by ``verl_fn.config.evaluation_plan``.
        say: prints a line.

    Raises:
        ConfigError: there are no held-out problems.
    """
    if plan.data.date is None:
        plan = plan.dated(datetime.date.today().isoformat())
    source = prepare(plan, say)
    if not (held_out := source.held_out(plan.data.val_size)):
        raise ConfigError(
            "there are no held-out problems: set data.val_files, or give the environment of data.task an eval_dataset"
        )
    key = Key.from_seed(plan.trainer.seed)
    with workers(plan) as w:
        actor = w.trainers["actor"].load_pretrained(plan.roles["actor"].folder, key.fold_in("actor"))
        algorithm, own = algorithm_of(plan), {}
        # Others compare with a model that is not there.
        if algorithm.evaluate is not None and set(algorithm.outline.roles) == {"actor"}:
            own = algorithm.evaluate(algorithm.init({"actor": actor}, key), held_out, w)
        if not samples_answers(plan, held_out):
            if own:
                return own, []
            raise ConfigError(
                "held-out responses have no ground truth to judge answers by; set reward.functions or reward.url"
            )
        report, answers = _answers(actor, 0, key.fold_in("evaluation"), held_out, w, plan)
        return report | own, answers


def held_out_value(report: Mapping[str, Any], metric: str) -> float | None:
    """Returns the held-out ``acc`` or ``reward``, averaged over data sources; None where it was not evaluated.

    Example:
        >>> held_out_value({"val-core/count/acc/mean@1": 0.5, "val-core/reverse/acc/mean@1": 1.0}, "acc")
        0.75
    """
    name = re.compile(rf"val-(core|aux)/.+/{metric}/mean@\d+", re.DOTALL)
    values = [value for key, value in report.items() if name.fullmatch(key) and value is not None]
    return sum(values) / len(values) if values else None


def evaluation_line(report: Report, metric: str = "acc") -> str:
    """Formats the held-out ``metric``, or the other one if there is none; empty for a step without an evaluation.

    Example:
        >>> evaluation_line({"val-core/mine/reward/mean@1": 2.0})
        'held-out reward 2.000'
    """
    for name in (metric, "acc", "reward"):
        if (value := held_out_value(report, name)) is not None:
            return f"held-out {name} {value:.3f}"
    return f"held-out loss {report['val/loss']:.3f}" if "val/loss" in report else ""


def has_held_out(plan: Plan) -> bool:
    """Returns whether a plan says that it has held-out problems.

    A generated task has, and files have with ``data.val_files``. verifiers' are known only when it is loaded.
    """
    return bool(plan.data.val_files) or not (plan.data.train_files or verifiers_name(plan.data.task))


def check_goal(plan: Plan, report: Report) -> None:
    """Checks that an evaluation has the metric that ``trainer.stop_at`` is compared with.

    Raises:
        ConfigError: it has not.
    """
    if plan.trainer.stop_at is not None and held_out_value(report, plan.trainer.stop_metric) is None:
        raise ConfigError(
            "trainer.stop_at is compared with acc, which the reward functions do not return; return it "
            '({"score": ..., "acc": ...}), or set trainer.stop_metric=reward'
        )
