"""The commands of ``verl-fn``; each takes its parsed arguments and returns the exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.config import (
    ConfigError,
    Plan,
    describe,
    evaluation_plan,
    load,
    make_plan,
    notes,
    options_lines,
    origins,
)
from verl_fn.config.algorithms import AGGREGATIONS, BUILT_IN, GROUP_ESTIMATORS, KL_TYPES, LOSS_TYPES, POLICY_LOSSES
from verl_fn.config.load import algorithm_options, default_options, split_override
from verl_fn.config.names import is_reference, load_object, options_class
from verl_fn.config.schema import ROLLOUT_ENGINES, STRATEGIES
from verl_fn.errors import UsageError, complain, kind_of, place_of, say, signature_of
from verl_fn.runs import RunError


def train(args: argparse.Namespace) -> int:
    """Trains from a config, or only checks it."""
    from verl_fn.runs.history import run_of_config

    plan, folder = make_plan(load(args.config, args.overrides)), run_of_config(Path(args.config).resolve())
    given = "trainer.dir" in (split_override(setting)[0] for setting in args.overrides)
    if not given and folder is not None and Path(plan.trainer.dir).resolve() != folder:
        raise UsageError(
            f"{args.config} is the config of the run in {folder}, which was copied or moved: its trainer.dir is "
            f"{plan.trainer.dir}. Add trainer.dir={folder} to continue that run, or another folder for a new one"
        )
    return _train(plan, notes(args.config, args.overrides), args)


def fork(args: argparse.Namespace) -> int:
    """Continues from a checkpoint of another run."""
    from verl_fn.runs.history import config_file
    from verl_fn.runs.replay import fork_plan

    plan, file = fork_plan(args.run, args.step, args.overrides), config_file(Path(args.run), args.step)
    before = notes(file, ())
    return _train(plan, [note for note in notes(file, args.overrides) if note not in before], args)


def _train(plan: Plan, hints: Sequence[str], args: argparse.Namespace) -> int:
    from verl_fn.runs.checks import check_code
    from verl_fn.runs.loop import Interrupted, train

    def show(line: str) -> None:
        if not args.quiet:
            say(line)

    # A note may be about code of the user's that is refused.
    check_code(plan, here=False)
    for line in hints:
        show(f"note: {line}")
    if args.check:
        from verl_fn import build
        from verl_fn.runs.check_run import check_run

        if args.gpu_memory and not args.gpus and build.device(plan.driver) == "cpu":
            raise UsageError("--gpu-memory plans for GPUs, and this machine has none: add --gpus, their number")
        report = check_run(plan, int(args.gpu_memory * 2**30) if args.gpu_memory else None, args.gpus)
        say(report.text)
        return 0 if report.fits else 1
    try:
        train(plan, show, live=sys.stdout.isatty() and not args.quiet, began=args.began)
    except Interrupted as error:
        complain(error)
        return 130
    return 0


def config(args: argparse.Namespace) -> int:
    """Shows the whole config, or translates one of verl."""
    if args.from_verl is not None:
        return _from_verl(args.from_verl)
    overrides = list(args.overrides)
    file = args.config
    if file is not None and "=" in file and not Path(file).exists():
        file, overrides = None, [file, *overrides]
    cfg, set_by = load(file, overrides), origins(file, overrides)
    say(describe(cfg, set_by).rstrip("\n"))
    for line in notes(file, overrides):
        complain(f"note: {line}")
    return 0


def _from_verl(words: Sequence[str]) -> int:
    from verl_fn.data.rows import count_rows
    from verl_fn.from_verl import read_settings, translate

    if not words:
        raise UsageError("--from-verl needs a YAML file of verl, or settings key=value")
    if ours := [word for word in words if word.partition("=")[0] in ("--check", "--gpus", "--gpu-memory", "--quiet")]:
        raise UsageError(
            f"{ours[0]} is an option of verl-fn train, and all words after --from-verl are verl's: write the TOML to "
            f"a file, then verl-fn train FILE {' '.join(ours)}"
        )
    settings = read_settings(words)
    translation = translate(settings, count_rows)
    say(translation.toml())
    complain(translation.report())
    if not settings.sft and (lacking := _without_rule(translation.table)):
        complain(
            f"without a rule here: the data sources {', '.join(lacking)}, so a run is refused; name a function that "
            "scores their answers in reward.functions (custom_reward_function.path and name among verl's words)"
        )
    return 0 if translation.complete else 1


def _without_rule(table: Mapping[str, Any]) -> list[str]:
    """Returns the data sources of a config's files that have no rule and need one, as far as files can be read."""
    from verl_fn.data.rows import sources_in

    data, reward = table.get("data", {}), table.get("reward", {})
    if reward.get("functions") or reward.get("url") or data.get("convert") or "env" in table:
        return []
    learned = () if table.get("algorithm", {}).get("reward_model") else ("train_files",)
    held_out = () if data.get("val_size") else ("val_files",)
    named = [data.get(key, []) for key in (*learned, *held_out)]
    files = [file for one in named for file in ([one] if isinstance(one, str) else one)]
    if not (sources := sources_in(files)):
        return []
    from verl_fn.rewards.reward import has_rule

    return [source for source in sources if not has_rule(source)]


