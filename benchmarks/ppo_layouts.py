"""PPO on one process and on several sharded ranks over Ray, step by step on the same recorded samples.

A run of one process on the CPU keeps its samples in its journal. The other run reads them instead of sampling, so
that both train on the same batches, each with its own weights. Losses and gradient norms of actor and critic are
compared at every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import Plan, load, make_plan
from verl_fn.data.tasks import TASKS
from verl_fn.runs.journal import Recorded, read_samples
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import prepare, workers
from verl_fn.runs.state import algorithm_of, initial_state
from verl_fn.runs.steps import advance

from . import measure

METRICS = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")
BAR = 1e-4
# A policy loss passes through zero, where it has no relative error.
FLOOR = 1e-3
SETTINGS = (
    "data.train_batch_size=32", "data.max_response_length=12", "algorithm.ppo_mini_batch_size=16", "rollout.n=2",
    "algorithm.use_kl_loss=true", "actor.optim.lr=2e-4", "critic.optim.lr=1e-3", "driver.num_threads=1",
    "trainer.val_before_train=false", "data.val_size=1", "trainer.journal=samples", "driver.device=cpu",
)  # fmt: skip


def compare(folder: Path, model: Path, steps: int, layout: Sequence[str]) -> list[dict[str, Any]]:
    """Each step's metrics on one process and on ``layout``, and how far they differ."""
    settings = [*SETTINGS, f"model.path={model}", f"trainer.total_training_steps={steps}"]
    local = make_plan(load(overrides=[*settings, f"trainer.dir={folder / 'local'}"]))
    train(local, lambda line: None)
    wanted = {row["step"]: row for row in read_metrics(folder / "local")}
    other = make_plan(load(overrides=[*settings, f"trainer.dir={folder / 'other'}", *layout]))
    reports = recorded_run(other, folder / "local")
    rows = []
    for step, report in enumerate(reports, 1):
        pairs = {name: (wanted[step][name], report[name]) for name in METRICS}
        errors = {name: abs(b - a) / max(abs(a), FLOOR) for name, (a, b) in pairs.items()}
        rows.append({"step": step, "errors": errors, "local": {name: a for name, (a, _) in pairs.items()}})
    return rows


def recorded_run(plan: Plan, samples: Path) -> list[dict[str, float]]:
    """The reports of a run's steps on the samples of another one."""
    source = prepare(plan, lambda line: None)
    reports = []
    with workers(plan) as w:
        state = initial_state(plan, w)
        for step in range(1, plan.trainer.total_training_steps + 1):
            engine = attrs.evolve(w, rollout=Recorded(read_samples(samples, step)))
            state, report, _ = advance(algorithm_of(plan), state, source, engine, plan)
            reports.append(report)
    return reports


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench ppo-layouts``: a table; exit status 1 where the bar is missed."""
    parser = measure.parser("ppo-layouts", __doc__)
    parser.add_argument("--steps", type=measure.count, default=20)
    parser.add_argument("--ranks", type=measure.count, default=2)
    args = parser.parse_args(argv)
    layout = ["driver.kind=ray", f"ray.ranks={args.ranks}", "actor.strategy=fsdp", f"driver.device={args.device}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = new_model(folder / "model", chars=TASKS["reverse"].alphabet)
        rows = compare(folder, model, args.steps, layout)
    print("step" + "".join(f"{name:>20}" for name in METRICS))
    for row in rows:
        print(f"{row['step']:>4}" + "".join(f"{row['errors'][name]:>20.1e}" for name in METRICS))
    worst = {name: max(row["errors"][name] for row in rows) for name in METRICS}
    held = all(error <= BAR for error in worst.values())
    print(f"worst {max(worst.values()):.1e}: {'held' if held else 'MISSED'} (bar {BAR:.0e})")
    about = {"layout": layout, "bar": BAR, "floor": FLOOR, "worst": worst, "held": held}
    measure.write(args.json, "ppo-layouts", args.device, {**about, "settings": SETTINGS, "steps": rows})
    return 0 if held else 1
