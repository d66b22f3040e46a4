"""Held-out problems: greedy or sampled answers, judged, in verl's metric names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from verl_fn.algorithms.experience import publish
from verl_fn.algorithms.workers import Workers
from verl_fn.backends.protocol import Sampling
from verl_fn.config.schema import AlgorithmConfig, Config, ConfigError, FsdpConfig
from verl_fn.data.files import encode_prompts
from verl_fn.data.tasks import Problem
from verl_fn.rewards.reward import response_texts
from verl_fn.runs.progress import Say
from verl_fn.state import Batch

Evaluation = tuple[dict[str, float], list[dict[str, Any]]]


def validate(state: Any, problems: Sequence[Problem], w: Workers, cfg: Config) -> Evaluation:
    """Metrics of the actor's answers to held-out problems, and the first answers themselves."""
    w.wait(publish(w, state.actor, state.step))
    v = cfg.rollout.val_kwargs
    sampling = Sampling(cfg.data.max_response_length, v.temperature, v.top_k, v.top_p, v.n)
    prompts = encode_prompts(problems, w.tokenizer, cfg.data.max_prompt_length)
    # The same draws at every evaluation, so that only the weights make a difference.
    key = state.key.fold_in("evaluation")
    batch = w.rollout.generate(prompts, sampling, key, ids=[p.id for p in problems], version=state.step)
    kept = cfg.trainer.log_val_generations
    return w.get(w.call(judged, w.reward(batch, problems), problems, w.tokenizer, kept, returns=2))


def evaluate_model(cfg: Config, say: Say) -> Evaluation:
    """Metrics and answers of ``model.path`` on the config's held-out problems.

    Raises:
        ConfigError: there are no held-out problems.
    """
    from verl_fn.config.plan import token_budget
    from verl_fn.runs.loop import initial_state, prepared, workers

    # Of all algorithms, sft has the fewest roles: the actor, whose weights the rollout engine takes. They are merged.
    # Nothing is trained, so one process is enough, whatever layout the run had.
    budget = token_budget(cfg.actor)
    actor = attrs.evolve(
        cfg.actor, lora_rank=0, strategy="local", fsdp_config=FsdpConfig(), ppo_max_token_len_per_gpu=budget
    )
    critic = attrs.evolve(cfg.critic, strategy=None)
    one = attrs.evolve(cfg.ray, ranks=1)
    cfg = attrs.evolve(cfg, algorithm=AlgorithmConfig(name="sft"), actor=actor, critic=critic, ray=one)
    cfg, source = prepared(cfg, say)
    if not (held_out := source.held_out(cfg.data.val_size)):
        raise ConfigError("there are no held-out problems: set data.val_files")
    with workers(cfg) as w:
        return validate(initial_state(cfg, w), held_out, w, cfg)


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
