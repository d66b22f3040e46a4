"""Folders that are written as a whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from verl_fn.errors import UsageError

# Holds the files until all are written; a process that was killed leaves it behind.
_ASIDE = ".unfinished"


def check_empty(folder: Path) -> None:
    """Raises an error unless ``folder`` is empty, does not exist, or was left unfinished by ``written_whole``.

    Raises:
        UsageError: it is a file, or a folder that is not empty.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; choose a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / _ASIDE).exists():
        raise UsageError(f"{folder} is not empty; choose another folder")


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yields a folder to write into, whose files move to ``folder`` at the end; an error leaves ``folder`` as it was.

    Example:
        >>> import tempfile
        >>> out = Path(tempfile.mkdtemp()) / "out"
        >>> with contextlib.suppress(OSError), written_whole(out) as aside:
        ...     (aside / "a").write_text("half")
        ...     raise OSError("no room")
        4
        >>> out.exists()
        False
        >>> with written_whole(out) as aside:
        ...     written = (aside / "a").write_text("all")
        >>> [path.name for path in out.iterdir()]
        ['a']
    """
    aside, made = folder / _ASIDE, not folder.exists()
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        # The folder has what the umask allows.
        for path in aside.rglob("*"):
            if path.is_file() and not path.is_symlink():
                # safetensors writes files that others cannot read.
                path.chmod(path.stat().st_mode | aside.stat().st_mode & 0o666)
        for path in aside.iterdir():
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            path.replace(folder / path.name)
        aside.rmdir()
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
