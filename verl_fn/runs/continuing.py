"""The checkpoint that a run begins at: its own last one, or another run's; and what has changed since."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

import attrs

from verl_fn.algorithms import Report
from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.config import ConfigError, Plan, make_plan

from . import RunError
from .checkpoints import MANIFEST, checkpoints, read_manifest, saved_step, step_of, way_out
from .evaluate import has_held_out, held_out_value
from .folder import Run
from .history import INPUTS, changed_inputs, changed_keys, recorded_inputs, run_config
from .logs import METRICS, altered, last_evaluation, read_metrics
from .state import counted_updates, differing_fields, run_of

SEED = "trainer.seed"


@attrs.frozen
class Finished:
    """A run that has nothing left to do.

    Attributes:
        step: the last step.
        evaluation: the metrics of the evaluation after it.
    """

    step: int
    evaluation: Report


def find_origin(plan: Plan, run: Run) -> Path | None:
    """Returns the checkpoint to start from: the folder's newest, or the one to fork; None for a new run.

    Raises:
        RunError: the folder has checkpoints that a fork would overwrite, or has lost its own, or
            ``trainer.resume_from_path`` is not a checkpoint.
    """
    newest, path = run.latest(), plan.trainer.resume_from_path
    if newest is not None and plan.trainer.resume_mode == "auto":
        return newest
    if path is not None and newest is not None:
        raise RunError(f"{run.folder} holds checkpoints already, up to {newest.name}; choose another trainer.dir")
    origin = _fork_of(Path(path)) if path is not None else None
    last = max((row["step"] for row in read_metrics(run.folder)), default=0)
    # A run saves before its first update, so whoever logged a step had a checkpoint.
    if plan.trainer.resume_mode == "auto" and last and last > (saved_step(origin) if origin is not None else 0):
        raise RunError(
            f"{run.folder / METRICS} has steps up to {last}, but {run.folder / 'checkpoints'} holds no checkpoint: "
            f"is its disk not mounted? To drop that log and start over, set trainer.resume_mode=disable; to keep it, "
            f"choose another trainer.dir"
        )
    return origin


def _fork_of(origin: Path) -> Path:
    if not origin.is_dir():
        raise ConfigError(f"trainer.resume_from_path: {origin} is not a folder")
    if not (origin / MANIFEST).is_file():
        raise ConfigError(f"trainer.resume_from_path: {origin} is not a checkpoint; {_meant(origin)}")
    return origin


def going_on(plan: Plan) -> Plan:
    """Returns the plan with what the checkpoint that it begins at decides: the day, and when learning rates end."""
    return with_updates(plan.dated(run_date(plan)), _begins_at(plan))


def with_updates(plan: Plan, origin: Path | None) -> Plan:
    """Returns the plan with all updates of a run that goes on from a checkpoint.

    Learning rates fall over these. The outline counts with the plan's settings, and steps before the checkpoint may
    have had more updates, or fewer.
    """
    before, step, roles = {}, 0, dict(plan.roles)
    # A checkpoint that cannot be read is reported where its state is read. One of an older version has no counts.
    with contextlib.suppress(CheckpointError):
        if origin is not None:
            before, step = read_manifest(origin).get("updates", {}), saved_step(origin)
    now, end = (counted_updates(plan, at) for at in (step, plan.trainer.total_training_steps))
    for name in now.keys() & before.keys():
        made, counted, others = before[name]
        # A run with unchanged settings keeps its rates, although an update may have been skipped.
        total = end[name] + (others if counted == now[name] else made - now[name])
        roles[name] = attrs.evolve(roles[name], total_updates=total)
    return attrs.evolve(plan, roles=roles)


def _begins_at(plan: Plan) -> Path | None:
    """Returns the folder's newest checkpoint, or the one to fork; None for a new run."""
    saved, fork = checkpoints(plan.trainer.dir), plan.trainer.resume_from_path
    return saved[0] if saved and plan.trainer.resume_mode == "auto" else Path(fork) if fork else None


