"""The training loop: it takes steps of the algorithm, evaluates, logs, and saves checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from verl_fn.algorithms import Report, Workers
from verl_fn.config import ConfigError, Plan, make_plan
from verl_fn.config.schema import TrainerConfig
from verl_fn.data.tasks import Problem, Source
from verl_fn.driver import ranks
from verl_fn.state import Params

from .checkpoints import restore, step_of
from .errors import RunError
from .evaluate import accuracy, validate
from .folder import Follower, Run, changed_keys, read_metrics, run_config
from .journal import Recorder, entry, keep_samples
from .loggers import loggers
from .prepare import prepare, workers
from .progress import Lines, Live, Progress, Say
from .signals import stop_requests
from .state import (
    RunState,
    advance,
    algorithm_of,
    blank_state,
    differing_fields,
    initial_state,
    offloaded,
    run_of,
)

SEED = "trainer.seed"


class Interrupted(RuntimeError):
    """Raised after a run was asked to stop and has saved its state."""


def train(plan: Plan, say: Say = print, *, live: bool = False) -> Report:
    """Runs a plan to its end, from the folder's last checkpoint if there is one.

    Args:
        plan: a plan made by ``verl_fn.config.make_plan``.
        say: prints a line.
        live: draw progress on the terminal instead of printing lines.

    Returns:
        The metrics of the last evaluation.

    Raises:
        Interrupted: SIGINT or SIGTERM arrived; the message names the checkpoint and says how to continue.
    """
    if plan.data.val_files and not plan.data.train_files:
        raise ConfigError("data.val_files is set without data.train_files, so there is nothing to train on")
    # Under torchrun all processes run this same loop on the same values, and only the first one writes and prints.
    first = ranks.torchrun_rank() == 0
    if not first:
        say, live = _silent, False
    run = Run(plan) if first else Follower(plan)
    with ranks.process_group(plan), run.locked():
        with ranks.first_alone():
            changes = _changes(run, plan) if plan.trainer.resume_mode == "auto" and run.latest() is not None else []
            source = prepare(plan, say)
        for change in changes:
            say(f"continuing with another setting: {change}")
        say(f"{_headline(plan)}; folder {run.folder}")
        with workers(plan) as w:
            if w.about:
                say(w.about)
            try:
                return _Loop(plan, run, w, source, say).run_to_end(live)
            except Interrupted:
                if not first:
                    ranks.end_after_first(130)
                raise


def _silent(line: str) -> None:
    """Prints nothing."""


def _headline(plan: Plan) -> str:
    """Returns a line with the algorithm, the data and the driver."""
    run = f"{plan.algorithm} on {'files' if plan.data.train_files else plan.data.task}"
    if plan.driver.kind == "ray":
        processes = "process" if plan.ray.ranks == 1 else "processes"
        return f"{run}, starting Ray actors with {plan.ray.ranks} training {processes}"
    size = ranks.torchrun_size()
    return f"{run}, local driver, {ranks.device(plan.driver)}" + (f", {size} processes" if size > 1 else "")


def _changes(run: Run, plan: Plan) -> list[str]:
    """Returns the settings that have changed since the run was last trained, with both values.

    Raises:
        RunError: one of them is part of the saved state, so changing it would have no effect.
    """
    changed = changed_keys(run.folder, plan.table)
    if not changed:
        return []
    before = make_plan(run_config(run.folder)[0])
    for key, values in changed.items():
        if key in _part_of_state(before, plan, list(changed)):
            raise RunError(
                f"{key} cannot change in a run that is continued ({values}): the state holds it. "
                f"Fork the run (verl-fn fork {run.folder} --step N {key}=...), or choose another trainer.dir"
            )
        role, _, setting = key.partition(".")
        if role in plan.roles and setting in ("lora_rank", "lora_alpha", "target_modules"):
            had, has = (role in p.roles and p.roles[role].lora is not None for p in (before, plan))
            if had or has:
                reason, model = ("holds the adapters", "merged model") if had else ("is without adapters", "model")
                raise RunError(
                    f"{key} cannot change in a run that is continued ({values}): the state {reason}. Choose another "
                    f"trainer.dir; {role}'s {model} is in {run.latest()}/{role}"
                )
    return [f"{key}: {values}" for key, values in changed.items()]


def _part_of_state(before: Plan, now: Plan, changed: list[str]) -> list[str]:
    """Returns the changed keys that are part of the algorithm's state: the seed, and options that it stores."""
    if before.algorithm != now.algorithm or before.roles.keys() != now.roles.keys():
        return []
    stored = [SEED] if SEED in changed else []
    same_seed = attrs.evolve(now, trainer=attrs.evolve(now.trainer, seed=before.trainer.seed))
    if differing_fields(before, same_seed):
        # The options of a nested table become one field of the state, such as those of kl_ctrl the field kl.
        stored += [key for key in changed if key.startswith("algorithm.") and key.count(".") > 1]
        stored = stored or [key for key in changed if key.startswith("algorithm.")]
    return stored