def report(args: argparse.Namespace) -> int:
    """Writes a page about runs."""
    from verl_fn.report.page import about, headline, names, report
    from verl_fn.runs.logs import altered

    for sentence in (sentence for run in args.runs for sentence in altered(Path(run))):
        complain(f"note: {sentence}")
    before = about(Path(args.out))
    folders = [Path(run) for run in args.runs]
    page = report(folders, Path(args.out), curves=args.curves)
    for folder, label in zip(folders, names(folders), strict=True):
        say(headline(folder, label))
    other = f", in place of the page about {before}" if before not in ("", about(page)) else ""
    say(f"wrote {page} and {page.with_suffix('.png')}{other}")
    return 0


def replay(args: argparse.Namespace) -> int:
    """Executes a step again and compares it with the log."""
    from verl_fn.runs.replay import replay

    replayed = replay(args.run, args.step, recorded=args.recorded)
    if replayed.difference is not None:
        say(f"step {replayed.step} differs; first in {replayed.difference}")
        if replayed.changed:
            say(f"likely because the replay has {', and '.join(replayed.changed)}")
        return 1
    kinds = ", ".join(f"{count} {kind}" for kind, count in replayed.compared.items())
    say(f"step {replayed.step} comes out bitwise the same: {kinds}")
    if "state leaves" not in replayed.compared:
        say("the state itself was not compared: the run kept no journal (trainer.journal) and no checkpoint of it")
    return 0


def new_model(args: argparse.Namespace) -> int:
    """Writes a tiny random model."""
    from verl_fn.atomic import check_empty
    from verl_fn.backends.hf.folder import ModelError
    from verl_fn.backends.hf.new_model import new_model, new_tower, with_served_heads
    from verl_fn.data.tasks import TASKS

    if args.task not in TASKS:
        raise ConfigError(f"there is no task {args.task!r}; there are {', '.join(TASKS)}")
    if args.chars == "":
        raise ConfigError("--chars is empty; name the characters, or leave it out to take the characters of --task")
    check_empty(Path(args.folder))
    fields = dict(_field(override) for override in args.overrides)
    if reserved := sorted({"folder", "chars", "arch", "seed", "chat_template", "text_model"} & set(fields)):
        raise ConfigError(f"{reserved[0]} is not a field of a model's config; see verl-fn new-model --help")
    given = {"arch": args.arch, "seed": args.seed}
    try:
        if args.text_model is not None:
            if args.chars is not None or args.chat_template:
                raise ConfigError(
                    "--text-model brings its tokenizer and template; leave out --chars and --chat-template"
                )
            folder = new_tower(args.folder, args.text_model, **given, **fields)
        else:
            chars = TASKS[args.task].alphabet if args.chars is None else args.chars
            given |= {"chars": chars, "chat_template": args.chat_template}
            folder = new_model(args.folder, **with_served_heads(given | fields))
    except ModelError as error:
        raise ConfigError(str(error)) from error
    say(f"wrote {folder}")
    return 0


