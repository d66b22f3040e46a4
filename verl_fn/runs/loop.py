"""The training loop: problems in, steps of the algorithm, evaluations, checkpoints, progress."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from verl_fn.algorithms import by_name
from verl_fn.algorithms.workers import Workers
from verl_fn.backends.hf.folder import read_config
from verl_fn.config import ConfigError, plan
from verl_fn.config.schema import Config
from verl_fn.data.files import file_data
from verl_fn.data.tasks import TASKS, Source
from verl_fn.driver import build, ranks
from verl_fn.runs.checks import check
from verl_fn.runs.evaluate import accuracy, validate
from verl_fn.runs.folder import (
    RANKS,
    Follower,
    Run,
    RunError,
    changed_keys,
    read_metrics,
    restore,
    run_config,
    step_of,
)
from verl_fn.runs.journal import Recorder, entry, keep_samples
from verl_fn.runs.loggers import loggers
from verl_fn.runs.progress import Lines, Live, Say
from verl_fn.state import Key, Params


class Interrupted(RuntimeError):
    """The run was asked to stop; it saved its state first."""


def train(cfg: Config, say: Say = print, *, live: bool = False) -> dict[str, float]:
    """Run ``cfg`` to its end, continuing the folder's last checkpoint where there is one.

    Args:
        say: takes each line of news.
        live: draw progress on the terminal instead of saying it.

    Returns:
        The last evaluation.

    Raises:
        Interrupted: SIGINT or SIGTERM came; the checkpoint and how to go on are in the message.
    """
    if cfg.data.val_files and not cfg.data.train_files:
        raise ConfigError("data.val_files is set without data.train_files, so there is nothing to train on")
    cfg = absolute(cfg)
    # Under torchrun all processes run this same loop on the same values, and the first one writes and speaks.
    first = ranks.torchrun_rank() == 0
    if not first:
        say, live = (lambda line: None), False
    run = Run(cfg) if first else Follower(cfg)
    with ranks.process_group(cfg), run.locked():
        with ranks.first_alone():
            if cfg.trainer.resume_mode == "auto" and run.latest() is not None:
                _tell_changes(run, cfg, say)
            cfg, source = prepared(cfg, say)
        say(f"{_headline(cfg)}; folder {run.folder}")
        with workers(cfg) as w:
            if w.about:
                say(w.about)
            try:
                return _loop(cfg, run, w, source, say, live)
            except Interrupted:
                if not first:
                    ranks.end_after_first(130)
                raise


def _headline(cfg: Config) -> str:
    """What is trained, on what and where."""
    what = f"{cfg.algorithm.name} on {'files' if cfg.data.train_files else cfg.data.task}"
    if cfg.driver.kind == "ray":
        processes = "process" if cfg.ray.ranks == 1 else "processes"
        return f"{what}, starting Ray actors with {cfg.ray.ranks} training {processes}"
    size = ranks.torchrun_size()
    return f"{what}, local driver, {ranks.device(cfg)}" + (f", {size} processes" if size > 1 else "")


def absolute(cfg: Config) -> Config:
    """The config with absolute paths, so that it means the same from any folder.

    >>> absolute(Config()).trainer.dir == str(Path("runs/run").resolve())
    True
    """
    path = lambda text: str(Path(text).expanduser().resolve()) if text else text  # noqa: E731

    def function(text: str) -> str:
        file, colon, name = text.rpartition(":")
        return f"{path(file)}{colon}{name}" if file.endswith(".py") else text

    d, t = cfg.data, cfg.trainer
    return attrs.evolve(
        cfg,
        trainer=attrs.evolve(t, dir=path(t.dir), resume_from_path=path(t.resume_from_path)),
        data=attrs.evolve(d, train_files=tuple(map(path, d.train_files)), val_files=tuple(map(path, d.val_files))),
        model=attrs.evolve(cfg.model, path=path(cfg.model.path)),
        critic=attrs.evolve(cfg.critic, path=path(cfg.critic.path)),
        reward=attrs.evolve(cfg.reward, functions=tuple(map(function, cfg.reward.functions))),
    )


def _tell_changes(run: Run, cfg: Config, say: Say) -> None:
    """Say which settings of a continued run are others now.

    Raises:
        RunError: one of them is part of the state, and would have no effect.
    """
    changed = changed_keys(run.folder, cfg)
    before = run_config(run.folder)[0] if changed else cfg
    for key, values in changed.items():
        if key == "trainer.seed" or key.startswith("algorithm.kl_ctrl."):
            raise RunError(
                f"{key} cannot change in a run that is continued ({values}): the state holds it. "
                f"Fork the run (verl-fn fork {run.folder} --step N {key}=...), or choose another trainer.dir"
            )
        role, _, setting = key.partition(".")
        if role in plan.roles(cfg) and setting in ("lora_rank", "lora_alpha", "target_modules"):
            had, has = (getattr(config, role).lora_rank > 0 for config in (before, cfg))
            if had or has:
                what, model = ("holds the adapters", "merged model") if had else ("is without adapters", "model")
                raise RunError(
                    f"{key} cannot change in a run that is continued ({values}): the state {what}. Choose another "
                    f"trainer.dir; {role}'s {model} is in {run.latest() / role}"
                )
        say(f"continuing with another setting: {key}: {values}")


def prepared(cfg: Config, say: Say) -> tuple[Config, Source]:
    """The config with its model's folder made and absolute, and the problems; all that can be checked is checked."""
    cfg = attrs.evolve(cfg, model=attrs.evolve(cfg.model, path=str(build.model_folder(cfg).resolve())))
    read_config(cfg.model.path)
    from_files = cfg.data.train_files or cfg.data.val_files
    source: Source = file_data(cfg, build.tokenizer(cfg), say) if from_files else TASKS[cfg.data.task]
    check(cfg, source)
    return cfg, source


