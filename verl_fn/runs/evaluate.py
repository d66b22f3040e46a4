"""Evaluation on held-out problems: answers are sampled and judged, and reported under verl's metric names."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_fn import build
from verl_fn.algorithms import Algorithm, Clock, Report, Workers
from verl_fn.algorithms.experience import requests_of
from verl_fn.config import ConfigError, Plan
from verl_fn.config.names import verifiers_name
from verl_fn.data.tasks import Problem, text_of
from verl_fn.rewards.reward import joined, problems_of, prompt_texts, response_texts
from verl_fn.state import END_REASONS, Batch, Key, Sample, conversations, pack

from .checks import sampled
from .fitting import with_engine
from .prepare import ONLY_ACC, prepare, unjudged, workers
from .progress import Say
from .state import RunState, algorithm_of, give_to_engine

Evaluation = tuple[Report, list[dict[str, Any]]]


def validate(state: RunState, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    """Returns metrics on held-out problems, and all answers of the actor to them.

    The metrics are of sampled answers, if these can be judged, and of the algorithm's own evaluation.
    """
    # The engine may still draw experience from earlier weights.
    w.get([one.drawn for one in state.waiting])
    algorithm = algorithm_of(plan)
    own = algorithm.evaluate(state.algorithm, problems, w) if algorithm.evaluate is not None else {}
    report, answers = _answers(state.role("actor"), state.step, state.key, problems, w, plan)
    return report | own, answers


def _answers(actor: Any, version: int, key: Key, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    """Samples and judges answers to the problems that have a judge; returns no metrics and no answers without any."""
    if not (judged := sampled(plan, problems)):
        return {}, []
    clock = Clock(w.get)
    give_to_engine(plan, w, actor, version, clock)
    sampling = build.sampling(plan.rollout.val_kwargs, plan.data.max_response_length)
    # Every evaluation uses the same random numbers, so that results differ only by the weights.
    requests = requests_of(judged, w, sampling, key.fold_in("evaluation"))
    samples = clock.run("gen", w.rollout.generate, requests, version=version)
    scored = clock.run("reward", w.reward, pack(samples), judged)
    return evaluation_of(scored, judged, w.tokenizer, w.end_tokens, samples)


def evaluate_model(plan: Plan, say: Say) -> Evaluation:
    """Evaluates a plan's model on its held-out problems and returns metrics and all answers.

    Raises:
        ConfigError: there are no held-out problems.
    """
    if plan.data.date is None:
        plan = plan.dated(datetime.date.today().isoformat())
    plan = with_engine(plan)
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
        report, answers = _answers(actor, 0, key, held_out, w, plan)
        if not report and not own:
            raise ConfigError(_nothing_known(algorithm, plan))
        return report | own, answers


def _nothing_known(algorithm: Algorithm[Any], plan: Plan) -> str:
    """Says why an evaluation of a model without its run gives no metrics, and what to do."""
    unknown = "held-out responses have no ground truth to judge answers by"
    others = [name for name in algorithm.outline.roles if name != "actor"]
    if algorithm.evaluate is not None and others:
        unknown += f", and only a run has the {' and '.join(others)} that {plan.algorithm} compares them with (its "
        unknown += "metrics.jsonl has that)"
    return f"{unknown}; set reward.functions or reward.url"


def held_out_value(report: Mapping[str, Any], metric: str) -> float | None:
    """Returns the held-out ``acc`` or ``reward``, averaged over data sources; None where it was not evaluated.

    Example:
        >>> held_out_value({"val-core/count/acc/mean@1": 0.5, "val-core/reverse/acc/mean@1": 1.0}, "acc")
        0.75
    """
    values = _of_sources(report, metric)
    return sum(values) / len(values) if values else None


def _of_sources(report: Mapping[str, Any], metric: str) -> list[float]:
    """Returns the held-out ``acc`` or ``reward`` of each data source.

    A number of a reward function may have the same name below a source; no source of its own is meant.
    """
    name = re.compile(r"val-(core|aux)/(.+)/(acc|reward)/mean@\d+", re.DOTALL)
    found = [(match.groups(), value) for key, value in report.items() if (match := name.fullmatch(key))]
    sources = {source for (family, source, _), _ in found if family == "core"}
    return [
        value
        for (_, source, kind), value in found
        if kind == metric and value is not None and (source in sources or not sources)
    ]


def evaluation_line(report: Report, metric: str = "acc") -> str:
    """Formats the held-out ``metric``, or the other one if there is none; empty for a step without an evaluation.

    Example:
        >>> evaluation_line({"val-core/mine/reward/mean@1": 2.0})
        'held-out reward 2.000'
        >>> evaluation_line({"val-core/easy/acc/mean@1": 1.0, "val-core/hard/acc/mean@1": 0.5})
        'held-out acc 0.750 (mean of 2 sources)'
    """
    for name in (metric, "acc", "reward"):
        if values := _of_sources(report, name):
            more = f" (mean of {len(values)} sources)" if len(values) > 1 else ""
            return f"held-out {name} {sum(values) / len(values):.3f}{more}"
    return f"held-out loss {report['val/loss']:.3f}" if "val/loss" in report else ""


def has_held_out(plan: Plan) -> bool:
    """Returns whether a plan says that it has held-out problems.

    A generated task has, and files have with ``data.val_files``. verifiers' are known only when it is loaded.
    """
    return bool(plan.data.val_files) or not (plan.data.train_files or verifiers_name(plan.data.task))


def check_goal(plan: Plan, report: Report) -> None:
    """Checks that an evaluation has the metric that ``trainer.stop_at`` is compared with."""
    if plan.trainer.stop_at is None or held_out_value(report, plan.trainer.stop_metric) is not None:
        return
    if held_out_value(report, "acc") is not None:
        raise ConfigError(ONLY_ACC)
    if held_out_value(report, "reward") is None:
        raise ConfigError(unjudged(plan))
    raise ConfigError(
        "trainer.stop_at is compared with acc, which the reward functions do not return; return it "
        '({"score": ..., "acc": ...}), or set trainer.stop_metric=reward'
    )


def evaluation_of(
    batch: Batch,
    problems: Sequence[Problem],
    tokenizer: Any,
    end_tokens: Sequence[int],
    samples: Sequence[Sample] = (),
) -> Evaluation:
    """Returns accuracy and reward by data source, and every answer as a row.

    As in verl, the reward is the core metric where the reward functions return no ``acc``.

    Args:
        batch: scored rows, or conversations of one or several rows, the same number for each problem.
        end_tokens: of the model; they are no part of an answer's text.
        samples: what the rows were made of, for the messages of conversations.
    """
    answers = answers_of(batch, problems, tokenizer, end_tokens, samples)
    batch = batch.take(conversations(batch)[1])
    n = len(batch) // len(problems)
    score, pred = (batch[name].reshape(-1, n) for name in ("score", "pred"))
    acc = batch["acc"].reshape(-1, n) if "acc" in batch else None
    report: dict[str, float] = {}
    # A single answer's pass@1 is its mean.
    powers = [2**i for i in range(n.bit_length())] if n > 1 else []
    for source in dict.fromkeys(p.data_source for p in problems):
        rows = torch.tensor([p.data_source == source for p in problems])
        # Where the reward returned acc for some answers only, the problems count all of whose answers have it.
        known = rows & ~acc.isnan().any(1) if acc is not None else torch.zeros_like(rows)
        if acc is not None and bool(known.any()):
            report |= spread(f"val-core/{source}/acc", acc[known], pred[known])
            report |= {f"val-aux/{source}/acc/pass@{k}": pass_at(acc[known], k) for k in powers}
            if int(known.sum()) < int(rows.sum()):
                report[f"val-aux/{source}/acc/count"] = float(known.sum())
            report |= spread(f"val-aux/{source}/reward", score[rows])
        else:
            report |= spread(f"val-core/{source}/reward", score[rows], pred[rows])
        report |= _further(f"val-aux/{source}", batch, rows)
    return report, answers


def _further(prefix: str, batch: Batch, rows: torch.Tensor) -> Report:
    """Returns how answers to some problems ended, their named rewards, and the number of replies of conversations.

    Args:
        batch: the last row of each conversation, the same number for each problem.
        rows: whether a problem counts, [problems].
    """
    fields = {name: field.reshape(len(rows), -1) for name, field in batch.per_row.items()}
    report: dict[str, float] = {}
    for name in [name for name in fields if name.startswith("reward/")]:
        # A number that is called as what is reported anyway keeps its whole name.
        own = name if name in ("reward/acc", "reward/reward") else name.removeprefix("reward/")
        known, short = rows & ~fields[name].isnan().any(1), f"{prefix}/{own}"
        if 0 < int(known.sum()) < int(rows.sum()):
            report[f"{short}/count"] = float(known.sum())
        report |= spread(short, fields[name][known]) if bool(known.any()) else {}
    if "env_end" not in fields:
        report[f"{prefix}/response_length/clip_ratio"] = float((fields["finished"][rows] == 0).double().mean())
    else:
        report[f"{prefix}/env/turns/mean"] = float(fields["env_turns"][rows].double().mean())
        for number, reason in enumerate(END_REASONS):
            report[f"{prefix}/env/ended/{reason}"] = float((fields["env_end"][rows] == number).double().mean())
    return report


def answers_of(
    batch: Batch,
    problems: Sequence[Problem],
    tokenizer: Any,
    end_tokens: Sequence[int],
    samples: Sequence[Sample] = (),
) -> list[dict[str, Any]]:
    """Returns the answers as rows that people can read; see ``evaluation_of`` for the arguments.

    ``problem`` is the number of the problem, ``row`` its file's name and its row, if any, ``sample`` the number of
    its answer. ``prompt`` is for people to read, ``input`` the text of the tokens that the model got. ``ended`` says
    why the answer ended: ``stop`` by the end token, ``length`` at the limit, or the reason for the end of a
    conversation, whose ``messages`` follow.
    """
    conversation, last = conversations(batch)
    texts = joined(response_texts(batch, tokenizer, end_tokens), conversation)
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    inputs = prompt_texts(batch.take(first), tokenizer)
    said = [s.outcome.messages if s.outcome is not None else "" for s in samples]
    said = [said[i] for i in last.tolist()] if said else [""] * len(texts)
    batch = batch.take(last)
    if "env_end" in batch:
        ended = [END_REASONS[number] for number in batch["env_end"].tolist()]
    else:
        ended = ["stop" if finished else "length" for finished in batch["finished"].tolist()]
    asked, numbers = problems_of(batch, problems), Counter[int]()
    values = {name: _decimals(field) for name, field in batch.per_row.items() if name.startswith("reward/")}
    score, acc = (_decimals(batch[name]) if name in batch else [None] * len(batch) for name in ("score", "acc"))
    finished = batch["finished"].tolist()
    rows = []
    for i, (problem, response) in enumerate(zip(asked, texts, strict=True)):
        row = {
            "data_source": problem.data_source,
            "problem": problem.id,
            # Without the folder: a run has the same answers wherever its data lie.
            "row": Path(problem.place).name,
            "sample": numbers[problem.id],
            "prompt": text_of(problem.prompt),
            "input": inputs[i],
            "response": response,
            "answer": problem.answer,
            "score": score[i],
            "acc": acc[i],
            "finished": bool(finished[i]),
            "ended": ended[i],
        }
        numbers[problem.id] += 1
        row |= {"messages": json.loads(said[i])} if said[i] else {}
        rows.append(row | {name: field[i] for name, field in values.items()})
    return rows


def _decimals(values: torch.Tensor) -> list[float | None]:
    """Returns the shortest decimals that stand for the values, with None for missing ones.

    Example:
        >>> _decimals(torch.tensor([0.1, math.nan]))
        [0.1, None]
    """
    return [None if np.isnan(value) else float(str(value)) for value in values.cpu().numpy()]


def spread(name: str, values: torch.Tensor, pred: torch.Tensor | None = None) -> dict[str, float]:
    """Returns the mean, the best and the majority value of the N answers to each problem, averaged over problems.

    Args:
        name: the first part of the metrics' names.
        values: the value of each answer, [problems, N].
        pred: a number that stands for each final answer, [problems, N]. The majority value is the value of the most
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
