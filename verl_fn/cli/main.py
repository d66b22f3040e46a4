"""The command line ``verl-fn``. This module only parses arguments; ``verl_fn.cli.commands`` has the commands."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from verl_fn import __version__, user_files
from verl_fn.errors import OutputClosed, UsageError, UserError, complain, say

OVERRIDES = "a key of the config, such as trainer.seed=2; verl-fn config lists them"
PREPARED = ("gsm8k", "arithmetic", "squares", "smollm2")
CLOSED = 141  # the exit status of a program that SIGPIPE ends
# How often a thread of OpenMP looks whether it may go on before it sleeps; libgomp takes 300,000 by itself. With so
# few, an update on two idle cores is as fast, and beside three busy processes about twice as fast.
SPINS = "2000"
BENCHMARKS = (
    "purity", "sampler", "exact", "exact-vllm", "imports", "large-data", "crash", "faults", "families", "first-step",
    "frozen", "ppo-layouts", "throughput", "long-rows", "residency", "rollout", "turns", "weight-sync", "batches",
    "loading", "saves", "scaling", "step",
)  # fmt: skip


def path(argument: str) -> str:
    """Reads a path; shells do not expand the ~ in --out=~/x."""
    from verl_fn.config.options import check_path, home

    try:
        return check_path(home(argument))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def source(argument: str) -> str:
    """Reads what ``prepare`` prepares.

    Example:
        >>> source("gsm8k")
        'gsm8k'
    """
    if argument not in PREPARED and not argument.startswith("hub:"):
        hint = f"; of the Hugging Face hub: hub:{argument}" if "/" in argument else ""
        raise argparse.ArgumentTypeError(f"{argument!r} is not {', '.join(PREPARED)} or hub:NAME{hint}")
    return argument


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    top = argparse.ArgumentParser(prog="verl-fn", description="Functional RL post-training in PyTorch.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, doc: str, **kwargs: object) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=doc, description=doc[0].upper() + doc[1:] + ".", **kwargs)  # type: ignore[arg-type]
        added.add_argument("--debug", action="store_true", help="show an error with its traceback")
        return added

    _add_run_commands(command)
    _add_model_commands(command)
    command("doctor", "say what this machine has of what runs need, and how to install what is missing")
    _add_levels(command("levels", "test whether a model that Megatron-Bridge knows survives a real RL loop"))
    return top


def _add_overrides(to: argparse.ArgumentParser) -> None:
    to.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES)


def _add_training(to: argparse.ArgumentParser) -> None:
    _add_overrides(to)
    to.add_argument("--quiet", action="store_true", help="print nothing but errors")
    to.add_argument(
        "--check", action="store_true", help="print what the run would do and need, and stop; a random model is made"
    )
    to.add_argument(
        "--gpu-memory",
        type=gib,
        metavar="GIB",
        help="with --check: the memory of a GPU in GiB, such as 80; by default this machine's",
    )
    to.add_argument(
        "--gpus",
        type=count,
        metavar="N",
        help="with --check and --gpu-memory: plan for another machine with so many GPUs; a model folder then needs "
        "only its config.json",
    )


def count(argument: str) -> int:
    """Reads a number of GPUs.

    Example:
        >>> count("8")
        8
    """
    if not argument.isdecimal() or not 0 < int(argument) < 2**16:
        raise argparse.ArgumentTypeError(f"{argument} is no number of GPUs, such as 8")
    return int(argument)


def gib(argument: str) -> float:
    """Reads the size of a GPU's memory in GiB, with or without its unit.

    Example:
        >>> gib("80"), gib("80GB")
        (80.0, 80.0)
    """
    number = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(gi?b?)?", argument.strip().lower())
    if number is None or not 0 < float(number[1]) < 1e6:
        raise argparse.ArgumentTypeError(f"{argument} is no size of a GPU's memory in GiB, such as 80")
    return float(number[1])


def _add_run_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the commands that train, evaluate and show runs."""
    train = command("train", "train from a TOML config; the same command continues a run that was stopped")
    train.add_argument("config", type=path, help="a TOML file, such as recipes/ppo_reverse.toml")
    _add_training(train)

    evaluate = command("eval", "evaluate runs, checkpoints or any Hugging Face folders on the same held-out problems")
    evaluate.add_argument(
        "models",
        type=path,
        nargs="+",
        metavar="MODEL",
        help="a run's folder, a checkpoint, or a Hugging Face model folder",
    )
    _add_overrides(evaluate)
    evaluate.add_argument(
        "--config", type=path, help="a TOML file; by default the config of the first run that a model belongs to"
    )
    evaluate.add_argument(
        "--out",
        type=path,
        metavar="FOLDER",
        help="write metrics.json, every answer as answers.parquet, and a plot as metrics.png there",
    )

    config = command("config", "show the whole config: every key, its doc, and where its value came from")
    config.add_argument("config", type=path, nargs="?", help="a TOML file; without one, the defaults")
    config.add_argument(
        "--from-verl",
        nargs=argparse.REMAINDER,
        metavar="FILE_OR_KEY=VALUE",
        help="translate a config of verl into TOML, and report on every key on the standard error; all words that "
        "follow are verl's: a launch script with its arguments, YAML files, or a command line",
    )
    _add_overrides(config)

    report = command("report", "one HTML page, and a PNG, about one or several runs")
    report.add_argument("runs", type=path, nargs="+", metavar="RUN", help="a run's folder")
    report.add_argument("--out", type=path, default="report.html", help="the page; by default %(default)s")
    report.add_argument(
        "--curves",
        nargs="+",
        default=[],
        metavar="METRIC",
        help="metrics whose curves come first, also ones without a curve; names, or patterns such as 'env/*'",
    )

    fork = command("fork", "continue a run's state from a checkpoint under another config, in a new folder")
    fork.add_argument("run", type=path, help="the run's folder")
    fork.add_argument("--step", type=int, required=True, help="the step of the checkpoint")
    _add_training(fork)

    replay = command("replay", "execute a step of a run again and check that it comes out bitwise the same")
    replay.add_argument("run", type=path, help="the run's folder")
    replay.add_argument("--step", type=int, required=True, help="the step")
    replay.add_argument(
        "--recorded", action="store_true", help="take the journal's samples instead of sampling again"
    )


