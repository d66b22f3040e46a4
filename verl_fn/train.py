"""The training loop: problems in, steps of the algorithm, evaluations, checkpoints, a line of progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from verl_fn.algorithms import by_name
from verl_fn.algorithms.experience import publish
from verl_fn.backends.protocol import Sampling
from verl_fn.config import Config
from verl_fn.driver import build
from verl_fn.rewards import encode_prompts
from verl_fn.runs import Run, read_metrics, restore
from verl_fn.state import Batch, Key
from verl_fn.tasks import TASKS, Problem
from verl_fn.workers import Workers

Say = Callable[[str], None]


def train(cfg: Config, say: Say = print) -> dict[str, float]:
    """Run ``cfg`` to its end, continuing the folder's last checkpoint where there is one.

    Returns:
        The last evaluation.
    """
    run = Run(cfg)
    cfg = attrs.evolve(cfg, model=attrs.evolve(cfg.model, path=str(build.model_folder(cfg).resolve())))
    with workers(cfg) as w:
        return _loop(cfg, run, w, say)


def workers(cfg: Config) -> contextlib.AbstractContextManager[Workers]:
    """The parts of a run, where ``driver.kind`` wants them."""
    if cfg.driver.kind == "ray":
        from verl_fn.driver.ray import ray_workers

        return ray_workers(cfg)
    from verl_fn.driver.local import local_workers

    return local_workers(cfg)


def _loop(cfg: Config, run: Run, w: Workers, say: Say) -> dict[str, float]:
    t, task, key = cfg.trainer, TASKS[cfg.data.task], Key.from_seed(cfg.trainer.seed)
    algorithm, held_out = by_name(cfg.algorithm.name), task.held_out(cfg.data.val_size)
    found = run.latest() if t.resume_mode == "auto" else None
    if found is not None:
        state = restore(found, algorithm.new(cfg, key), w, cfg)
        say(f"continuing {run.folder} after step {state.step}")
    else:
        state = initial_state(cfg, w, algorithm.new(cfg, key))
    run.start(state.step, resumed=found is not None)

    evaluation = last_evaluation(run, state.step, cfg) if found is not None else {}
    if found is None and t.val_before_train:
        evaluation = validate(state, held_out, w, cfg)
        run.log(0, evaluation)
        say(f"before training: {_evaluation_line(evaluation, cfg)}")
    saved = found
    progress = Progress(state.step, t.total_training_steps, t.log_freq, say)
    while state.step < t.total_training_steps and not _reached(evaluation, cfg):
        problems = task.train(state.key.fold_in("data"), state.cursor, cfg.data.train_batch_size)
        state, report = algorithm.step(state, problems, w, cfg)
        last = state.step == t.total_training_steps
        if last or (t.test_freq > 0 and state.step % t.test_freq == 0):
            evaluation = validate(state, held_out, w, cfg)
            report |= evaluation
        run.log(state.step, report)
        progress.show(state.step, report, _evaluation_line(report, cfg))
        if t.save_freq > 0 and state.step % t.save_freq == 0:
            saved = run.save(state, w)
    if saved is None or saved.name != f"step_{state.step}":
        run.save(state, w)
    return evaluation or validate(state, held_out, w, cfg)


def last_evaluation(run: Run, step: int, cfg: Config) -> dict[str, float]:
    """What the run's log says of the evaluation after ``step``; empty where there was none."""
    rows = [row for row in read_metrics(run.folder) if row["step"] == step]
    return {k: v for row in rows for k, v in row.items() if k.startswith("val-")}


def initial_state(cfg: Config, w: Workers, blank: Any) -> Any:
    """The algorithm's state with every role loaded from its model folder."""
    loaded = {}
    for role in build.roles(cfg):
        folder = cfg.critic.path if role == "critic" and cfg.critic.path else cfg.model.path
        loaded[role] = getattr(w, role).load_pretrained(folder, blank.key.fold_in(role))
    return attrs.evolve(blank, **loaded)


def validate(state: Any, problems: Sequence[Problem], w: Workers, cfg: Config) -> dict[str, float]:
    """Reward and exact match of greedy answers to held-out problems, in verl's metric names."""
    w.wait(publish(w, state.actor, state.step))
    sampling = Sampling(cfg.data.max_response_length, temperature=0.0)
    batch = w.rollout.generate(encode_prompts(problems, w.tokenizer), sampling, state.key, version=state.step)
    return w.get(w.call(_evaluation, w.reward(batch, problems), cfg.data.task))


def _evaluation(batch: Batch, task: str) -> dict[str, float]:
    return {
        f"val-core/{task}/acc/mean@1": float(batch["acc"].mean()),
        f"val-aux/{task}/reward/mean@1": float(batch["score"].mean()),
    }


def _evaluation_line(report: dict[str, float], cfg: Config) -> str:
    name = f"val-core/{cfg.data.task}/acc/mean@1"
    return f"held-out exact match {report[name]:.3f}" if name in report else ""


def _reached(evaluation: dict[str, float], cfg: Config) -> bool:
    goal = cfg.trainer.stop_at
    return goal is not None and evaluation.get(f"val-core/{cfg.data.task}/acc/mean@1", -1.0) >= goal


class Progress:
    """A line every few steps: the numbers that matter, and the time left."""

    def __init__(self, start: int, total: int, every: int, say: Say) -> None:
        self._first, self._total, self._every, self._say = start, total, every, say
        self._began = time.perf_counter()

    def show(self, step: int, report: dict[str, float], evaluation: str) -> None:
        """Say where the run is; a step with an evaluation always speaks."""
        if step % self._every and step != self._total and not evaluation:
            return
        left = (time.perf_counter() - self._began) / (step - self._first) * (self._total - step)
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        for name, label, form in (
            ("critic/score/mean", "reward", ".3f"),
            ("train/loss", "loss", ".3f"),
            ("actor/ppo_kl", "kl", ".4f"),
            ("actor/grad_norm", "grad", ".2f"),
            ("perf/throughput", "tok/s", ",.0f"),
        ):
            if name in report:
                parts.append(f"{label} {report[name]:{form}}")
        parts.append(f"left {int(left // 60)}m{int(left % 60):02d}s")
        self._say("  ".join(parts + ([evaluation] if evaluation else [])))
