"""Fork and replay: continuing a run's state under another config, and executing a step again to compare it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from verl_fn import build
from verl_fn.algorithms import Workers
from verl_fn.config import Plan, load, make_plan
from verl_fn.driver.ranks import torchrun_size
from verl_fn.errors import say as print_line

from . import RunError
from .checkpoints import checkpoints, step_of
from .continuing import with_updates
from .evaluate import validate
from .fitting import sized
from .history import changed_inputs, changed_keys, config_file, fingerprints, recorded_inputs, run_config
from .journal import Recorded, entry, first_difference, read_samples, state_digests
from .logs import EVALUATED, metrics_row, read_journal, read_metrics
from .loop import restored_state
from .prepare import prepare, workers
from .progress import Say
from .recorder import Drawn
from .state import RunState, algorithm_of, initial_state, offloaded_roles, on_one_gpu, run_of
from .steps import RANKS, ROWS_WAITING, advance

HOW = ("timing_s/", "perf/")  # families of metrics that do not say what a step computed


def fork_plan(folder: str | Path, step: int, overrides: Iterable[str] = ()) -> Plan:
    """Returns the plan that continues a run's state after ``step`` in a new folder.

    Args:
        step: the step of the checkpoint to continue from.

    Raises:
        RunError: the run has no checkpoint of that step (the message lists its steps), or the new folder holds a
            fork with other settings.
    """
    folder = Path(folder).resolve()
    run_config(folder, step)
    by_step = {step_of(p): p for p in checkpoints(folder)}
    if step not in by_step:
        steps = ", ".join(str(s) for s in sorted(s for s in by_step if s is not None)) or "none"
        raise RunError(
            f"{folder} has no checkpoint of step {step}; there are: {steps} "
            f"(trainer.save_freq and trainer.max_ckpt_to_keep say how many are kept)"
        )
    location = [f"trainer.dir={folder}_fork_{step}", f"trainer.resume_from_path={by_step[step]}"]
    plan = make_plan(load(config_file(folder, step), [*location, *overrides]))
    if changed := changed_keys(Path(plan.trainer.dir), plan.table):
        changes = "; ".join(f"{key}: {values}" for key, values in changed.items())
        raise RunError(f"{plan.trainer.dir} holds a fork with other settings ({changes}); choose another trainer.dir")
    return plan


@attrs.frozen
class Replayed:
    """The result of a replay.

    Attributes:
        step: the last step that was executed again.
        difference: the first value that differs, with both values; None if all are equal.
        compared: how many values were compared, by kind.
        changed: what the run read has now another content or version, such as a file of the user's code.
    """

    step: int
    difference: str | None
    compared: dict[str, int]
    changed: tuple[str, ...] = ()


def replay(folder: str | Path, step: int, *, recorded: bool = False, say: Say = print_line) -> Replayed:
    """Executes a run's steps again, from its last checkpoint before ``step``, and compares them with the log.

    Args:
        step: the last step to execute.
        recorded: take the samples from the journal instead of sampling again, for engines whose draws do not repeat.

    Raises:
        RunError: the run has no such step, its journal has no samples, or its samples cannot be drawn again.
    """
    folder = Path(folder).resolve()
    cfg, since = run_config(folder, step)
    plan = make_plan(cfg)
    # A judge is not asked again: it might reply otherwise.
    plan = plan.changed("reward", offline=bool(plan.reward.url))
    rows = {row["step"]: row for row in read_metrics(folder)}
    if step < 1 or step not in rows:
        raise RunError(
            f"{folder} has no step {step} to replay; its metrics.jsonl ends at step {max(rows, default=0)}"
        )
    journal = read_journal(folder)
    if plan.rollout.in_flight_weight_updates and not recorded:
        raise RunError(
            f"{folder} sampled with rollout.in_flight_weight_updates, where draws depend on when weights arrive, so "
            "they do not repeat; replay with --recorded, which needs trainer.journal=samples in the run"
        )
    if recorded and plan.learns_from != "samples":
        raise RunError(f"{plan.algorithm} draws no samples, so there are none to take from the journal")
    origin = _origin(folder, plan.trainer.resume_from_path, step, since)
    plan = with_updates(plan, origin)
    done = (step_of(origin) or 0) if origin is not None else 0
    _check_ranks(folder, [row for at, row in rows.items() if done < at <= step])
    # Before anything is read: a changed file may be the reason why it cannot be.
    changed = tuple(changed_inputs(recorded_inputs(folder, step), fingerprints(plan)))
    for change in changed:
        say(f"note: the replay has {change} than step {step} had")
    source, plan = prepare(plan, say), sized(plan, build.smallest_gpu(plan.driver))
    # The journal has the samples of steps that have learned. With these, nothing is drawn ahead, so nothing waits.
    of_steps = plan.changed("driver", max_lag=0) if recorded else plan
    with workers(plan) as w:
        algorithm = on_one_gpu(algorithm_of(plan), plan, offloaded_roles(plan, w.processes.gpu_memory))
        state = restored_state(origin, plan, w) if origin is not None else initial_state(plan, w)
        say(f"executing steps {state.step + 1} to {step} again, from {origin or 'the beginning'}")
        while True:
            at = state.step + 1
            if at not in rows:
                raise RunError(f"{folder}/metrics.jsonl has no line for step {at}")
            step_workers = attrs.evolve(w, rollout=Recorded(read_samples(folder, at))) if recorded else w
            state, report, drawn = advance(algorithm, state, source, step_workers, of_steps)
            if recorded:
                for report_of_step in (report, rows[at]):
                    report_of_step.pop(ROWS_WAITING, None)
            if at == step and any(name.startswith(EVALUATED) for name in rows[step]):
                report |= validate(state, source.held_out(plan.data.val_size), w, plan)[0]
            compared, difference = _compare(plan, w, state, drawn, rows[at], report, journal.get(at), at == step)
            if difference is not None or at == step:
                return Replayed(at, difference, compared, changed)


def _compare(
    plan: Plan,
    w: Workers,
    state: RunState,
    drawn: Drawn,
    row: dict[str, Any],
    report: dict[str, float],
    line: dict[str, Any] | None,
    last: bool,
) -> tuple[dict[str, int], str | None]:
    """Compares an executed step with the log: samples first, then metrics, then the state.

    Args:
        line: the step's line of the journal; None if the run has no journal.
        last: whether this is the last step of the replay.

    Returns:
        How many values were compared by kind, and a description of the first difference or None.
    """
    logged, repeated = _repeatable(row, last), _repeatable(metrics_row(state.step, report), last)
    compared, metric = {"metrics": len(logged)}, _first_metric(logged, repeated)
    if line is None:
        return compared, metric or (_against_checkpoint(state, plan, w, compared) if last else None)
    executed = entry(state, drawn, w, plan)
    compared["sample fields"] = len(executed["samples"])
    compared["state leaves"] = sum(len(leaves) for leaves in executed["state"].values())
    samples, after = (first_difference(line, executed, kind) for kind in ("samples", "state"))
    return compared, samples or metric or after


def _origin(folder: Path, resume_from: str | None, step: int, since: int | None) -> Path | None:
    """Returns the last checkpoint before ``step`` that was made with the same settings.

    Args:
        resume_from: the checkpoint that the run is a fork of, if it is one.
        since: the step after which the settings of ``step`` applied; None if they applied from the beginning.

    Returns:
        The checkpoint; None if the replay starts from the initial state.

    Raises:
        RunError: there is no such checkpoint, and the settings did not apply from the first step.
    """
    forked = Path(resume_from) if resume_from else None
    if forked is not None and step <= (step_of(forked) or 0):
        raise RunError(f"step {step} is of the run that was forked: replay it in {run_of(forked) or forked}")
    for checkpoint in (*checkpoints(folder), *([forked] if forked is not None else [])):
        if (since or 0) <= (step_of(checkpoint) or 0) < step and checkpoint.is_dir():
            return checkpoint
    if since is not None or forked is not None:
        raise RunError(
            f"the settings of step {step} apply since step {since or 0}, and no checkpoint from there to before step "
            f"{step} is left to replay from; trainer.max_ckpt_to_keep says how many the run keeps"
        )
    return None


def _check_ranks(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Checks that the steps were made by the same number of processes, since another number rounds differently."""
    for row in rows:
        if (size := row.get(RANKS, 1)) != torchrun_size():
            launcher = f"under torchrun with --nproc-per-node {size:g}" if size > 1 else "without torchrun"
            raise RunError(
                f"step {row['step']} of {folder} was made by {size:g} training processes, and "
                f"{torchrun_size()} would round differently; replay it {launcher}"
            )


