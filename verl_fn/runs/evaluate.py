"""Evaluation on held-out problems: answers are sampled and judged, and reported under verl's metric names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from verl_fn.algorithms import Report, Workers
from verl_fn.algorithms.experience import publish
from verl_fn.config import ConfigError, Plan
from verl_fn.data.files import encode_prompts
from verl_fn.data.tasks import Problem
from verl_fn.driver.build import validation_sampling
from verl_fn.rewards.reward import response_texts
from verl_fn.state import Batch, Key, pack, requests_for

from .prepare import prepare, workers
from .progress import Say
from .state import RunState

Evaluation = tuple[Report, list[dict[str, Any]]]


def validate(state: RunState, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    """Returns metrics of the actor's answers to held-out problems, and the first answers themselves."""
    # Every evaluation uses the same random numbers, so that results differ only by the weights.
    key = state.key.fold_in("evaluation")
    return _answers(state.role("actor"), state.step, key, problems, w, plan)


def _answers(actor: Any, version: int, key: Key, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    w.wait(publish(w, actor, version))
    sampling = validation_sampling(plan.rollout.validation, plan.rollout.max_response_length)
    prompts = encode_prompts(problems, w.tokenizer, w.max_prompt_length)
    requests = requests_for(prompts, sampling, key, [p.id for p in problems])
    batch = w.call(pack, w.rollout.generate(requests, version=version))
    logged = plan.trainer.log_val_generations
    return w.get(w.call(judged, w.reward(batch, problems), problems, w.tokenizer, logged, returns=2))


def evaluate_model(plan: Plan, say: Say) -> Evaluation:
    """Evaluates a plan's model on its held-out problems and returns metrics and answers.

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
        return _answers(actor, 0, key.fold_in("evaluation"), held_out, w, plan)


def judged(batch: Batch, problems: Sequence[Problem], tokenizer: Any, logged: int) -> Evaluation:
    """Returns accuracy and reward by data source, and the decoded first answer to each of the first problems.

    Args:
        batch: scored rows, the same number for each problem.
        problems: the held-out problems.
        tokenizer: decodes the answers.
        logged: how many problems' answers to return.
    """
    n = len(batch) // len(problems)
    score, acc, pred = (batch[name].reshape(-1, n) for name in ("score", "acc", "pred"))
    report: dict[str, float] = {}
    for source in dict.fromkeys(p.data_source for p in problems):
        rows = torch.tensor([p.data_source == source for p in problems])
        report |= spread(f"val-core/{source}/acc", acc[rows], pred[rows])
        report |= spread(f"val-aux/{source}/reward", score[rows])
    first_rows = batch.take(list(range(0, logged * n, n)[: len(problems)])) if logged else None
    responses = response_texts(first_rows, tokenizer) if first_rows is not None else []
    answers = [
        {
            "data_source": problem.data_source,
            "prompt": text_of(problem.prompt),
            "response": response,
            "answer": problem.answer,
            "score": float(score[i, 0]),
            "acc": float(acc[i, 0]),
            "finished": bool(batch["finished"][i * n]),
        }
        for i, (problem, response) in enumerate(zip(problems, responses, strict=False))
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


def text_of(prompt: Any) -> str:
    """Returns a prompt as a string for people to read.

    Example:
        >>> text_of(({"role": "user", "content": "2+2?"},))
        'user: 2+2?'
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{m['role']}: {m['tool_calls'] if m['content'] is None else m['content']}" for m in prompt)


def accuracy(report: dict[str, float]) -> float | None:
    """Returns the held-out accuracy, averaged over data sources; None for a step without an evaluation."""
    values = [v for k, v in report.items() if k.startswith("val-core/") and "/acc/mean@" in k]
    return sum(values) / len(values) if values else None
