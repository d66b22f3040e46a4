"""Files and folders that appear as a whole or not at all, even if the process is killed or the machine stops.

Each is written under a temporary name beside its place, synced to the disk, and renamed. A checksum tells whether a
file is still what was written.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_fn.errors import UsageError

# The folder inside a folder that holds its files until all are written; a killed process leaves it there.
_ASIDE = ".unfinished"
BLOCK, THREADS = 4 * 2**20, 4  # bytes that a thread reads at a time; threads


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yields a path to write to, and renames it to ``file`` at the end; an error leaves ``file`` as it was.

    Args:
        file: the file, or a link; its folder exists. The temporary name is always the same, so the next write removes
            what a killed process left.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a")
        >>> with contextlib.suppress(OSError), replaced(file) as aside:
        ...     aside.write_text("half")
        ...     raise OSError("no room")
        4
        >>> file.exists(), list(file.parent.iterdir())
        (False, [])
    """
    aside = file.with_name(f".{file.name}.writing")
    # Also a link that somebody else put there, and that a writer would follow.
    aside.unlink(missing_ok=True)
    try:
        yield aside
        if not aside.is_symlink():
            sync(aside)
        aside.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write(file: Path, content: str | bytes) -> None:
    """Replaces a file by one with this text, as UTF-8, or these bytes."""
    with replaced(file) as aside, aside.open("xb") as out:
        out.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to write into, whose files move to ``folder`` at the end; an error leaves ``folder`` as it was.

    Example:
        >>> import tempfile
        >>> out = Path(tempfile.mkdtemp()) / "out"
        >>> with contextlib.suppress(OSError), replaced_folder(out) as aside:
        ...     (aside / "a").write_text("half")
        ...     raise OSError("no room")
        4
        >>> out.exists()
        False
        >>> with replaced_folder(out) as aside:
        ...     written = (aside / "a").write_text("all")
        >>> [path.name for path in out.iterdir()]
        ['a']
    """
    aside, made = folder / _ASIDE, not folder.exists()
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        for path in aside.rglob("*"):
            if path.is_file():
                # The umask decides who can read the files; safetensors writes files that others cannot read.
                path.chmod(path.stat().st_mode | aside.stat().st_mode & 0o666)
        move_files(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def move_files(aside: Path, folder: Path, *, last: str = "", stale: Sequence[str] = ()) -> None:
    """Syncs the files in ``aside``, a folder inside ``folder``, moves them into ``folder``, and removes ``aside``.

    Args:
        aside: the folder with the new files.
        folder: gets the files; files of other names stay.
        last: the file that says that the folder is whole. It is removed first and moved last, so that no
            mixture of old and new files has it.
        stale: further files of ``folder`` that are removed before the others are moved.
    """
    names = sorted(str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file())
    for name in names:
        sync(aside / name)
    for name in (last, *stale):
        if name:
            (folder / name).unlink(missing_ok=True)
            sync(folder)
    for name in sorted(names, key=lambda name: name == last):
        if name == last:
            sync(folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).replace(folder / name)
    sync(folder)
    shutil.rmtree(aside)


def existing(path: Path) -> Path:
    """Returns a path, or else the nearest folder above it that exists.

    Example:
        >>> existing(Path("/no/such/folder"))
        PosixPath('/')
    """
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_empty(folder: Path) -> None:
    """Raises UsageError unless ``folder`` is empty, does not exist, or was left unfinished by ``replaced_folder``."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; choose a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / _ASIDE).exists():
        raise UsageError(f"{folder} is not empty; choose another folder")


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def crc_of(path: Path) -> int:
    """Returns the CRC-32 of a file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a")
        >>> file.write_bytes(b"123456789")
        9
        >>> hex(crc_of(file))
        '0xcbf43926'
    """

    def of_block(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(BLOCK))

    with path.open("rb") as file, ThreadPoolExecutor(THREADS) as pool:
        whole = os.fstat(file.fileno()).st_size // BLOCK * BLOCK
        crc = functools.reduce(_joined, pool.map(of_block, range(0, whole, BLOCK)), 0)
        file.seek(whole)
        return zlib.crc32(file.read(), crc)


def _joined(before: int, block: int) -> int:
    """Returns the CRC-32 of some bytes and a block after them, from the CRC-32 of each.

    Example:
        >>> some, block = b"some", b"block" + bytes(BLOCK - 5)
        >>> _joined(zlib.crc32(some), zlib.crc32(block)) == zlib.crc32(some + block)
        True
    """
    return functools.reduce(operator.xor, (each for bit, each in enumerate(_shifted()) if before >> bit & 1), block)


@functools.cache
def _shifted() -> list[int]:
    """Returns what becomes of each bit of a CRC-32 when any block follows: a CRC is linear over bits."""
    zeros = bytes(BLOCK)
    none = zlib.crc32(zeros)
    return [zlib.crc32(zeros, 1 << bit) ^ none for bit in range(32)]