def workers(cfg: Config) -> contextlib.AbstractContextManager[Workers]:
    """The parts of a run, where ``driver.kind`` wants them."""
    if cfg.driver.kind == "ray":
        from verl_fn.driver.ray import ray_workers

        return ray_workers(cfg)
    from verl_fn.driver.local import local_workers

    return local_workers(cfg)


def initial_state(cfg: Config, w: Workers) -> Any:
    """The algorithm's state with every role loaded from its model folder."""
    blank = by_name(cfg.algorithm.name).new(cfg, Key.from_seed(cfg.trainer.seed))
    loaded = {}
    for role in plan.roles(cfg):
        loaded[role] = getattr(w, role).load_pretrained(plan.folder_of(cfg, role), blank.key.fold_in(role))
    return _offloaded(attrs.evolve(blank, **loaded), cfg, w)


def _offloaded(state: Any, cfg: Config, w: Workers) -> Any:
    """The state with the roles on the CPU that are to stay there; what an update makes lies where its input lay."""
    moved = {}
    for role in plan.roles(cfg):
        settings = plan.settings(cfg, role)
        if settings.strategy == "fsdp" and settings.fsdp_config.offload_policy:
            moved[role] = getattr(w, role).place(getattr(state, role), params="cpu", optimizer="cpu")
    return attrs.evolve(state, **moved)


def restored_state(folder: Path, cfg: Config, w: Workers) -> Any:
    """The algorithm's state in a checkpoint. In a fork, a seed or KL controller that is another is taken up."""
    fresh = by_name(cfg.algorithm.name).new(cfg, Key.from_seed(cfg.trainer.seed))
    source = folder.parents[1]
    if source == Path(cfg.trainer.dir).resolve() or not (source / "config.toml").is_file():
        return _offloaded(restore(folder, fresh, w, cfg), cfg, w)
    before, _ = run_config(source, step_of(folder))
    state = restore(folder, by_name(cfg.algorithm.name).new(before, Key.from_seed(before.trainer.seed)), w, cfg)
    if before.trainer.seed != cfg.trainer.seed:
        state = attrs.evolve(state, key=fresh.key)
    if before.algorithm.kl_ctrl != cfg.algorithm.kl_ctrl and hasattr(state, "kl"):
        state = attrs.evolve(state, kl=fresh.kl)
    return _offloaded(state, cfg, w)