def _repeatable(row: dict[str, Any], evaluated: bool) -> dict[str, Any]:
    """Returns a row without times, and without evaluation metrics unless the evaluation was repeated.

    Counters of work (``perf/``) say how a step was computed, and a continued run may have computed it otherwise.
    """
    excluded = HOW if evaluated else (*HOW, *EVALUATED)
    return {name: value for name, value in row.items() if not name.startswith(excluded)}


def _first_metric(logged: dict[str, Any], repeated: dict[str, Any]) -> str | None:
    """Describes the first metric that differs; returns None if all are equal.

    An evaluation may have metrics that the version which logged it had not.
    """
    for name in (*logged, *(name for name in repeated if not name.startswith(EVALUATED))):
        if logged.get(name) != repeated.get(name):
            return f"metric {name}: logged {logged.get(name)!r}, now {repeated.get(name)!r}"
    return None


def _against_checkpoint(state: RunState, plan: Plan, w: Workers, compared: dict[str, int]) -> str | None:
    """Compares the state with the run's checkpoint of the same step, if there is one."""
    checkpoint = {step_of(p): p for p in checkpoints(plan.trainer.dir)}.get(state.step)
    if checkpoint is None:
        return None
    saved = restored_state(checkpoint, plan, w)
    for role in plan.roles:
        trainer = w.trainers[role]
        before, now = (w.get(trainer.map(state_digests, trainer, s.role(role))) for s in (saved, state))
        compared["state leaves"] = compared.get("state leaves", 0) + len(before)
        for name, digest in before.items():
            if now.get(name) != digest:
                return f"state {role}{name}: another value than in {checkpoint}"
    return None
