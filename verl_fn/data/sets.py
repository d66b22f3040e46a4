"""Data sets read with the package `datasets`: of the Hugging Face hub at a commit, and of local folders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.data.hub import PREFIX, hub_commit, hub_name, hub_snapshot
from verl_fn.data.rows import MANY, SUFFIXES, Block, DataError, one_line
from verl_fn.errors import install

INSTALL = install("'verl_fn[datasets]'")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAVED, _SPLITS = "state.json", "dataset_dict.json"


@attrs.frozen(eq=False)
class Table:
    """Rows of a data set that lie on disk and are read by number.

    Attributes:
        name: the entry of ``data.train_files``, for error messages.
        data: the data set of the package, in Arrow's format.
        numbers: the rows of it that the table has; None for all.
    """

    name: str
    data: Any
    numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.data) if self.numbers is None else len(self.numbers)

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the names of the columns."""
        return tuple(self.data.column_names)

    def take(self, numbers: Sequence[int]) -> Table:
        """Returns the table of some rows, in the order of their numbers."""
        return Table(
            self.name, self.data, tuple(numbers if self.numbers is None else map(self.numbers.__getitem__, numbers))
        )

    def blocks(self) -> Iterator[Block]:
        """Yields the rows, some at a time.

        Raises:
            DataError: rows cannot be read.
        """
        for start in range(0, len(self), MANY):
            chunk = range(start, min(start + MANY, len(self)))
            numbers = chunk if self.numbers is None else self.numbers[chunk.start : chunk.stop]
            damage = f"{self.name}: rows from {numbers[0]} on cannot be read"
            try:
                rows = self.data[list(numbers)]
            # Files may be damaged or gone, and the package and Arrow raise nearly anything.
            except Exception as error:
                raise DataError(f"{damage}: {_line(error)}") from error
            yield Block(f"{self.name}, row", numbers, rows, damage)


def is_set(entry: str) -> bool:
    """Returns whether an entry of ``data.train_files`` names a data set rather than a file.

    Example:
        >>> is_set("hub:datasets/openai/gsm8k@main#main/train"), is_set("data/gsm8k/train.parquet")
        (True, False)
    """
    if entry.startswith(PREFIX):
        return True
    if Path(entry).expanduser().is_file():
        return False
    folder, _, split = _parts(entry)
    return (bool(split) and Path(entry).suffix not in SUFFIXES) or Path(folder).expanduser().is_dir()


def open_set(entry: str) -> Table:
    """Opens a data set; its rows stay on disk.

    A set of the hub is downloaded into the hub's cache if that lacks it. Files of the hub and of local folders are
    converted to Arrow once, in the cache of the package (``HF_DATASETS_CACHE``).

    Args:
        entry: ``hub:datasets/OWNER/NAME@COMMIT#CONFIG/SPLIT``, ``FOLDER#CONFIG/SPLIT`` with data files, either
            without ``CONFIG/`` for the default configuration, or a folder that ``Dataset.save_to_disk`` wrote.

    Raises:
        DataError: the package is not installed, the entry names no commit or no split, or the set cannot be read.
        HubError: the set cannot be downloaded, and the cache lacks it.
    """
    address, config, split = _parts(entry)
    hub, folder = entry.startswith(PREFIX), Path(address).expanduser()
    saved = not hub and (folder / _SAVED).is_file()
    if not hub and not folder.is_dir():
        raise DataError(f"{entry}: there is no folder {address}")
    if not hub and (folder / _SPLITS).is_file():
        splits = sorted(file.parent.name for file in folder.glob(f"*/{_SAVED}"))
        raise DataError(f"{entry} has the splits {', '.join(splits)}; name the folder of one: {folder}/SPLIT")
    if saved and split:
        raise DataError(f"{entry}: save_to_disk wrote one split to this folder; write the folder without #{split}")
    if not saved and not split:
        raise DataError(
            f"{entry} names no split; write {address}#SPLIT or {address}#CONFIG/SPLIT, or name the files of a folder "
            "(one that Dataset.save_to_disk wrote needs no split)"
        )
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{entry} is read with the package datasets, which cannot be imported ({error}): {INSTALL}"
        ) from error
    if hub:
        folder = _of_hub(entry)
    try:
        if saved:
            data = datasets.load_from_disk(str(folder))
        else:
            data = datasets.load_dataset(str(folder), config or None, split=split)
    # The package raises nearly anything for a damaged set.
    except Exception as error:
        raise DataError(f"{entry} cannot be read: {_line(error)}") from error
    if not len(data):
        raise DataError(f"{entry} has no rows")
    return Table(entry, data.with_format("arrow"))


def set_files(entry: str) -> list[Path]:
    """Returns the files that tell one content of a local set from another; none for a set of the hub.

    A folder of ``save_to_disk`` has a fingerprint of its rows in a small file; of other folders these are all files.

    Example:
        >>> set_files("hub:datasets/openai/gsm8k@main#main/train")
        []
    """
    if entry.startswith(PREFIX):
        return []
    folder = Path(_parts(entry)[0]).expanduser()
    saved = [folder / name for name in (_SAVED, "dataset_info.json")]
    return saved if saved[0].is_file() else sorted(file for file in folder.rglob("*") if file.is_file())


def _of_hub(entry: str) -> Path:
    """Returns the folder of a set of the hub in the hub's cache."""
    address, _, part = entry.partition("#")
    name = hub_name(address)
    if not name.dataset:
        raise DataError(f"{entry} names a model; a data set is hub:datasets/OWNER/NAME@COMMIT#CONFIG/SPLIT")
    if not _COMMIT.fullmatch(name.revision):
        pinned = attrs.evolve(name, revision=hub_commit(name))
        raise DataError(
            f"{entry}: {name.revision} may be other rows tomorrow, so a run needs the commit; it is now "
            f"{pinned}#{part}"
        )
    return hub_snapshot(name)


def _parts(entry: str) -> tuple[str, str, str]:
    """Returns address, configuration and split.

    Example:
        >>> _parts("data/math#algebra/train"), _parts("data/math")
        (('data/math', 'algebra', 'train'), ('data/math', '', ''))
    """
    address, _, part = entry.partition("#")
    config, _, split = part.rpartition("/")
    return address, config, split


def _line(error: BaseException) -> str:
    # The package wraps errors of files in one that says nothing of them.
    error = error.__cause__ or error
    return f"{type(error).__name__}: {one_line(error)}"