def advance(
    algorithm: ModuleType, state: Any, source: Source, w: Workers, cfg: Config
) -> tuple[Any, dict[str, float]]:
    """One step on the next problems."""
    problems = source.train(state.key.fold_in("data"), state.cursor, cfg.data.train_batch_size)
    state, report = algorithm.step(state, problems, w, cfg)
    # Only torchrun knows it, and a replay with another number would be rounded otherwise.
    size = ranks.torchrun_size()
    return state, report | ({RANKS: size} if size > 1 else {})


def _loop(cfg: Config, run: Run, w: Workers, source: Source, say: Say, live: bool) -> dict[str, float]:
    t, algorithm, held_out = cfg.trainer, by_name(cfg.algorithm.name), source.held_out(cfg.data.val_size)
    origin = ranks.of_first(_origin(cfg, run))
    if origin is not None:
        state = restored_state(origin, cfg, w)
        say(f"continuing {run.folder} after step {state.step}, from {origin}")
    else:
        state = initial_state(cfg, w)
    _tell_adapters(state, cfg, w, say)
    evaluation = ranks.of_first(last_evaluation(origin.parents[1], state.step)) if origin is not None else {}
    if origin is not None and (state.step >= t.total_training_steps or _reached(evaluation, cfg)):
        say(f"finished before: {state.step} steps of {t.total_training_steps}; nothing was done or changed")
        return evaluation
    if origin is None and (lost := read_metrics(run.folder)):
        say(
            f"no checkpoint in {run.folder}: beginning anew; what was logged up to step {lost[-1]['step']} is dropped"
        )
    with ranks.together():
        run.start(state.step, origin=origin)
    seen = Recorder(w)
    recorded = seen.workers if t.journal != "off" else w
    saved = origin if origin is not None and origin.parent.parent == run.folder else None

    with contextlib.ExitStack() as stack:
        logs = [run.log]
        if not isinstance(run, Follower):
            logs += stack.enter_context(loggers(cfg, run.folder, state.step))
        if origin is None and t.val_before_train and held_out:
            evaluation = _evaluate(state, held_out, w, cfg, run)
            for log in logs:
                log(0, evaluation)
            say(f"before training: {evaluation_line(evaluation)}")
        asked = stack.enter_context(stop_requests(say))
        first, total = state.step, t.total_training_steps
        progress = stack.enter_context(Live(first, total) if live else Lines(first, total, t.log_freq, say))
        skipped: dict[str, int] = {}
        while state.step < total and not _reached(evaluation, cfg):
            state, report = advance(algorithm, state, source, recorded, cfg)
            last = state.step == total
            if held_out and (last or (t.test_freq > 0 and state.step % t.test_freq == 0)):
                evaluation = _evaluate(state, held_out, w, cfg, run)
                report |= evaluation
            for log in logs:
                log(state.step, report)
            _write_journal(run, state, seen, w, cfg)
            progress.show(state.step, report, evaluation_line(report))
            _end_if_skipping(skipped, report, state.step, cfg, run)
            stop = any(ranks.gathered(bool(asked)))
            if stop or (t.save_freq > 0 and state.step % t.save_freq == 0):
                saved = run.save(state, w)
            if stop and not last:
                raise Interrupted(
                    f"stopped after step {state.step} and saved {saved}; the same command continues from there"
                )
        if _reached(evaluation, cfg) and state.step < total:
            say(f"trainer.stop_at = {t.stop_at} is reached at step {state.step}")
        if saved is None or saved.name != f"step_{state.step}":
            run.save(state, w)
        say(f"done: {state.step} steps; the model is {run.folder}/model")
        return evaluation