def _add_model_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the commands for models and data, and commands that list and measure."""
    model = command("new-model", "write a tiny random model with a character tokenizer")
    model.add_argument("folder", type=path, help="where to write it")
    model.add_argument("--task", default="reverse", help="the task whose characters it knows; by default %(default)s")
    model.add_argument("--chars", help="its characters, instead of a task's")
    model.add_argument("--arch", default="qwen3", help="transformers model type; by default %(default)s")
    model.add_argument(
        "--text-model",
        type=path,
        metavar="FOLDER",
        help="with --arch smolvlm or idefics3: its language model and tokenizer, before which a random tower is put",
    )
    model.add_argument("--seed", type=int, default=0, help="of the weights; by default %(default)s")
    model.add_argument(
        "--chat-template",
        action="store_true",
        help="a minimal chat template: names of tools and contents of messages, with line breaks and without roles",
    )
    model.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="fields of that architecture's config, such as hidden_size=64; with --text-model, of the tower's",
    )

    export = command("export", "copy a trained model, in another dtype if asked, as a Hugging Face folder")
    export.add_argument("model", type=path, help="a run's folder, a checkpoint, or a Hugging Face model folder")
    export.add_argument("out", type=path, help="the folder to write")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="by default as it is")
    export.add_argument(
        "--adapter", action="store_true", help="of a LoRA run, only the adapters, as PEFT's PeftModel loads them"
    )

    _add_prepare(command)
    choices = command("list", "list tasks, algorithms, estimators, losses, backends and rewards")
    choices.add_argument(
        "algorithm",
        nargs="?",
        help="an algorithm, built-in or of yours as FILE.py:NAME: its roles and its options; or a loss of yours",
    )

    bench = command("bench", "measure")
    bench.add_argument(
        "what",
        choices=BENCHMARKS,
    )
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="options of the benchmark; --help lists them")


def _add_levels(to: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``levels``."""
    add = to.add_argument
    # Some versions of argparse compare a default list with the choices.
    add("levels", type=int, nargs="*", choices=range(6), metavar="LEVEL", help="0 to 5; by default 0")
    add("--model", type=path, required=True, help="a model folder, or a config.json for random weights")
    add("--tiny", action="store_true", help="with a config: tiny sizes")
    add(
        "--bridge", type=path, default="", metavar="CHECKOUT", help="of Megatron-Bridge; by default the installed one"
    )
    add("--bridge-tests", nargs="+", default=[], metavar="FILE", help="further tests of the checkout, run first")
    add("--skip-bridge-tests", default="", metavar="REASON", help="run no tests of the checkout")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="by default %(default)s")
    add("--gpus", type=count, default=1, metavar="N", help="GPUs to use; by default %(default)s. CPUs have all ranks")
    add("--features", nargs="+", choices=("moe", "vlm", "mtp", "qat"), default=[], help="of level 4")
    add("--engine", choices=("vllm", "sampler"), help="by default vllm on GPUs and sampler on CPUs")
    add(
        "--ray",
        nargs="?",
        const="local",
        default="",
        metavar="ADDRESS",
        help="run over Ray: the cluster at ADDRESS, or one of this run",
    )
    add("--data", type=path, default="", metavar="FOLDER", help="with train.parquet and test.parquet, such as GSM8K")
    add("--reward-model", type=path, default="", metavar="FOLDER", help="by default a rule gives the reward")
    add("--steps", type=count, default=20, help="of level 5; by default %(default)s")
    add("--margin", type=float, default=0.05, help="of level 5: the least gain of the held-out reward")
    add("--seed", type=int, default=0, help="by default %(default)s")
    add("--out", type=path, default="runs/levels", metavar="FOLDER", help="by default %(default)s")


