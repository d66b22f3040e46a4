"""Models and data sets of the Hugging Face hub: downloaded when asked for, pinned to a commit, copied to a folder.

``Table`` has the rows of a data set that the package `datasets` reads, of the hub or of a local folder.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.atomic import check_empty, replaced_folder
from verl_fn.data.prepare import prepare_gsm8k
from verl_fn.data.rows import MANY, SUFFIXES, Block, DataError, one_line
from verl_fn.data.tasks import GSM8K
from verl_fn.errors import UsageError, UserError, install, raised_as

PREFIX, DATASETS = "hub:", "datasets/"
RECORD = ".hub.json"  # hidden, since the package datasets takes other files of a folder for rows
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "README.md")
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "LICENSE*", "README.md")
_NAME = re.compile(r"[\w.-]+/[\w.-]+")

INSTALL = install("'verl_fn[datasets]'")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAVED, _SPLITS = "state.json", "dataset_dict.json"


class HubError(UserError, RuntimeError):
    """Raised where the hub does not give what was asked for; the message names it and says what to do."""


@attrs.frozen
class HubName:
    """A model or a data set of the hub.

    Attributes:
        name: ``OWNER/NAME``.
        revision: a branch, a tag or a commit.
    """

    name: str
    dataset: bool = False
    revision: str = "main"

    def __str__(self) -> str:
        return f"{PREFIX}{DATASETS if self.dataset else ''}{self.name}@{self.revision}"


def hub_name(written: str) -> HubName:
    """Reads ``hub:OWNER/NAME`` or ``hub:datasets/OWNER/NAME``, either with ``@REVISION`` behind it.

    Raises:
        HubError: it has another form.

    Example:
        >>> hub_name("hub:datasets/openai/gsm8k@main")
        HubName(name='openai/gsm8k', dataset=True, revision='main')
    """
    path, _, revision = written.removeprefix(PREFIX).partition("@")
    name = path.removeprefix(DATASETS)
    if not written.startswith(PREFIX) or not _NAME.fullmatch(name):
        raise HubError(f"{written} is no name of the hub; write hub:OWNER/NAME, or hub:datasets/OWNER/NAME for data")
    return HubName(name, path.startswith(DATASETS), revision or "main")


def prepare_hub(written: str, out: str | Path) -> str:
    """Copies a model or a data set of the hub into ``out``, through the hub's cache, and records its commit there.

    Of a model, its weights as safetensors, config and tokenizer are taken, and no code. Of a data set, Parquet and
    JSON files are taken; GSM8K's are converted to verl's columns. The commit is written to ``.hub.json``, and each
    run that reads the folder records it.

    Args:
        written: as ``hub_name`` reads it.
        out: the folder to write, new or empty.

    Returns:
        A line that says what was written.

    Raises:
        HubError: the name has another form, the hub cannot be reached and its cache lacks the files, or none of
            them can be used.
        DataError: ``out`` is not empty or cannot be written.
    """
    name, out = hub_name(written), Path(out).expanduser()
    with raised_as(DataError, f"{out} cannot be written", OSError):
        try:
            check_empty(out)
        except UsageError as error:
            raise DataError(str(error)) from error
        snapshot = hub_snapshot(name)
        pinned = attrs.evolve(name, revision=snapshot.name)
        with replaced_folder(out) as aside:
            copied = _copy(name, snapshot, aside, pinned)
    return f"wrote {out} from {pinned}: {copied}"


def recorded(folder: Path) -> str | None:
    """Returns the name and commit of the hub that a folder was copied from; None for another folder."""
    try:
        return str(json.loads((folder / RECORD).read_text(encoding="utf-8"))["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hub_commit(name: HubName) -> str:
    """Asks the hub for the commit of a revision.

    Raises:
        HubError: the hub cannot be reached, or has no such revision.
    """
    from huggingface_hub import HfApi

    kind = "dataset" if name.dataset else "model"
    try:
        return str(HfApi(library_name="verl_fn").repo_info(name.name, repo_type=kind, revision=name.revision).sha)
    # Without a connection, the library below raises its own errors.
    except Exception as error:
        raise HubError(
            f"{name} is no commit, and the hub cannot be asked for the commit of {name.revision} "
            f"({one_line(error)}); write the commit's 40 digits, as shown on the hub's page "
            "of the files' history"
        ) from error


def hub_snapshot(name: HubName) -> Path:
    """Downloads a model's or data set's files that the hub's cache lacks, and returns their folder in the cache.

    The folder's name is the commit. For a commit whose files the cache has, the hub need not be reached.

    Raises:
        HubError: the hub cannot be reached and its cache lacks the files, or it refuses them.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    kind, patterns = ("dataset", DATA_FILES) if name.dataset else ("model", MODEL_FILES)
    download = functools.partial(
        snapshot_download, name.name, repo_type=kind, revision=name.revision, allow_patterns=list(patterns)
    )
    try:
        return Path(download(library_name="verl_fn"))
    # Without a connection, the library below raises its own errors.
    except Exception as error:
        try:
            # Files of a commit never change. An incomplete download is refused.
            return Path(download(local_files_only=True))
        except Exception:
            if not isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
                raise HubError(f"{name} cannot be downloaded: {one_line(error)}") from error
            raise HubError(
                f"{name} is not in the hub's cache, or not all of it, and the hub cannot be reached; connect to it "
                "and unset HF_HUB_OFFLINE, or copy the files here from a machine that has them"
            ) from error


