"""The command ``verl-fn eval``: one or several models answer the same held-out problems.

A model on the command line is a run, a checkpoint or a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn.config import ConfigError, Plan, evaluation_plan, load
from verl_fn.data.tasks import content_of
from verl_fn.runs.screen import say


def model_of(path: str) -> tuple[Path, Path | None]:
    """Returns the model folder that a path stands for, and the run that it belongs to, if any.

    Raises:
        RunError: there is no such folder, or it is a run that has saved nothing yet.
    """
    from verl_fn.runs import RunError
    from verl_fn.runs.checkpoints import MANIFEST, checkpoints
    from verl_fn.runs.state import run_of

    folder = Path(path)
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; name a run, a checkpoint or a model")
    if (folder / "config.toml").is_file():
        saved = checkpoints(folder)
        if not saved:
            raise RunError(f"the run {folder} has no checkpoint yet")
        # The link points nowhere if somebody has removed the newest checkpoint.
        link = folder / "model"
        return link.resolve() if link.exists() else saved[0] / "actor", folder
    if (folder / MANIFEST).is_file():
        run = run_of(folder)
        return folder / "actor", run if run is not None and (run / "config.toml").is_file() else None
    return folder, None


@contextlib.contextmanager
def pruning(model: Path) -> Iterator[None]:
    """Explains an error that comes of a model of ``model_of`` that is gone: a run in training removes checkpoints."""
    try:
        yield
    except Exception as error:
        from verl_fn.runs.checkpoints import step_of

        if not (model if step_of(model.parent) is None else model.parent).is_dir():
            from verl_fn.runs import RunError

            raise RunError(
                f"{model} was removed meanwhile: a run in training keeps only its last trainer.max_ckpt_to_keep "
                "checkpoints; run the command again for the newest one"
            ) from error
        raise


# The keys that say which problems there are.
PROBLEMS = ("data.val_files=", "data.task=")


def evaluate(args: argparse.Namespace) -> int:
    """Evaluates models on held-out problems."""
    from verl_fn.report.page import names
    from verl_fn.runs.checkpoints import step_of
    from verl_fn.runs.evaluate import evaluate_model
    from verl_fn.runs.history import config_file

    models = [model_of(model) for model in args.models]
    labels = names([Path(model) for model in args.models])
    if twice := [label for i, label in enumerate(labels) if label in labels[:i]]:
        raise ConfigError(f"{twice[0]} is named twice; name each model once")
    file = args.config or next(
        (config_file(run, step_of(model.parent)) for model, run in models if run is not None), None
    )
    if file is None and not any(name.startswith(PROBLEMS) for name in args.overrides):
        raise ConfigError(
            f"no run says which problems {models[0][0]} is to solve: set data.val_files to a file, or data.task to a "
            "task of verl-fn list, or name a run's config with --config"
        )
    plans = []
    for model, _ in models:
        with pruning(model):
            plans.append(_plan(file, [*args.overrides, f"model.path={model}"]))
    out = _folder(args.out) if args.out else None
    reports: dict[str, Mapping[str, float]] = {}
    answers: list[dict[str, Any]] = []
    for (model, _), label, plan in zip(models, labels, plans, strict=True):
        say(f"evaluating {model} on {_summary(plan)}")
        with pruning(model):
            reports[label], own = evaluate_model(plan, say)
        answers += [{"model": label} | answer for answer in own]
    _show(reports, answers, plans[0].rollout.val_kwargs.n)
    if out is not None:
        _write(out, dict(zip(labels, (str(model) for model, _ in models), strict=True)), reports, answers)
    return 0


def _plan(file: Path | str | None, overrides: Sequence[str]) -> Plan:
    cfg = load(file, overrides)
    if cfg.data.train_files and not cfg.data.val_files:
        raise ConfigError("there are no held-out problems: set data.val_files")
    return evaluation_plan(cfg)


def _folder(name: str) -> Path:
    """Makes the folder for the results before anything is computed."""
    out = Path(name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made: {error.strerror}; name a folder") from error
    return out


def _summary(plan: Plan) -> str:
    """Describes the problems of an evaluation and how answers are sampled."""
    from verl_fn.data.tasks import TASKS

    data, sampling = plan.data, plan.rollout.val_kwargs
    if data.val_files:
        files = ", ".join(Path(file).name for file in data.val_files)
        problems = f"{'all' if data.val_size is None else f'up to {data.val_size}'} problems of {files}"
    elif data.task not in TASKS:
        problems = f"held-out questions of {data.task}"
    else:
        problems = f"{len(TASKS[data.task].held_out(data.val_size))} held-out problems of {data.task}"
    answers = f"{sampling.n} at temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
    return f"{problems}, {answers}"


def _show(reports: Mapping[str, Mapping[str, float]], answers: Sequence[Mapping[str, Any]], n: int) -> None:
    """Prints the metrics: of one model with some answers, of several as a table."""
    from verl_fn.report.evaluations import table

    if len(reports) > 1:
        say(table(reports))
        return
    for name, value in next(iter(reports.values())).items():
        say(f"{name:<48} {value:.4f}")
    for answer in answers[::n][:3]:
        verdict = f"reward {answer['score']:.3g}; expected {answer['answer']!r}"
        if "messages" not in answer:
            say(f"{answer['prompt']!r} -> {answer['response']!r} ({verdict})")
            continue
        say(f"a conversation that ended with {answer['ended']} ({verdict}):")
        for message in answer["messages"]:
            say(f"  {message['role']}: {content_of(message)!r}")


def _write(
    out: Path,
    models: Mapping[str, str],
    reports: Mapping[str, Mapping[str, float]],
    answers: Sequence[Mapping[str, Any]],
) -> None:
    from verl_fn.data.answers import write_answers
    from verl_fn.report.evaluations import plot

    metrics = [{"model": label, "path": path, "metrics": dict(reports[label])} for label, path in models.items()]
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    written = ["metrics.json"]
    if answers:
        written.append(write_answers(out / "answers.parquet", answers).name)
    written.append(plot(reports, out / "metrics.png").name)
    say(f"wrote {', '.join(written)} to {out}")