def run_date(plan: Plan) -> str:
    """Returns the day that chat templates print: ``data.date``, or the continued run's, or else today.

    A run is continued from its folder's newest checkpoint, or from a checkpoint of the run that it forks.
    """
    if plan.data.date is not None:
        return plan.data.date
    origin = _begins_at(plan)
    if origin is not None and (source := run_of(origin)) is not None:
        # What is wrong with that run's config is reported where it is continued.
        with contextlib.suppress(RunError):
            return run_config(source, step_of(origin))[0].data.date or run_day()
    return run_day()


def run_day() -> str:
    """Returns today as ``YYYY-MM-DD``."""
    return datetime.date.today().isoformat()


def _meant(folder: Path) -> str:
    """Returns a sentence that names the checkpoint that was probably meant by a folder that is none."""
    if (folder.parent / MANIFEST).is_file():
        return f"it is a model in one: name {folder.parent}"
    of_run = checkpoints(folder) or checkpoints(folder.parent)
    if whole := [checkpoint for checkpoint in of_run if (checkpoint / MANIFEST).is_file()]:
        return f"name one of its run, such as {whole[0]}"
    if (folder / "config.json").is_file():
        return f"it is a model: set model.path={folder} to start from its weights"
    return f"it has no {MANIFEST}"


def finished(plan: Plan, origin: Path | None) -> Finished | None:
    """Returns how a run ended that would begin at ``origin``; None if there is something left to do.

    A run that was killed in its last evaluation still has that to do.
    """
    if origin is None:
        return None
    try:
        step = saved_step(origin)
        if read_manifest(origin)["algorithm"] != plan.algorithm:
            return None
    except CheckpointError:
        return None
    evaluation = last_evaluation(run_of(origin), step)
    unevaluated = has_held_out(plan) and not evaluation and run_of(origin) == Path(plan.trainer.dir)
    ended = step >= plan.trainer.total_training_steps and not unevaluated
    return Finished(step, evaluation) if ended or goal_reached(plan, evaluation) else None


def goal_reached(plan: Plan, evaluation: Report) -> bool:
    """Returns whether an evaluation reaches ``trainer.stop_at``."""
    t = plan.trainer
    value = held_out_value(evaluation, t.stop_metric)
    return t.stop_at is not None and value is not None and value >= t.stop_at


def changes(run: Run, plan: Plan) -> list[str]:
    """Returns sentences about what has changed since the run was last trained: settings, inputs and logs.

    Raises:
        RunError: a changed setting is part of the saved state, so changing it would have no effect, or the algorithm
            is another one.
    """
    newest = run.latest()
    if newest is None or plan.trainer.resume_mode != "auto":
        return []
    rates: list[str] = []
    if changed := changed_keys(run.folder, plan.table):
        before = with_updates(make_plan(run_config(run.folder, step_of(newest))[0]), newest)
        _refuse_parts_of_state(run, newest, before, plan, changed)
        rates = _other_rates(before, plan)
    sentences = [*(_of_setting(key, values) for key, values in changed.items()), *rates]
    if not (inputs := recorded_inputs(run.folder, step_of(newest))):
        sentences.append(
            f"{run.folder / INPUTS} has nothing to compare data, code and versions with: whether they are the same "
            "as before is not known"
        )
    sentences += [f"continuing with {change}" for change in changed_inputs(inputs, run.inputs)]
    return sentences + altered(run.folder) + _lost_lines(run, newest)


def unused_settings(run: Run, plan: Plan) -> list[str]:
    """Returns lines about settings that differ from the ones of a run that has finished."""
    if run.latest() is None or plan.trainer.resume_mode != "auto":
        return []
    unused = [f"not used: {key}: {values}" for key, values in changed_keys(run.folder, plan.table).items()]
    return [*unused, f"for a run with these settings, choose another trainer.dir than {run.folder}"] if unused else []


