"""Held-out problems: greedy or sampled answers, judged, in verl's metric names."""

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
    # The same draws at every evaluation, so that only the weights make a difference.
    key = state.key.fold_in("evaluation")
    return _answers(state.role("actor"), state.step, key, problems, w, plan)


def _answers(actor: Any, version: int, key: Key, problems: Sequence[Problem], w: Workers, plan: Plan) -> Evaluation:
    w.wait(publish(w, actor, version))
    sampling = validation_sampling(plan.rollout.validation, plan.rollout.max_response_length)
    prompts = encode_prompts(problems, w.tokenizer, w.max_prompt_length)
    requests = requests_for(prompts, sampling, key, [p.id for p in problems])
    batch = w.call(pack, w.rollout.generate(requests, version=version))
    kept = plan.trainer.log_val_generations
    return w.get(w.call(judged, w.reward(batch, problems), problems, w.tokenizer, kept, returns=2))


def evaluate_model(plan: Plan, say: Say) -> Evaluation:
    """Returns metrics and answers of a plan's model on its held-out problems.

    Args:
        plan: of ``verl_fn.config.evaluation_plan``.

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


def judged(batch: Batch, problems: Sequence[Problem], tokenizer: Any, kept: int) -> Evaluation:
    """Accuracy and reward by data source, and the first ``kept`` problems' first answers as texts."""
    n = len(batch) // len(problems)
    score, acc, pred = (batch[name].reshape(-1, n) for name in ("score", "acc", "pred"))
    report: dict[str, float] = {}
    for source in dict.fromkeys(p.data_source for p in problems):
        rows = torch.tensor([p.data_source == source for p in problems])
        report |= spread(f"val-core/{source}/acc", acc[rows], pred[rows])
        report |= spread(f"val-aux/{source}/reward", score[rows])
    firsts = batch.take(list(range(0, kept * n, n)[: len(problems)])) if kept else None
    texts = response_texts(firsts, tokenizer) if firsts is not None else []
    answers = [
        {
            "data_source": problem.data_source, "prompt": text_of(problem.prompt), "response": text,
            "answer": problem.answer, "score": float(score[i, 0]), "acc": float(acc[i, 0]),
            "finished": bool(batch["finished"][i * n]),
        }
        for i, (problem, text) in enumerate(zip(problems, texts, strict=False))
    ]  # fmt: skip
    return report, answers


def spread(name: str, values: torch.Tensor, pred: torch.Tensor | None = None) -> dict[str, float]:
    """Mean, best and majority of the N answers to each problem, meaned over problems.

    Args:
        values: of each answer, [problems, N].
        pred: what each answer says, as numbers, [problems, N]; the majority's value is that of the most
            frequent one, the first of those if several are.

    >>> values = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    >>> spread("acc", values, torch.tensor([[5, 7, 7], [5, 6, 5]]))
    {'acc/mean@3': 0.5, 'acc/best@3/mean': 1.0, 'acc/maj@3/mean': 0.5}
    """
    n = values.shape[1]
    report = {f"{name}/mean@{n}": float(values.mean())}
    if n > 1:
        report[f"{name}/best@{n}/mean"] = float(values.max(dim=1).values.mean())
    if n > 1 and pred is not None:
        chosen = [
            row[said.index(Counter(said).most_common(1)[0][0])]
            for row, said in zip(values.tolist(), pred.tolist(), strict=True)
        ]
        report[f"{name}/maj@{n}/mean"] = sum(chosen) / len(chosen)
    return report


def text_of(prompt: Any) -> str:
    """A prompt as a person reads it.

    >>> text_of(({"role": "user", "content": "2+2?"},))
    'user: 2+2?'
    """
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def accuracy(report: dict[str, float]) -> float | None:
    """Held-out accuracy over all sources, or None where there was no evaluation."""
    found = [v for k, v in report.items() if k.startswith("val-core/") and "/acc/mean@" in k]
    return sum(found) / len(found) if found else None
