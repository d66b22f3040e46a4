"""TensorBoard and wandb, where they are installed and ``trainer.logger`` asks for them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from verl_fn.config import ConfigError
from verl_fn.config.schema import TrainerConfig
from verl_fn.config.tables import Table

Log = Callable[[int, Mapping[str, float]], None]


@contextlib.contextmanager
def loggers(t: TrainerConfig, table: Table, folder: Path, start: int) -> Iterator[list[Log]]:
    """Functions that each take a step's report; closed at the end.

    Raises:
        ConfigError: one that is asked for is not installed.
    """
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    with contextlib.ExitStack() as stack:
        found = []
        for name in t.logger:
            try:
                found.append(stack.enter_context(makers[name](t, table, folder, start)))
            except ImportError as error:
                raise ConfigError(
                    f"trainer.logger asks for {name}, which is not installed: pip install {name}"
                ) from error
        yield found


@contextlib.contextmanager
def _tensorboard(t: TrainerConfig, table: Table, folder: Path, start: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    # What an earlier try wrote beyond the step that is continued comes again.
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

    # The folder is the run's identity, so that a continued run goes on in the same place.
    run = wandb.init(
        project=t.project_name, name=t.experiment_name or folder.name, id=_identity(folder), resume="allow",
        dir=str(folder), config=table,
    )  # fmt: skip
    try:
        yield lambda step, report: run.log(dict(report), step=step)
    finally:
        run.finish()


def _identity(folder: Path) -> str:
    """A name for wandb that stays with the folder: kept in a file of it."""
    file = folder / "wandb_id"
    if not file.exists():
        import secrets

        file.write_text(secrets.token_hex(8))
    return file.read_text()