def _tell_adapters(state: Any, cfg: Config, w: Workers, say: Say) -> None:
    """Say how much of each model with adapters is trained."""
    for role in plan.roles(cfg):
        if plan.settings(cfg, role).lora_rank:
            trained, total = w.get(getattr(w, role).map(_sizes, getattr(state, role).params))
            say(f"{role} trains {trained:,} of {total:,} parameters ({trained / total:.2%})")


def _sizes(params: Params) -> tuple[int, int]:
    """Elements that are trained, and all."""
    return sum(params[name].numel() for name in params.trained()), sum(p.numel() for p in params.values())


def _origin(cfg: Config, run: Run) -> Path | None:
    """The checkpoint to begin from: the folder's own newest, or the one that is forked."""
    newest = run.latest()
    if newest is not None and cfg.trainer.resume_mode == "auto":
        return newest
    if cfg.trainer.resume_from_path is None:
        return None
    if newest is not None:
        raise RunError(f"{run.folder} holds checkpoints already, up to {newest.name}; choose another trainer.dir")
    folder = Path(cfg.trainer.resume_from_path).resolve()
    if not folder.is_dir():
        raise ConfigError(f"trainer.resume_from_path: {folder} is not a folder")
    return folder


def _evaluate(state: Any, held_out: Any, w: Workers, cfg: Config, run: Run) -> dict[str, float]:
    report, answers = validate(state, held_out, w, cfg)
    if answers:
        run.append("generations.jsonl", *({"step": state.step} | answer for answer in answers))
    return ranks.of_first(report)


def _write_journal(run: Run, state: Any, seen: Recorder, w: Workers, cfg: Config) -> None:
    if cfg.trainer.journal != "off":
        if cfg.trainer.journal == "samples":
            keep_samples(run, state.step, seen, w)
        run.append("journal.jsonl", entry(state, seen, w))


def last_evaluation(folder: Path, step: int) -> dict[str, float]:
    """What a run's log says of the evaluation after ``step``; empty where there was none."""
    rows = [row for row in read_metrics(folder) if row["step"] == step]
    return {k: v for row in rows for k, v in row.items() if k.startswith("val-")}


def evaluation_line(report: dict[str, float]) -> str:
    """Held-out accuracy in words; empty where a step had no evaluation."""
    found = accuracy(report)
    return "" if found is None else f"held-out exact match {found:.3f}"


def _reached(evaluation: dict[str, float], cfg: Config) -> bool:
    found = accuracy(evaluation)
    return cfg.trainer.stop_at is not None and found is not None and found >= cfg.trainer.stop_at


def _end_if_skipping(skipped: dict[str, int], report: dict[str, float], step: int, cfg: Config, run: Run) -> None:
    """End a run whose gradients of a role are never finite: nothing is learnt any more, and only time is lost."""
    for name, share in report.items():
        if name.endswith("/update_skipped"):
            role = name.partition("/")[0]
            skipped[role] = skipped.get(role, 0) + 1 if share == 1.0 else 0
            if skipped[role] >= cfg.trainer.max_skipped_steps:
                raise RunError(
                    f"the gradients of {role} were not finite in any update of the last {skipped[role]} steps, up to "
                    f"step {step}; all those updates were skipped. Look at {run.metrics_file} for the first nan, "
                    f"and lower the learning rate or mend the loss or reward; trainer.max_skipped_steps sets the limit"
                )


@contextlib.contextmanager
def stop_requests(say: Say) -> Iterator[list[int]]:
    """A list that the first SIGINT or SIGTERM is put into; the second one acts at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        say("stopping after this step; once more stops at once, without saving")
        for one in before:
            signal.signal(one, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