def restored_state(folder: Path, plan: Plan, w: Workers) -> RunState:
    """Reads the state in a checkpoint.

    In a fork, fields of the algorithm's state that the new settings would initialize differently, such as the key,
    take their new initial values.
    """
    source = run_of(folder)
    before = plan
    if source != Path(plan.trainer.dir) and (source / "config.toml").is_file():
        before = make_plan(run_config(source, step_of(folder))[0])
    state = restore(folder, blank_state(before), plan, w)
    if before is not plan:
        fresh = blank_state(plan).algorithm
        changed = {name: getattr(fresh, name) for name in differing_fields(before, plan)}
        state = RunState(attrs.evolve(state.algorithm, **changed), state.cursor)
    return state.with_roles(offloaded({name: state.role(name) for name in plan.roles}, plan, w))


class _Loop:
    """One execution of the loop: the parts it works with, the last evaluation and the last checkpoint."""

    def __init__(self, plan: Plan, run: Run, w: Workers, source: Source, say: Say) -> None:
        self.plan, self.run, self.w, self.source, self.say = plan, run, w, source, say
        self.algorithm = algorithm_of(plan)
        self.held_out: tuple[Problem, ...] = source.held_out(plan.data.val_size)
        self.recorder = Recorder(w)
        self.evaluation: Report = {}
        self.saved: Path | None = None

    def run_to_end(self, live: bool) -> Report:
        """Starts or continues the run, trains until the last step or the goal, and returns the last evaluation."""
        plan, t, say = self.plan, self.plan.trainer, self.say
        origin = ranks.of_first(_origin(plan, self.run))
        if origin is not None:
            state = restored_state(origin, plan, self.w)
            say(f"continuing {self.run.folder} after step {state.step}, from {origin}")
            self.evaluation = ranks.of_first(last_evaluation(run_of(origin), state.step))
        else:
            state = initial_state(plan, self.w)
        _print_adapters(state, plan, self.w, say)
        if origin is not None and (state.step >= t.total_training_steps or self._reached()):
            say(f"finished before: {state.step} steps of {t.total_training_steps}; nothing was done or changed")
            return self.evaluation
        if origin is None and (dropped := read_metrics(self.run.folder)):
            last = dropped[-1]["step"]
            say(f"no checkpoint in {self.run.folder}: starting over; the log up to step {last} is dropped")
        with ranks.together():
            self.run.start(state.step, origin=origin)
        self.saved = origin if origin is not None and run_of(origin) == self.run.folder else None
        state = self._steps(state, live, fresh=origin is None)
        if self._reached() and state.step < t.total_training_steps:
            say(f"trainer.stop_at = {t.stop_at} is reached at step {state.step}")
        if self.saved is None or self.saved.name != f"step_{state.step}":
            self.run.save(state, self.w)
        say(f"done: {state.step} steps; the model is {self.run.folder}/model")
        return self.evaluation

    def _steps(self, state: RunState, live: bool, *, fresh: bool) -> RunState:
        plan, t = self.plan, self.plan.trainer
        step_workers = self.recorder.workers if t.journal != "off" else self.w
        with contextlib.ExitStack() as stack:
            logs: list[Callable[[int, Mapping[str, float]], None]] = [self.run.log]
            if not isinstance(self.run, Follower):
                logs += stack.enter_context(loggers(t, plan.table, self.run.folder, state.step))
            if fresh and t.val_before_train and self.held_out:
                self._evaluate(state)
                for log in logs:
                    log(0, self.evaluation)
                self.say(f"before training: {evaluation_line(self.evaluation)}")
            stop_signals = stack.enter_context(stop_requests(self.say))
            total = t.total_training_steps
            progress: Progress = Live(state.step, total) if live else Lines(state.step, total, t.log_freq, self.say)
            stack.enter_context(progress)
            skipped: dict[str, int] = {}
            while state.step < total and not self._reached():
                state, report = advance(self.algorithm, state, self.source, step_workers, plan.data.train_batch_size)
                last = state.step == total
                if self.held_out and (last or (t.test_freq > 0 and state.step % t.test_freq == 0)):
                    report |= self._evaluate(state)
                for log in logs:
                    log(state.step, report)
                self._write_journal(state)
                progress.show(state.step, report, evaluation_line(report))
                _end_if_skipping(skipped, report, state.step, t, self.run)
                stop = any(ranks.gathered(bool(stop_signals)))
                if stop or (t.save_freq > 0 and state.step % t.save_freq == 0):
                    self.saved = self.run.save(state, self.w)
                if stop and not last:
                    raise Interrupted(
                        f"stopped after step {state.step} and saved {self.saved}; "
                        "the same command continues from there"
                    )
        return state

    def _evaluate(self, state: RunState) -> Report:
        report, answers = validate(state, self.held_out, self.w, self.plan)
        if answers:
            self.run.append("generations.jsonl", *({"step": state.step} | answer for answer in answers))
        self.evaluation = ranks.of_first(report)
        return self.evaluation

    def _write_journal(self, state: RunState) -> None:
        journal = self.plan.trainer.journal
        if journal != "off":
            if journal == "samples":
                keep_samples(self.run, state.step, self.recorder, self.w)
            self.run.append("journal.jsonl", entry(state, self.recorder, self.w, self.plan))

    def _reached(self) -> bool:
        goal, share = self.plan.trainer.stop_at, accuracy(self.evaluation)
        return goal is not None and share is not None and share >= goal


