"""Models on the command line: runs, checkpoints and Hugging Face folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def model_of(path: str) -> tuple[Path, Path | None]:
    """Returns the model folder that a path stands for, and the run that it belongs to, if any.

    Raises:
        RunError: there is no such folder, or it is a run that has saved nothing yet.
    """
    from verl_fn.runs.checkpoints import MANIFEST, checkpoints
    from verl_fn.runs.errors import RunError
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
            from verl_fn.runs.errors import RunError

            raise RunError(
                f"{model} was removed meanwhile: a run in training keeps only its last trainer.max_ckpt_to_keep "
                "checkpoints; run the command again for the newest one"
            ) from error
        raise
