"""The training loop: it takes steps of the algorithm, evaluates, logs, and saves checkpoints."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import attrs

from verl_fn import build
from verl_fn.algorithms import Report, Workers
from verl_fn.algorithms.policy_optimization import NoSignal
from verl_fn.config import ConfigError, Plan, make_plan
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem, Source
from verl_fn.driver import ranks
from verl_fn.environments.processes import EnvError
from verl_fn.errors import say as print_line
from verl_fn.pool.worker import short
from verl_fn.rewards.reward import RewardError
from verl_fn.state import Params
from verl_fn.steps.advantages.columns import AdvantageError
from verl_fn.torchrun import leading

from . import RunError
from .check_run import unplanned
from .checkpoints import can_be_held, check_disk, restore, step_of
from .checks import check_all_weights, check_conversations, check_has_training, check_run_folder, check_writable
from .continuing import changes, find_origin, finished, goal_reached, going_on, unused_settings
from .evaluate import check_goal, evaluation_line, validate
from .fitting import sized, with_engine
from .folder import Run
from .history import run_config
from .journal import entry, keep_responses, keep_samples
from .logs import GENERATIONS, JOURNAL, METRICS, Log, altered, last_evaluation, loggers, read_metrics
from .memory import check_memory, explained
from .prepare import prepare, started, with_use_of_engine, workers
from .progress import (
    NOTICES,
    Lines,
    Live,
    Say,
    Start,
    always_zero,
    held_out_cut_off,
)
from .recorder import Drawn
from .state import (
    RunState,
    algorithm_of,
    at_rest,
    blank_state,
    counted_updates,
    differing_fields,
    initial_state,
    made_updates,
    offloaded_roles,
    on_one_gpu,
    other_updates,
    run_of,
)
from .steps import advance

LONGEST = 4000  # characters of a ground truth in the log: the report shows less, and tests of code may have millions


# Raised while samples are judged or their advantages are computed: all ranks that train wait for a call then, and can
# save. After an error of one rank, the others may hang.
REFUSED = (NoSignal, RewardError, EnvError, DataError, ConfigError, AdvantageError)


class Interrupted(RuntimeError):
    """Raised after a run was asked to stop and has saved its state."""


def train(plan: Plan, say: Say = print_line, *, live: bool = False, began: float | None = None) -> Report:
    """Runs a plan to its end, from the folder's last checkpoint if there is one.

    Args:
        live: draw progress on the terminal instead of printing lines.
        began: ``time.monotonic()`` of the command, for ``timing_s/start/*``; None if it is not known.

    Returns:
        The metrics of the last evaluation.

    Raises:
        Interrupted: SIGINT or SIGTERM arrived; the message names the checkpoint and says how to continue.
        RunOutOfMemory: a device has too little memory; the message names the phase and the settings to lower.
    """
    start = Start(say, began)
    check_has_training(plan)
    check_run_folder(plan)
    with contextlib.ExitStack() as stack:
        stack.enter_context(leading(plan))
        plan = with_engine(going_on(plan))
        run = Run(plan, say)
        if not os.access(run.folder, os.W_OK) and (ended := _ended(plan, run, say)) is not None:
            return ended
        stack.enter_context(run.locked())
        if (ended := _ended(plan, run, say)) is not None:
            return ended
        origin, changed = find_origin(plan, run), changes(run, plan)
        with contextlib.ExitStack() as ending, contextlib.ExitStack() as running:
            with start.part("check"):
                check_writable(plan)
                begun = running.enter_context(started(plan))
                source = prepare(plan, say)
                for note in check_conversations(plan, source):
                    say(f"note: {note}")
                if origin is None:
                    check_all_weights(plan)
                check_disk(plan)
                held = can_be_held(plan)
            plan = sized(with_use_of_engine(plan, source), build.smallest_gpu(plan.driver))
            say(f"{_headline(plan)}; folder {run.folder}")
            with start.part("processes"):
                w = running.enter_context(workers(plan, begun))
            if w.processes.about:
                say(w.processes.about)
            if notice := check_memory(plan, w.processes.gpu_memory):
                say(f"note: {notice}")
            with explained(plan, w.processes.gpu_memory):
                evaluation = _Loop(plan, run, w, source, say, start, held).run_to_end(origin, changed, live)
            ending.enter_context(stop_requests(say, ENDING))
            return evaluation


def _ended(plan: Plan, run: Run, say: Say) -> Report | None:
    """Says so if a run has nothing left to do, and returns its last evaluation; None for another run."""
    ended = finished(plan, find_origin(plan, run))
    if ended is None:
        return None
    changes(run, plan)
    say(f"this run has finished, after {ended.step} steps; nothing was done or changed")
    for sentence in altered(run.folder):
        say(f"note: {sentence}")
    for line in unused_settings(run, plan):
        say(line)
    return ended.evaluation


def _headline(plan: Plan) -> str:
    """Returns a line with the algorithm, the data and the driver."""
    run = f"{plan.algorithm} on {'files' if plan.data.train_files else plan.data.task}"
    if plan.driver.kind == "ray":
        processes = "process" if plan.ray.ranks == 1 else "processes"
        return f"{run}, starting Ray actors with {plan.ray.ranks} training {processes}"
    size = ranks.torchrun_size()
    return f"{run}, local driver, {build.device(plan.driver)}" + (f", {size} processes" if size > 1 else "")


def restored_state(folder: Path, plan: Plan, w: Workers) -> RunState:
    """Reads the state in a checkpoint.

    In a fork, fields of the algorithm's state that the new settings would initialize differently, such as the key,
    take their new initial values.
    """
    source = run_of(folder)
    before = plan
    if source is not None and source != Path(plan.trainer.dir) and (source / "config.toml").is_file():
        before = make_plan(run_config(source, step_of(folder))[0])
    state = restore(folder, blank_state(before), plan, w)
    if before is not plan:
        fresh = blank_state(plan).algorithm
        changed = {name: getattr(fresh, name) for name in differing_fields(before, plan)}
        state = attrs.evolve(state, algorithm=attrs.evolve(state.algorithm, **changed))
    return state.with_roles({name: at_rest(name, state.role(name), plan, w) for name in plan.roles})


class _Loop:
    """One execution of the loop: the parts it works with, the last evaluation and the last checkpoint."""

    def __init__(self, plan: Plan, run: Run, w: Workers, source: Source, say: Say, start: Start, held: bool) -> None:
        self.plan, self.run, self.w, self.source, self.say, self.start = plan, run, w, source, say, start
        # Threads may write the first checkpoint during the first step: no kill before its end costs a step.
        self.held = held
        self.algorithm = on_one_gpu(algorithm_of(plan), plan, offloaded_roles(plan, w.processes.gpu_memory))
        self.held_out: tuple[Problem, ...] = source.held_out(plan.data.val_size)
        self.evaluation: Report = {}
        self.saved: Path | None = None
        self.noticed: set[str] = set()

    def run_to_end(self, origin: Path | None, changed: list[str], live: bool) -> Report:
        """Starts or continues the run, trains until the last step or the goal, and returns the last evaluation.

        Args:
            origin: the checkpoint to begin at; None for a new run.
            changed: sentences about what has changed since the run was last trained.
            live: draw progress on the terminal instead of printing lines.
        """
        plan, t, say = self.plan, self.plan.trainer, self.say
        logged = read_metrics(self.run.folder)
        with self.start.part("load"):
            state = initial_state(plan, self.w) if origin is None else restored_state(origin, plan, self.w)
        if origin is not None:
            for sentence in changed:
                say(sentence)
            say(f"continuing {self.run.folder} after step {state.step}, from {origin}")
            if again := [row["step"] for row in logged if row["step"] > state.step]:
                say(f"the log goes on to step {again[-1]}, but no checkpoint does: these steps are done again")
            if count := len(state.waiting):
                say(f"{count} {'batch' if count == 1 else 'batches'} of samples wait to be learned from")
                if getattr(plan.options, "rollout_is", "") is None:
                    say(
                        "note: older weights drew them, and without driver.max_lag nothing corrects for the "
                        "difference; algorithm.rollout_is=token would"
                    )
            self.evaluation = last_evaluation(run_of(origin), state.step)
        _print_adapters(state, plan, self.w, say)
        self.run.start(state.step, origin=origin)
        if origin is None and logged:
            last = logged[-1]["step"]
            say(f"no checkpoint in {self.run.folder}: starting over; the log up to step {last} is dropped")
        self.saved = origin if origin is not None and run_of(origin) == self.run.folder else None
        try:
            state = self._steps(state, live, fresh=origin is None)
        except Exception as error:
            if not isinstance(error, Interrupted):
                self.run.failed(error)
            # What was begun is whole in the end, if the error is not of the workers or of the disk.
            with contextlib.suppress(Exception):
                self.run.saved(self.w)
            raise
        if goal_reached(plan, self.evaluation) and state.step < t.total_training_steps:
            say(f"trainer.stop_at = {t.stop_at} is reached at step {state.step}")
        self._save(state)
        self.run.saved(self.w)
        say(f"done: {state.step} steps; the model is {self.run.folder}/model")
        return self.evaluation

    def _steps(self, state: RunState, live: bool, *, fresh: bool) -> RunState:
        plan, t = self.plan, self.plan.trainer
        with contextlib.ExitStack() as stack:
            logs = stack.enter_context(loggers(t, plan.table, self.run.folder, None if fresh else state.step))
            with self.start.part("evaluate"):
                self._evaluate_first(state, logs, fresh=fresh)
            if self.saved is None:
                # So that what a save needs is missing now, or with the first step's end, rather than after hours.
                with self.start.part("save"):
                    self.saved = self.run.save(state, self.w, later=self.held)
            self.start.announce()
            started = self.start.report()
            stop_signals = stack.enter_context(stop_requests(self.say))
            total = t.total_training_steps
            hidden = always_zero(plan)
            progress: Lines | Live = (
                Live(state.step, total, hidden) if live else Lines(state.step, total, t.log_freq, self.say, hidden)
            )
            stack.enter_context(progress)
            skipped: dict[str, int] = {}
            begun = state.step
            while state.step < total and not goal_reached(plan, self.evaluation):
                with self._saved_if_refused(state):
                    state, report, drawn = advance(self.algorithm, state, self.source, self.w, plan)
                # A save had the time of this step. A log without any checkpoint would not be continued.
                self.run.saved(self.w)
                report |= self._restarts() | started
                started = {}
                self.run.log(state.step, report)
                self._write_journal(state, drawn)
                _end_if_skipping(skipped, report, state.step, plan, self.run)
                # An evaluation may fail, so what was trained is saved before.
                if state.step == total or (t.save_freq > 0 and state.step % t.save_freq == 0):
                    self._save(state)
                with self._saved_if_refused(state):
                    report = report | self._evaluate_if_due(state)
                for log in logs:
                    log(state.step, report)
                progress.show(state.step, report, evaluation_line(report, t.stop_metric))
                for notice in NOTICES:
                    self._say_once(notice.__name__, notice(state.step, report))
                if state.step == begun + 1:
                    for name, role in ((name, role) for name, role in plan.roles.items() if role.falls):
                        made = made_updates(state, name, self.w)
                        planned = counted_updates(plan, state.step)[name] + other_updates(plan)[name]
                        self._say_once(f"{name}'s updates", unplanned(role, plan, made, planned, state.step))
                if stop_signals:
                    self._save(state)
                    self.run.saved(self.w)
                    if state.step < total and not goal_reached(plan, self.evaluation):
                        raise Interrupted(
                            f"stopped after step {state.step} and saved {self.saved}; "
                            "the same command continues from there"
                        )
        return state

    @contextlib.contextmanager
    def _saved_if_refused(self, state: RunState) -> Iterator[None]:
        """Saves a state if samples cannot be judged or learned from: what a user has to mend costs no step."""
        try:
            yield
        except REFUSED:
            before = self.saved
            # What waits may be what failed, and an algorithm of the user may have used the state up.
            with contextlib.suppress(Exception):
                self.w.get([one.drawn for one in state.waiting])
                self._save(state)
                self.run.saved(self.w)
            if self.saved != before:
                self.say(f"saved after step {state.step}")
            raise

    def _restarts(self) -> Report:
        """Says which engines were restarted since the step before, and returns how many."""
        reasons = self.w.processes.restarts()
        for reason in reasons:
            self.say(f"note: {reason}")
        return {"perf/engine_restarts": len(reasons)} if reasons else {}

    def _evaluate_first(self, state: RunState, logs: list[Log], *, fresh: bool) -> None:
        """Evaluates a new run before its first step, and one that was killed in an evaluation after its last one."""
        if fresh:
            if self.plan.trainer.val_before_train and self.held_out:
                report = self._evaluate(state)
                self.run.log(0, report)
                self.say(f"before training: {evaluation_line(report, self.plan.trainer.stop_metric)}")
                for log in logs:
                    log(0, report)
        elif self.saved is not None and not self.evaluation and (report := self._evaluate_if_due(state)):
            for log in logs:
                log(state.step, report)

    def _evaluate_if_due(self, state: RunState) -> Report:
        """Evaluates after the last step and every ``trainer.test_freq`` steps; returns no metrics after others."""
        t = self.plan.trainer
        last = state.step == t.total_training_steps
        if not self.held_out or not (last or (t.test_freq > 0 and state.step % t.test_freq == 0)):
            return {}
        report = self._evaluate(state)
        self.run.amend(state.step, report)
        self._say_once("held-out answers", held_out_cut_off(report, state.step))
        return report

    def _evaluate(self, state: RunState) -> Report:
        started = time.perf_counter()
        report, answers = validate(state, self.held_out, self.w, self.plan)
        check_goal(self.plan, report)
        if answers:
            self.run.keep_answers(state.step, answers)
            first = [answer for answer in answers if answer["sample"] == 0]
            logged = first[: self.plan.trainer.log_val_generations]
            # The file of all answers has whole ground truths.
            cut = ({"step": state.step} | one | {"answer": short(one["answer"], LONGEST)} for one in logged)
            self.run.append(GENERATIONS, *cut)
        self.evaluation = report
        return report | {"timing_s/testing": time.perf_counter() - started}

    def _save(self, state: RunState) -> None:
        """Saves a state that is not saved yet."""
        if self.saved is None or self.saved.name != f"step_{state.step}":
            self.saved = self.run.save(state, self.w)

    def _say_once(self, subject: str, notice: str) -> None:
        """Prints a notice, unless there was one about the subject before."""
        if notice and subject not in self.noticed:
            self.noticed.add(subject)
            self.say(f"note: {notice}")

    def _write_journal(self, state: RunState, drawn: Drawn) -> None:
        if folder := self.plan.trainer.rollout_data_dir:
            keep_responses(self.run, Path(folder) / f"{state.step}.jsonl", state.step, drawn, self.w)
        journal = self.plan.trainer.journal
        if journal != "off":
            if journal == "samples":
                keep_samples(self.run, state.step, drawn, self.w)
            self.run.append(JOURNAL, entry(state, drawn, self.w, self.plan))


def _print_adapters(state: RunState, plan: Plan, w: Workers, say: Say) -> None:
    """Prints how many parameters of each model with adapters are trained."""
    for name, role in plan.roles.items():
        if role.lora:
            trained, total = w.get(w.trainers[name].map(_sizes, state.role(name).params))
            say(f"{name} trains {trained:,} of {total:,} parameters ({trained / total:.2%})")


def _sizes(params: Params) -> tuple[int, int]:
    """Counts the trained elements and all elements of a model."""
    return sum(params[name].numel() for name in params.trained()), sum(p.numel() for p in params.values())


def _end_if_skipping(skipped: dict[str, int], report: Report, step: int, plan: Plan, run: Run) -> None:
    """Ends a run in which all updates of a role have been skipped for ``trainer.max_skipped_steps`` steps."""
    for name, share in report.items():
        if name.endswith("/update_skipped"):
            family = name.partition("/")[0]
            skipped[family] = skipped.get(family, 0) + 1 if share == 1.0 else 0
            if skipped[family] >= plan.trainer.max_skipped_steps:
                # Fine-tuning logs its one model under verl's name, train.
                role = family if family in plan.roles else "actor"
                raise RunError(
                    f"the gradients of the {role} were not finite in any update of the last {skipped[family]} steps, "
                    f"up to step {step}; all those updates were skipped. Look at {run.folder / METRICS} for the "
                    "first nan, and lower the learning rate or fix the loss or reward; trainer.max_skipped_steps "
                    "sets the limit"
                )


STOPPING = "stopping after this step; once more stops at once, without saving"
ENDING = "the run is done and saved, and its processes are ending; once more ends them at once"


@contextlib.contextmanager
def stop_requests(say: Say, reply: str = STOPPING) -> Iterator[list[int]]:
    """Yields a list to which the first SIGINT or SIGTERM is appended; a second one interrupts the process at once.

    In a thread other than the main one no signals can be handled, and the list stays empty.

    Args:
        reply: the line that answers the first signal.
    """
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def record(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        say(reply)
        for handled in previous:
            signal.signal(handled, signal.default_int_handler)

    previous = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            # What was set meanwhile stays: a process that says why it ends may ignore a signal.
            if signal.getsignal(number) in (record, signal.default_int_handler):
                signal.signal(number, handler)