def _field(override: str) -> tuple[str, Any]:
    name, _, value = split_override(override)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def export(args: argparse.Namespace) -> int:
    """Copies a model as a Hugging Face folder, or its adapters as a folder for PEFT."""
    from verl_fn.backends.checkpoint import export_adapter, export_model
    from verl_fn.runs.checkpoints import check_model_folder

    model, _ = model_of(args.model)
    write = export_adapter if args.adapter else export_model
    with pruning(model):
        check_model_folder(model)
        folder = write(model, args.out, args.dtype)
    say(f"wrote {folder}")
    return 0


def levels(args: argparse.Namespace) -> int:
    """Tests a model that Megatron-Bridge knows, level by level."""
    from verl_fn.levels.command import run

    return run(args)


def prepare(args: argparse.Namespace) -> int:
    """Writes data sets as parquet, or a model folder."""
    if (args.dataset == "gsm8k") != (args.source is not None):
        raise UsageError("prepare gsm8k needs the folder with its raw files, and the others take none")
    if args.dataset.startswith("hub:"):
        from verl_fn.data.hub import prepare_hub

        say(prepare_hub(args.dataset, args.out))
        return 0
    if args.dataset == "smollm2":
        from verl_fn.backends.hf.new_model import prepare_smollm2

        say(f"wrote {prepare_smollm2(args.out)}")
        return 0
    from verl_fn.data.prepare import prepare_arithmetic, prepare_gsm8k, prepare_squares

    if args.dataset == "gsm8k":
        rows = prepare_gsm8k(args.source, args.out)
    else:
        rows = {"arithmetic": prepare_arithmetic, "squares": prepare_squares}[args.dataset](args.out)
    say(f"wrote {args.out}: " + ", ".join(f"{split}.parquet with {count} rows" for split, count in rows.items()))
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Says what this machine has of what runs need."""
    from verl_fn.cli.doctor import examine, report

    findings = examine()
    say(report(findings))
    return int(any(finding.mend and finding.needed for finding in findings))


def show_choices(args: argparse.Namespace) -> int:
    """Lists the available tasks, algorithms and so on, or the options of one algorithm."""
    if args.algorithm:
        say(_algorithm_page(args.algorithm))
        return 0
    from verl_fn.data.tasks import TASKS
    from verl_fn.rewards.reward import RULES

    losses = (
        *(*POLICY_LOSSES, "value_clip", "cross_entropy", "entropy", "kl_to_reference"),
        *("bradley_terry", *LOSS_TYPES, "distill", "distill_top_k"),
    )
    for kind, names in (
        ("tasks", (*TASKS, "reasoning_gym:SET", "verifiers:NAME")),
        ("algorithms", (*BUILT_IN, "FILE.py:NAME", "MODULE:NAME")),
        ("estimators", ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "FILE.py:NAME")),
        ("losses", losses),
        ("KL estimators", KL_TYPES),
        ("aggregation", AGGREGATIONS),
        ("training backends", (*STRATEGIES, "mock")),
        ("rollout engines", (*ROLLOUT_ENGINES, "mock")),
        ("drivers", ("local", "ray")),
        ("rewards by data source", RULES),
        ("loggers", ("metrics.jsonl", "tensorboard", "wandb")),
    ):
        say(f"{kind:<24}{', '.join(names)}")
    return 0


def _own_page(name: str) -> str:
    """Describes a loss or a function of the user; returns an empty string for an algorithm.

    Raises:
        ConfigError: the object is none of them.
    """
    from verl_fn.steps import Loss

    found = load_object(name, "verl-fn list")
    if not isinstance(found, Loss):
        kind = f"a function of {signature_of(found)}" if inspect.isfunction(found) else kind_of(found)
        try:
            options_class(found, f"{name} is {kind}, and list describes algorithms, losses and estimators")
        except ConfigError:
            if not (described := _described(found)):
                raise
            return f"{name}: {kind}, {described}"
        return ""
    lines = [f"{name}: a loss, for algorithm.policy_loss"]
    for term in found.terms:
        doc = (inspect.getdoc(term.fn) or "").partition("\n")[0]
        lines.append(f"  {place_of(term.fn)}{': ' if doc else ''}{doc}")
        lines.append(
            f"    reads {', '.join(sorted(term.needs)) or 'no output'} and returns one value for each {term.level}"
        )
    return "\n".join(lines)


def _described(fn: object) -> str:
    """Says what a function can be by its parameters, with the options; nothing if it can be nothing.

    Nothing of the user is called here, so what the function returns is not known.
    """
    parameters = list(inspect.signature(fn).parameters.values()) if inspect.isfunction(fn) else []
    options = [one for one in parameters if one.default is not one.empty]
    given = [one for one in parameters if one.default is one.empty]
    if not parameters or [one.kind for one in given] not in ([], [inspect.Parameter.POSITIONAL_OR_KEYWORD]):
        return ""
    key, makes = ("adv_estimator", "returns a batch") if given else ("policy_loss", "makes a loss")
    lines = [f"  algorithm.{key}_kwargs.{one.name} = {one.default!r}" for one in options]
    if given and given[0].name != "batch":
        lines.append(
            f"for algorithm.policy_loss if it makes a loss; algorithm.policy_loss_kwargs.{given[0].name} must be set"
        )
    return "\n".join(
        [f"for algorithm.{key} if it {makes}; {'its options:' if options else 'it has no options'}", *lines]
    )


def _algorithm_page(name: str) -> str:
    """Describes an algorithm, its roles, and its options with their defaults."""
    from verl_fn.algorithms import make

    if is_reference(name) and (page := _own_page(name)):
        return page
    options = default_options(algorithm_options(name))
    doc = (type(options).__doc__ or "").strip().splitlines()
    lines = [f"{name}: {doc[0] if doc else type(options).__name__}"]
    if unset := [f.name for f in attrs.fields(type(options)) if f.default is attrs.NOTHING]:
        lines.append(f"  its roles are known once {', '.join(unset)} is set: verl-fn train CONFIG --check lists them")
        return "\n".join([*lines, "", *options_lines(options, "algorithm")]).rstrip()
    for role_name, role in make(name, options).outline.roles.items():
        source = f", a frozen copy of {role.copy_of}" if role.copy_of else ""
        lines.append(f"  role {role_name}: {role.head} head, {'trained' if role.trained else 'not trained'}{source}")
    return "\n".join([*lines, "", *options_lines(options, "algorithm")]).rstrip()


def bench(args: argparse.Namespace) -> int:
    """Runs a benchmark."""
    return importlib.import_module(f"verl_fn.benchmarks.{args.what.replace('-', '_')}").main(args.rest)


def model_of(path: str) -> tuple[Path, Path | None]:
    """Returns the model folder that a path stands for, and the run that it belongs to, if any.

    Raises:
        RunError: there is no such folder, it is of another kind, or it is a run that has saved nothing yet.
    """
    from verl_fn.runs.checkpoints import MANIFEST, checkpoints
    from verl_fn.runs.history import run_around, run_meant
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
    if not (folder / "config.json").is_file():
        raise RunError(
            f"{folder} has no config.toml, {MANIFEST} or config.json; name a run, a checkpoint or a model"
            f"{run_meant(folder)}"
        )
    # A model of a checkpoint, also by the run's link to it, or the random model that a run began with.
    run = run_around(folder)
    return (folder, None) if run is None else (folder.resolve(), run)


@contextlib.contextmanager
def pruning(model: Path) -> Iterator[None]:
    """Explains an error that comes of a model of ``model_of`` that is gone: a run in training removes checkpoints."""
    try:
        yield
    except Exception as error:
        from verl_fn.runs.checkpoints import step_of

        if not (model if step_of(model.parent) is None else model.parent).is_dir():
            raise RunError(
                f"{model} was removed meanwhile: a run in training keeps only its last trainer.max_ckpt_to_keep "
                "checkpoints; run the command again for the newest one"
            ) from error
        raise


# The keys that say which problems there are.
PROBLEMS = ("data.val_files=", "data.task=")
# Only training uses keys that begin so.
TRAINING = ("actor.optim.", "critic.", "data.train_batch_size", "trainer.total_training_steps", "trainer.save_freq")


def evaluate(args: argparse.Namespace) -> int:
    """Evaluates models on held-out problems."""
    from verl_fn.report.page import names
    from verl_fn.runs.checkpoints import step_of
    from verl_fn.runs.evaluate import evaluate_model
    from verl_fn.runs.history import config_file
    from verl_fn.runs.progress import held_out_cut_off

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
    for note in unused_by_evaluations(args.overrides):
        say(f"note: {note}")
    reports: dict[str, Mapping[str, float]] = {}
    answers: list[dict[str, Any]] = []

    def finish() -> None:
        _show(reports, answers, plans[0].rollout.val_kwargs.n)
        if out is not None:
            _write(out, dict(zip(reports, (str(model) for model, _ in models), strict=False)), reports, answers)

    try:
        for (model, _), label, plan in zip(models, labels, plans, strict=True):
            say(f"evaluating {model} on {_summary(plan)}")
            with pruning(model):
                reports[label], own = evaluate_model(plan, say)
            if said := held_out_cut_off(reports[label]):
                say(f"note: {said}")
            answers += [{"model": label} | answer for answer in own]
    except BaseException:
        with contextlib.suppress(Exception):
            if reports:
                say(f"{len(reports)} of {len(models)} models were evaluated: {', '.join(reports)}")
                finish()
        raise
    finish()
    return 0


def unused_by_evaluations(overrides: Sequence[str]) -> Iterator[str]:
    """Yields a line for each setting on the command line that only training has a use for.

    Example:
        >>> list(unused_by_evaluations(["rollout.temperature=0.7", "data.val_size=9"]))
        ['rollout.temperature has no effect in an evaluation; set rollout.val_kwargs.temperature']
    """
    sampling = {f"rollout.{name}": f"rollout.val_kwargs.{name}" for name in ("n", "temperature", "top_p", "top_k")}
    for key in dict.fromkeys(split_override(override)[0] for override in overrides):
        if key in sampling or key.startswith(TRAINING):
            yield f"{key} has no effect in an evaluation" + (f"; set {sampling[key]}" if key in sampling else "")


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
    from verl_fn.data.tasks import content_of
    from verl_fn.pool.worker import short
    from verl_fn.report.plots import evaluation_table

    if len(reports) > 1:
        say(evaluation_table(reports))
        return
    for name, value in next(iter(reports.values())).items():
        say(f"{name:<48} {value:.4f}")
    for answer in answers[::n][:3]:
        verdict = f"reward {answer['score']:.3g}; expected {short(repr(answer['answer']))}"
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
    from verl_fn.data.prepare import write_answers
    from verl_fn.report.plots import evaluation_plot

    metrics = [{"model": label, "path": path, "metrics": dict(reports[label])} for label, path in models.items()]
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    written = ["metrics.json"]
    if answers:
        written.append(write_answers(out / "answers.parquet", answers).name)
    written.append(evaluation_plot(reports, out / "metrics.png").name)
    say(f"wrote {', '.join(written)} to {out}")


COMMANDS = {
    "train": train,
    "eval": evaluate,
    "config": config,
    "report": report,
    "fork": fork,
    "replay": replay,
    "new-model": new_model,
    "export": export,
    "levels": levels,
    "prepare": prepare,
    "doctor": doctor,
    "list": show_choices,
    "bench": bench,
}
