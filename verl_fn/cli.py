"""``verl-fn``: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verl_fn import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="verl-fn", description="Functional RL post-training in PyTorch.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train from a TOML config")
    train.add_argument("config", help="a TOML file, such as recipes/ppo_reverse.toml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.seed=2")
    train.add_argument("--quiet", action="store_true", help="print nothing but errors")

    bench = commands.add_parser("bench", help="measure")
    bench.add_argument("what", choices=("purity", "sampler", "imports"))
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="options of the benchmark; --help lists them")

    args = parser.parse_args(argv)
    if args.command == "bench":
        import importlib

        return importlib.import_module(f"verl_fn.benchmarks.{args.what}").main(args.rest)
    return _train(args)


def _train(args: argparse.Namespace) -> int:
    from verl_fn.config import ConfigError, load

    try:
        cfg = load(args.config, args.overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from verl_fn.backends.checkpoint import CheckpointError
    from verl_fn.backends.model import ModelError
    from verl_fn.rewards import RewardError
    from verl_fn.runs import RunError
    from verl_fn.train import train
    from verl_fn.workers import ActorDied

    say = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    try:
        train(cfg, say)
    except (ModelError, RewardError, CheckpointError, RunError, ActorDied) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; the same command continues from the last checkpoint, if trainer.save_freq made one",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