def _print_adapters(state: RunState, plan: Plan, w: Workers, say: Say) -> None:
    """Prints how many parameters of each model with adapters are trained."""
    for name, role in plan.roles.items():
        if role.lora:
            trained, total = w.get(w.trainers[name].map(_sizes, state.role(name).params))
            say(f"{name} trains {trained:,} of {total:,} parameters ({trained / total:.2%})")


def _sizes(params: Params) -> tuple[int, int]:
    """Counts the trained elements and all elements of a model."""
    return sum(params[name].numel() for name in params.trained()), sum(p.numel() for p in params.values())


def _origin(plan: Plan, run: Run) -> Path | None:
    """Returns the checkpoint to start from: the folder's newest, or the one to fork; None for a new run."""
    newest, path = run.latest(), plan.trainer.resume_from_path
    if newest is not None and plan.trainer.resume_mode == "auto":
        return newest
    if path is None:
        return None
    if newest is not None:
        raise RunError(f"{run.folder} holds checkpoints already, up to {newest.name}; choose another trainer.dir")
    if not Path(path).is_dir():
        raise ConfigError(f"trainer.resume_from_path: {path} is not a folder")
    return Path(path)


def last_evaluation(folder: Path, step: int) -> Report:
    """Returns the logged metrics of the evaluation after ``step``; empty if there was none."""
    rows = [row for row in read_metrics(folder) if row["step"] == step]
    return {k: v for row in rows for k, v in row.items() if k.startswith("val-")}


def evaluation_line(report: Report) -> str:
    """Formats the held-out accuracy; empty for a step without an evaluation."""
    share = accuracy(report)
    return "" if share is None else f"held-out exact match {share:.3f}"


def _end_if_skipping(skipped: dict[str, int], report: Report, step: int, t: TrainerConfig, run: Run) -> None:
    """Ends a run in which all updates of a role have been skipped for ``trainer.max_skipped_steps`` steps.

    Raises:
        RunError: they have.
    """
    for name, share in report.items():
        if name.endswith("/update_skipped"):
            role = name.partition("/")[0]
            skipped[role] = skipped.get(role, 0) + 1 if share == 1.0 else 0
            if skipped[role] >= t.max_skipped_steps:
                raise RunError(
                    f"the gradients of {role} were not finite in any update of the last {skipped[role]} steps, up to "
                    f"step {step}; all those updates were skipped. Look at {run.metrics_file} for the first nan, "
                    f"and lower the learning rate or fix the loss or reward; trainer.max_skipped_steps sets the limit"
                )