def _copy(name: HubName, snapshot: Path, aside: Path, pinned: HubName) -> str:
    if name.dataset and name.name == GSM8K:
        splits = prepare_gsm8k(snapshot, aside)
        written = ", ".join(f"{split}.parquet with {count} rows" for split, count in splits.items())
    else:
        # A cache that was filled for another purpose may hold more.
        patterns = DATA_FILES if name.dataset else MODEL_FILES
        files = sorted({file for pattern in patterns for file in snapshot.rglob(pattern) if file.is_file()})
        main = [file for file in files if file.suffix == (".parquet" if name.dataset else ".safetensors")]
        lines = [file for file in files if name.dataset and file.suffix in (".json", ".jsonl")]
        if not main and not lines:
            wanted = "Parquet or JSON files" if name.dataset else "weights as safetensors"
            raise HubError(f"{pinned} has no {wanted}")
        for file in files:
            target = aside / file.relative_to(snapshot)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        written = ", ".join(str(file.relative_to(snapshot)) for file in (main or lines))
    (aside / RECORD).write_text(json.dumps({"source": str(pinned)}, indent=1) + "\n", encoding="utf-8")
    return written


@attrs.frozen(eq=False)
class Table:
    """Rows of a data set that lie on disk and are read by number.

    Attributes:
        name: the entry of ``data.train_files``, for error messages.
        data: the data set of the package, in Arrow's format.
        numbers: the rows of it that the table has, by default all.
    """

    name: str
    data: Any
    numbers: Sequence[int] = attrs.field()

    @numbers.default
    def _all(self) -> Sequence[int]:
        return range(len(self.data))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the names of the columns."""
        return tuple(self.data.column_names)

    def take(self, numbers: Sequence[int]) -> Table:
        """Returns the table of some rows, in the order of their numbers."""
        return Table(self.name, self.data, [self.numbers[number] for number in numbers])

    def blocks(self) -> Iterator[Block]:
        """Yields the rows, some at a time.

        Raises:
            DataError: rows cannot be read.
        """
        for start in range(0, len(self), MANY):
            numbers = self.numbers[start : start + MANY]
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
    if not saved and data.info.config_name == "default":
        _warn_of_others(entry, folder, data.info.builder_name)
    return Table(entry, data.with_format("arrow"))


def _warn_of_others(entry: str, folder: Path, read: str) -> None:
    """Warns of files that the package leaves out: it reads one kind of files of a folder, the most frequent one.

    A card may choose files, and folders of images have such files besides.
    """
    others = {"parquet": ".jsonl", "json": ".parquet"}
    if read not in others or (folder / "README.md").exists():
        return
    if left := sorted(folder.rglob(f"*{others[read]}")):
        warnings.warn(
            f"{entry}: the package datasets reads one kind of files, here {read}; it leaves {len(left)} others out, "
            f"such as {left[0].relative_to(folder)}; to read them, name the files",
            stacklevel=3,
        )


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
