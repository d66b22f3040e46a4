"""Fork and replay: a run's state continued under another config, and a step executed again and compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from verl_fn.algorithms import Workers
from verl_fn.config import Plan, load, make_plan
from verl_fn.driver.ranks import torchrun_size

from .checkpoints import checkpoints, step_of
from .errors import RunError
from .evaluate import validate
from .folder import (
    TIMED,
    changed_keys,
    metrics_row,
    read_lines,
    read_metrics,
    run_config,
)
from .journal import Recorded, Recorder, digests, entry, first_difference, read_samples
from .loop import restored_state
from .prepare import prepare, workers
from .progress import Say
from .state import RANKS, RunState, advance, algorithm_of, initial_state, run_of


def fork_plan(folder: str | Path, step: int, overrides: Iterable[str] = ()) -> Plan:
    """Returns the plan that continues a run's state after ``step`` in a folder of its own.

    Raises:
        RunError: the run has no checkpoint of that step; those that it has are named.
    """
    folder = Path(folder).resolve()
    run_config(folder)
    found = {step_of(p): p for p in checkpoints(folder)}
    if step not in found:
        there = ", ".join(str(s) for s in sorted(s for s in found if s is not None)) or "none"
        raise RunError(
            f"{folder} has no checkpoint of step {step}; there are: {there} "
            f"(trainer.save_freq and trainer.max_ckpt_to_keep say how many are kept)"
        )
    own = [f"trainer.dir={folder}_fork_{step}", f"trainer.resume_from_path={found[step]}"]
    plan = make_plan(load(folder / "config.toml", [*own, *overrides]))
    if changed := changed_keys(Path(plan.trainer.dir), plan.table):
        told = "; ".join(f"{key}: {values}" for key, values in changed.items())
        raise RunError(f"{plan.trainer.dir} holds a fork with other settings ({told}); choose another trainer.dir")
    return plan


@attrs.frozen
class Replayed:
    """What a replay found.

    Attributes:
        step: the last step that was executed again.
        difference: the first value that is not the same, with both values; None if all are.
        compared: how many values were, by kind.
    """

    step: int
    difference: str | None
    compared: dict[str, int]


def replay(folder: str | Path, step: int, *, recorded: bool = False, say: Say = print) -> Replayed:
    """Executes a run's steps from its last checkpoint before ``step`` up to ``step`` and compares what was logged.

    Args:
        recorded: take the samples from the journal instead of sampling again, for engines that cannot repeat.

    Raises:
        RunError: the run has no such step, or its journal has no samples.
    """
    folder = Path(folder).resolve()
    cfg, since = run_config(folder, step)
    plan = make_plan(cfg)
    rows = {row["step"]: row for row in read_metrics(folder)}
    if step < 1 or step not in rows:
        raise RunError(
            f"{folder} has no step {step} to replay; its metrics.jsonl ends at step {max(rows, default=0)}"
        )
    journal = {line["step"]: line for line in read_lines(folder / "journal.jsonl")}
    if recorded and plan.algorithm == "sft":
        raise RunError("sft draws no samples, so there are none to take from the journal")
    origin = _beginning(folder, plan.trainer.resume_from_path, step, since)
    begun = (step_of(origin) or 0) if origin is not None else 0
    _check_ranks(folder, [row for at, row in rows.items() if begun < at <= step])
    source = prepare(plan, say)
    with workers(plan) as w:
        state = restored_state(origin, plan, w) if origin is not None else initial_state(plan, w)
        say(f"executing steps {state.step + 1} to {step} again, from {origin or 'the beginning'}")
        while True:
            at = state.step + 1
            if at not in rows:
                raise RunError(f"{folder}/metrics.jsonl has no line for step {at}")
            engine = attrs.evolve(w, rollout=Recorded(read_samples(folder, at))) if recorded else w
            seen = Recorder(engine)
            state, report = advance(algorithm_of(plan), state, source, seen.workers, plan.data.train_batch_size)
            if at == step and any(name.startswith("val-") for name in rows[step]):
                report |= validate(state, source.held_out(plan.data.val_size), w, plan)[0]
            compared, difference = _compare(
                folder, plan, w, state, seen, rows[at], report, journal.get(at), at == step
            )
            if difference is not None or at == step:
                return Replayed(at, difference, compared)


def _compare(
    folder: Path,
    plan: Plan,
    w: Workers,
    state: RunState,
    seen: Recorder,
    row: dict[str, Any],
    report: dict[str, float],
    line: dict[str, Any] | None,
    last: bool,
) -> tuple[dict[str, int], str | None]:
    """Compares an executed step with what was logged of it: samples first, then metrics, then the state."""
    before, now = _repeatable(row, last), _repeatable(metrics_row(state.step, report), last)
    compared, difference = {"metrics": len(before)}, None
    executed = entry(state, seen, w, plan) if line is not None else None
    if line is not None and executed is not None:
        compared["sample fields"] = len(executed["samples"])
        compared["state leaves"] = sum(len(leaves) for leaves in executed["state"].values())
        difference = first_difference(line, executed, "samples")
    difference = difference or _first(before, now)
    if line is not None and executed is not None:
        difference = difference or first_difference(line, executed, "state")
    elif last:
        difference = difference or _against_checkpoint(folder, state, plan, w, compared)
    return compared, difference


def _beginning(folder: Path, resume_from: str | None, step: int, since: int) -> Path | None:
    """Returns the last checkpoint before ``step`` of the time in which its settings held; None for the beginning."""
    forked = Path(resume_from) if resume_from else None
    if forked is not None and step <= (step_of(forked) or 0):
        raise RunError(f"step {step} is of the run that was forked: replay it in {run_of(forked)}")
    for found in (*checkpoints(folder), *([forked] if forked is not None else [])):
        if since <= (step_of(found) or 0) < step and found.is_dir():
            return found
    if since or forked is not None:
        raise RunError(
            f"the settings of step {step} held since step {since}, and no checkpoint from there is left to replay from"
        )
    return None


def _check_ranks(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Refuse steps that another number of torchrun's processes made: their sums are rounded otherwise."""
    for row in rows:
        if (made := row.get(RANKS, 1)) != torchrun_size():
            how = f"under torchrun with --nproc-per-node {made:g}" if made > 1 else "without torchrun"
            raise RunError(
                f"step {row['step']} of {folder} was made by {made:g} training processes, and {torchrun_size()} would "
                f"round otherwise; replay it {how}"
            )


def _repeatable(row: dict[str, Any], evaluated: bool) -> dict[str, Any]:
    """A row less what a clock measured, and less an evaluation that was not made again."""
    left_out = TIMED if evaluated else (*TIMED, "val-")
    return {name: value for name, value in row.items() if not name.startswith(left_out)}


def _first(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            return f"metric {name}: logged {before.get(name)!r}, now {now.get(name)!r}"
    return None


def _against_checkpoint(
    folder: Path, state: RunState, plan: Plan, w: Workers, compared: dict[str, int]
) -> str | None:
    """Compares the state with the run's checkpoint of the same step, where there is one."""
    saved = {step_of(p): p for p in checkpoints(folder)}.get(state.step)
    if saved is None:
        return None
    there = restored_state(saved, plan, w)
    for role in plan.roles:
        before, now = (w.get(w.trainers[role].map(digests, s.role(role))) for s in (there, state))
        compared["state leaves"] = compared.get("state leaves", 0) + len(before)
        for name, digest in before.items():
            if now.get(name) != digest:
                return f"state {role}{name}: another value than in {saved}"
    return None