def _add_prepare(command: Callable[..., argparse.ArgumentParser]) -> None:
    prepare = command("prepare", "write a data set as parquet in verl's columns, or a model folder")
    prepare.add_argument(
        "dataset",
        type=source,
        metavar="SOURCE",
        help="gsm8k, arithmetic, squares or smollm2; or of the Hugging Face hub a model, hub:OWNER/NAME, or a data "
        "set, hub:datasets/OWNER/NAME, either with @REVISION",
    )
    prepare.add_argument("source", nargs="?", help="gsm8k: the folder with the raw files")
    prepare.add_argument("--out", required=True, help="the folder to write")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments; overrides may come before and after options."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    if dashed := [arg for arg in rest if hasattr(args, "overrides") and arg.startswith("--") and "." in arg]:
        top.error(f"keys of the config have no dashes: {dashed[0].lstrip('-')}")
    if rest and (not hasattr(args, "overrides") or any(arg.startswith("-") or "=" not in arg for arg in rest)):
        top.error(f"{args.command} does not take {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    if hasattr(args, "models"):
        _split_models(top, args)
    if not getattr(args, "check", True) and (args.gpus or args.gpu_memory):
        top.error("--gpus and --gpu-memory go with --check")
    if hasattr(args, "check") and args.gpus and not args.gpu_memory:
        top.error("--gpus plans for another machine, so --gpu-memory must say how many GiB each of its GPUs has")
    return args


def _split_models(top: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Moves overrides that follow the models to the other overrides; an existing path is a model."""
    overrides = [arg for arg in args.models if "=" in arg and not os.path.exists(arg)]
    args.models = [arg for arg in args.models if arg not in overrides]
    args.overrides = [*overrides, *args.overrides]
    if not args.models:
        top.error(f"{args.command} needs a model")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    args = parse(argv)
    args.began = time.monotonic()
    try:
        if args.command == "train" and not args.check and not args.quiet:
            # Before the imports of the command, which take seconds.
            say(f"verl-fn {__version__}: {args.config}")
        from verl_fn.cli.commands import COMMANDS

        return COMMANDS[args.command](args)
    except OutputClosed:
        return _end_without_output(args.command in ("train", "fork") and not getattr(args, "check", False))
    except Exception as error:
        if not isinstance(error, UserError) and not _names_a_file(error):
            lines = user_files.own_traceback(error)
            if args.debug or not lines:
                raise
            with contextlib.suppress(OutputClosed):
                complain("\n".join(lines))
            name = type(error).__name__
            return _refuse(f"{name} in code of yours, whose lines are above; --debug shows the whole traceback", 1)
        if args.debug:
            complain(traceback.format_exc())
        return _refuse(error, 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        if args.debug:
            complain(traceback.format_exc())
        return _refuse("stopped at once; the same command continues from the last checkpoint, if there is one", 130)


def _names_a_file(error: Exception) -> bool:
    """Returns whether an error is an OSError about a file, for the user to fix; any other one is a bug."""
    return isinstance(error, OSError) and error.filename is not None


def _refuse(error: object, status: int) -> int:
    message = error
    if isinstance(error, OSError) and not isinstance(error, UserError):
        message = f"{error.filename}: {error.strerror}"
    # An error's notes name the process that raised it.
    where = user_files.own_traceback(error, frames_only=True) if isinstance(error, Exception) else []
    with contextlib.suppress(OutputClosed):
        complain("\n".join([f"error: {message}", *getattr(error, "__notes__", ()), *where]))
    return status


def _end_without_output(runs: bool) -> int:
    # Python would fail once more when it flushes its output at the end.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if runs:
        _refuse("nobody reads the output any more; the same command continues from the last checkpoint", CLOSED)
    return CLOSED


def run() -> int:
    """Runs ``main`` as a process. Once the command has ended, Ctrl-C does not disturb what Python does at its end.

    SIGTERM ends the command as an exception does, so that it ends its processes first.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    _rest_early()
    warnings.formatwarning = _as_note(warnings.formatwarning)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _as_note(usual: Callable[..., str]) -> Callable[..., str]:
    """Returns how a warning is printed: one of this package as a note, without the line of code that gave it."""

    def shown(message: Warning | str, category: type[Warning], filename: str, *more: Any) -> str:
        ours = category is UserWarning and filename.startswith(f"{Path(__file__).parents[1]}{os.sep}")
        return f"note: {message}\n" if ours else usual(message, category, filename, *more)

    return shown


def _rest_early() -> None:
    """Lets torch's threads sleep soon while they wait for each other, unless the user has said otherwise.

    Otherwise they spin for milliseconds, and take the cores from the very threads they wait for if other programs are
    busy, so that a step takes many times as long. OpenMP reads the variables when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def run_rank() -> NoReturn:
    """Runs ``main`` as a process of torchrun and exits at once, without Python's clean-up.

    The threads of a process group outlive the group, and would abort the process during an orderly exit.
    """
    _rest_early()
    try:
        status = main()
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