def _of_setting(key: str, values: str) -> str:
    if key == "model.path":
        return f"continuing with the weights of the checkpoint, although model.path is another one: {values}"
    if key == "trainer.resume_from_path" and not values.endswith("-> None"):
        return (
            f"continuing from the folder's newest checkpoint, although {key} is another one: {values}; to start from "
            "that one, choose another trainer.dir"
        )
    return f"continuing with another setting: {key}: {values}"


def _other_rates(before: Plan, plan: Plan) -> list[str]:
    """Returns a sentence for each table whose learning rate falls over another number of updates than before."""
    totals = {name: role.total_updates for name, role in before.roles.items()}
    falling = {
        f"{role.table}.optim": role.total_updates
        for name, role in plan.roles.items()
        if role.falls and role.total_updates != totals.get(name)
    }
    return [
        f"the learning rate of {table} falls from now on over all {total} updates of a run of "
        f"{plan.trainer.total_training_steps} steps; {table}.lr_decay_steps would fix its end"
        for table, total in falling.items()
    ]


def _lost_lines(run: Run, newest: Path) -> list[str]:
    try:
        step = saved_step(newest)
    except CheckpointError:
        return []
    last = max((row["step"] for row in read_metrics(run.folder)), default=0)
    if last >= step:
        return []
    lost = f"step {step} is" if step == last + 1 else f"steps {last + 1} to {step} are"
    return [f"{run.folder / METRICS} has lost lines: {lost} in the checkpoint {newest.name}, but not in the log"]


def _refuse_parts_of_state(run: Run, newest: Path, before: Plan, plan: Plan, changed: dict[str, str]) -> None:
    if before.algorithm != plan.algorithm:
        raise RunError(
            f"the run in {run.folder} was trained with {before.algorithm}, and the config asks for {plan.algorithm}: "
            f"choose another trainer.dir. The trained model is in {newest}/{next(iter(before.roles))}"
        )
    stored = _part_of_state(before, plan, list(changed))
    for key, values in changed.items():
        if key in stored:
            raise RunError(
                f"{key} cannot change in a run that is continued ({values}): the state holds it. "
                f"Fork the run (verl-fn fork {run.folder} --step N {key}=...), or choose another trainer.dir"
            )
        role, _, setting = key.partition(".")
        if setting == "optim.moments_dtype":
            raise RunError(
                f"{key} cannot change in a run that is continued ({values}): the state holds moments of that dtype. "
                f"Choose another trainer.dir; the model is in {newest}/{role}"
            )
        if role in plan.roles and setting in ("lora_rank", "lora_alpha", "target_modules"):
            had, has = (role in p.roles and p.roles[role].lora is not None for p in (before, plan))
            if had or has:
                reason, model = ("holds the adapters", "merged model") if had else ("is without adapters", "model")
                raise RunError(
                    f"{key} cannot change in a run that is continued ({values}): the state {reason}. Choose another "
                    f"trainer.dir; {role}'s {model} is in {newest}/{role}"
                )
    if before.roles.keys() != plan.roles.keys():
        keys = "; ".join(f"{key}: {values}" for key, values in changed.items() if key.startswith("algorithm."))
        raise RunError(
            f"the run in {run.folder} has the roles {', '.join(before.roles)}, and the config asks for "
            f"{', '.join(plan.roles)} ({keys}). {way_out(newest, plan)}"
        )


def _part_of_state(before: Plan, now: Plan, changed: list[str]) -> list[str]:
    """Returns the changed keys that are part of the algorithm's state: the seed, and options that it stores."""
    if before.roles.keys() != now.roles.keys():
        return []
    stored = [SEED] if SEED in changed else []
    same_seed = attrs.evolve(now, trainer=attrs.evolve(now.trainer, seed=before.trainer.seed))
    if differing_fields(before, same_seed):
        # The options of a nested table become one field of the state, such as the options of kl_ctrl the field kl.
        stored += [key for key in changed if key.startswith("algorithm.") and key.count(".") > 1]
        stored = stored or [key for key in changed if key.startswith("algorithm.")]
    return stored
