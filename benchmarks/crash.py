"""``kill -9`` at random moments of a run that saves after every step; every one must resume to the same bytes.

Each trial starts a run, kills it at a moment drawn evenly over the time that a whole run takes, runs the same
command again, and compares checkpoint, metrics, journal and kept answers with a run that nobody disturbed. With
``--async-save`` the killed runs write their checkpoints while the next step runs; the undisturbed run does not.
Runs are forked from one process that has trained already, so that moments fall into the run, not into imports.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import Plan, load, make_plan
from verl_fn.data.tasks import TASKS
from verl_fn.runs import loop as training
from verl_fn.runs.checkpoints import checkpoints
from verl_fn.runs.logs import TIMED, read_lines

from . import measure

STEPS = 6


def plan_of(folder: Path, model: Path, seed: int, *, async_save: bool = False) -> Plan:
    """A PPO run of some steps that saves and evaluates after each."""
    cfg = load(
        None,
        [
            f"trainer.dir={folder}", f"model.path={model}", f"trainer.seed={seed}",
            f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=2",
            "trainer.journal=samples", "algorithm.name=ppo", "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive", "data.train_batch_size=8", "algorithm.ppo_mini_batch_size=4",
            "algorithm.shuffle=true", "data.max_response_length=8", "data.val_size=8", "actor.optim.lr=1e-3",
            "actor.optim.lr_scheduler_type=cosine", "critic.optim.lr=1e-3", "driver.num_threads=1",
            "driver.device=cpu", f"trainer.async_save={str(async_save).lower()}",
        ],
    )  # fmt: skip
    return make_plan(cfg)


def run(plan: Plan, kill_after: float | None = None) -> tuple[bool, float, bool]:
    """Train in a process of its own, killed after so many seconds if it still runs.

    Returns whether it ended by itself and well, its seconds, and whether a checkpoint was half written at the end.
    """
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        end_after(lambda: training.train(plan), Path(plan.trainer.dir).with_suffix(".log"))
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    half = any(Path(plan.trainer.dir).glob("checkpoints/.writing_*"))
    return status == 0, time.perf_counter() - began, half


def end_after(work: Callable[[], object], log: Path) -> NoReturn:
    """Calls a function with all output in a file, and ends this process: with status 1 after an error."""
    status = 1
    try:
        file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def numbers(folder: Path) -> dict[str, Any]:
    """All of a run that must not depend on how often it was killed."""
    last = checkpoints(folder)[0]
    files = [p for p in sorted(last.rglob("*")) if p.is_file()]
    contents: dict[str, Any] = {str(p.relative_to(last)): p.read_bytes() for p in files}
    contents |= {str(p.name): p.read_bytes() for p in sorted((folder / "samples").iterdir())}
    for name in ("metrics.jsonl", "journal.jsonl", "generations.jsonl"):
        rows = read_lines(folder / name)
        contents[name] = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]
    return contents


def trials(folder: Path, kills: int, seed: int, *, async_save: bool) -> dict[str, Any]:
    """Kill and resume ``kills`` times, each time from a fresh run."""
    # Before anything computes: a process with threads must not be forked.
    torch.set_num_threads(1)
    model = new_model(folder / "model", chars=TASKS["reverse"].alphabet, hidden_size=16)
    training.train(plan_of(folder / "whole", model, seed), lambda line: None)
    wanted = numbers(folder / "whole")
    whole = []
    for i in range(3):
        ended, seconds, _ = run(plan_of(folder / f"whole_{i}", model, seed, async_save=async_save))
        if not ended or numbers(folder / f"whole_{i}") != wanted:
            raise RuntimeError((folder / f"whole_{i}.log").read_text())
        whole.append(seconds)
    rng = random.Random(seed)
    result: dict[str, Any] = {"kills": 0, "ended_before": 0, "while_saving": 0, "resumed_from": {}, "failures": []}
    while result["kills"] < kills:
        plan = plan_of(folder / "killed", model, seed, async_save=async_save)
        shutil.rmtree(folder / "killed", ignore_errors=True)
        after = rng.uniform(0, statistics.median(whole))
        ended, _, half = run(plan, after)
        if ended:
            result["ended_before"] += 1
            continue
        result["kills"] += 1
        result["while_saving"] += half
        at = checkpoints(folder / "killed")
        name = at[0].name if at else "the beginning"
        result["resumed_from"][name] = result["resumed_from"].get(name, 0) + 1
        ended, _, _ = run(plan)
        if not ended:
            log = (folder / "killed.log").read_text().splitlines()
            result["failures"].append({"after_s": after, "why": log[-1] if log else "no output"})
        elif different := [k for k, v in numbers(folder / "killed").items() if wanted.get(k) != v]:
            result["failures"].append({"after_s": after, "why": f"{different[:3]} differ"})
        (folder / "killed.log").unlink(missing_ok=True)
    return result | {"async_save": async_save, "steps": STEPS, "run_s": statistics.median(whole)}


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench crash``: exit status 1 where a resume failed or gave other bytes."""
    parser = measure.parser("crash", __doc__)
    parser.add_argument("--kills", type=measure.count, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = trials(Path(folder), args.kills, args.seed, async_save=args.async_save)
    measure.write(args.json, "crash", "cpu", result)
    print(
        f"{result['kills']} kills, {result['while_saving']} of them while a checkpoint was written; "
        f"resumed from {dict(sorted(result['resumed_from'].items()))}"
    )
    for failure in result["failures"]:
        print(f"after {failure['after_s']:.3f} s: {failure['why']}")
    print(f"{len(result['failures'])} failures: {'held' if not result['failures'] else 'MISSED'}")
    return 1 if result["failures"] else 0
