"""Evaluation on held-out problems: answers are sampled and judged, and reported under verl's metric names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_fn.algorithms import Report, Workers
from verl_fn.algorithms.experience import publish, requests_of
from verl_fn.backends.memory import in_phase
from verl_fn.config import ConfigError, Plan
from verl_fn.data.tasks import Problem
from verl_fn.driver.build import validation_sampling
from verl_fn.rewards.reward import response_texts
from verl_fn.state import Batch, Key, conversations, pack

from .checks import samples_answers
from .prepare import prepare, workers
from .progress import Say
from .screen import text_of
from .state import RunState, algorithm_of

Evaluation = tuple[Report, list[dict[str, Any]]]


def validate(state: RunState, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    """Returns metrics on held-out problems, and the first answers of the actor to them.

    The metrics are those of sampled answers where these can be judged, and those of the algorithm's own evaluation.
    """
    # The engine may still draw experience from earlier weights.
    w.wait([drawn.samples for drawn in state.waiting])
    algorithm = algorithm_of(plan)
    own = algorithm.evaluate(state.algorithm, problems, w) if algorithm.evaluate is not None else {}
    if not samples_answers(plan, problems):
        return own, []
    # Every evaluation uses the same random numbers, so that results differ only by the weights.
    key = state.key.fold_in("evaluation")
    logged = plan.trainer.log_val_generations
    report, answers = _answers(state.role("actor"), state.step, key, problems, w, plan, logged)
    return report | own, answers


def _answers(
    actor: Any, version: int, key: Key, problems: Sequence[Problem], w: Workers, plan: Plan, logged: int | None
) -> Evaluation:
    with in_phase("update_weights"):
        w.wait(publish(w, actor, version))
    sampling = validation_sampling(plan.rollout.validation, plan.rollout.max_response_length)
    requests = requests_of(problems, w, sampling, key)
    with in_phase("gen"):
        batch = w.call(pack, w.rollout.generate(requests, version=version))
        scored = w.reward(batch, problems)
        return w.get(w.call(judged, scored, problems, w.tokenizer, w.end_tokens, logged, returns=2))


def evaluate_model(plan: Plan, say: Say) -> Evaluation:
    """Evaluates a plan's model on its held-out problems and returns metrics and all answers.

    Args:
        plan: a plan made by ``verl_fn.config.evaluation_plan``.
        say: prints a line.

    Raises:
        ConfigError: there are no held-out problems.
    """
    source = prepare(plan, say)
    if not (held_out := source.held_out(plan.data.val_size)):
        raise ConfigError("there are no held-out problems: set data.val_files")
    key = Key.from_seed(plan.trainer.seed)
    with workers(plan) as w:
        actor = w.trainers["actor"].load_pretrained(plan.roles["actor"].folder, key.fold_in("actor"))
        if plan.roles["actor"].head != "lm":
            algorithm = algorithm_of(plan)
            assert algorithm.evaluate is not None
            return algorithm.evaluate(algorithm.init({"actor": actor}, key), held_out, w), []
        if not samples_answers(plan, held_out):
            raise ConfigError("held-out responses have no ground truth to judge answers by; set reward.functions")
        return _answers(actor, 0, key.fold_in("evaluation"), held_out, w, plan, None)


def judged(
    batch: Batch, problems: Sequence[Problem], tokenizer: Any, end_tokens: Sequence[int], logged: int | None
) -> Evaluation:
    """Returns accuracy and reward by data source, and decoded answers.

    As in verl, the reward is the core metric where the reward functions return no ``acc``.

    Args:
        batch: scored rows, or conversations of one or several rows, the same number for each problem.
        problems: the held-out problems.
        tokenizer: decodes the answers.
        end_tokens: those of the model, which are no part of an answer's text.
        logged: the first answer to each of so many problems is returned; None returns all answers to all problems.
    """
    batch = batch.take(conversations(batch)[1])
    n = len(batch) // len(problems)
    score, pred = (batch[name].reshape(-1, n) for name in ("score", "pred"))
    acc = batch["acc"].reshape(-1, n) if "acc" in batch else None
    report: dict[str, float] = {}
    for source in dict.fromkeys(p.data_source for p in problems):
        rows = torch.tensor([p.data_source == source for p in problems])
        if acc is not None:
            report |= spread(f"val-core/{source}/acc", acc[rows], pred[rows])
            report |= spread(f"val-aux/{source}/reward", score[rows])
        else:
            report |= spread(f"val-core/{source}/reward", score[rows], pred[rows])
    shown = range(len(batch)) if logged is None else range(0, len(batch), n)[:logged]
    texts = response_texts(batch.take(list(shown)), tokenizer, end_tokens) if shown else []
    answers = [
        {
            "data_source": problems[i // n].data_source,
            "prompt": text_of(problems[i // n].prompt),
            "response": response,
            "answer": problems[i // n].answer,
            "score": float(batch["score"][i]),
            "acc": float(batch["acc"][i]) if acc is not None else None,
            "finished": bool(batch["finished"][i]),
        }
        for i, response in zip(shown, texts, strict=True)
    ]
    return report, answers


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
    return ""


def has_held_out(plan: Plan) -> bool:
    """Returns whether a plan has held-out problems: a generated task has, and files have with ``data.val_files``."""
    return not plan.data.train_files or bool(plan.data.val_files)


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
