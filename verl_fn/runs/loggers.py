"""TensorBoard and wandb as further loggers, if ``trainer.logger`` asks for them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from verl_fn.config.schema import Table, TrainerConfig

from . import RunError

Log = Callable[[int, Mapping[str, float]], None]


@contextlib.contextmanager
def loggers(t: TrainerConfig, table: Table, folder: Path, start: int) -> Iterator[list[Log]]:
    """Opens the loggers of ``trainer.logger`` and closes them at the end.

    Args:
        t: the config's ``[trainer]`` table.
        table: the whole config, for the logger's own display.
        folder: the run's folder.
        start: the last step that is done.

    Yields:
        A function for each logger that takes a step and its report.

    Raises:
        ConfigError: a logger is not installed.
        RunError: a logger failed.
    """
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    with contextlib.ExitStack() as stack:
        logs: list[Log] = []
        for name in (name for name in t.logger if name in makers):
            with _failures(name):
                logs.append(_guarded(name, stack.enter_context(makers[name](t, table, folder, start))))
        yield logs


def _guarded(name: str, log: Log) -> Log:
    def guarded(step: int, report: Mapping[str, float]) -> None:
        with _failures(name):
            log(step, report)

    return guarded


@contextlib.contextmanager
def _failures(name: str) -> Iterator[None]:
    """Replaces any error of a logger, such as a lost connection, by one that names it."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise RunError(
            f"the logger {name} failed: {type(error).__name__}: {error}; repair it or take it out of trainer.logger, "
            "then run the same command to continue from the last checkpoint"
        ) from error


@contextlib.contextmanager
def _tensorboard(t: TrainerConfig, table: Table, folder: Path, start: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    # The run repeats the steps after its last checkpoint, so TensorBoard drops what it has of them.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def log(step: int, report: Mapping[str, float]) -> None:
        for name, value in report.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)

    with contextlib.closing(writer):
        yield log


@contextlib.contextmanager
def _wandb(t: TrainerConfig, table: Table, folder: Path, start: int) -> Iterator[Log]:
    import wandb

    # The id belongs to the folder, so that a continued run continues in wandb too.
    run = wandb.init(
        project=t.project_name,
        name=t.experiment_name or folder.name,
        id=_identity(folder),
        resume="allow",
        dir=str(folder),
        config=table,
    )
    try:
        yield lambda step, report: run.log(dict(report), step=step)
    finally:
        run.finish()


def _identity(folder: Path) -> str:
    """Returns the id that wandb knows the run by; it is stored in the run's folder."""
    file = folder / "wandb_id"
    if not file.exists():
        import secrets

        file.write_text(secrets.token_hex(8))
    return file.read_text()
