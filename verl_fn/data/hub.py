"""Models and data sets of the Hugging Face hub: downloaded when asked for, pinned to a commit, copied to a folder."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import attrs

from verl_fn.atomic import check_empty, replaced_folder
from verl_fn.data.prepare import prepare_gsm8k
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import GSM8K
from verl_fn.errors import UsageError, UserError

PREFIX, DATASETS = "hub:", "datasets/"
RECORD = ".hub.json"  # hidden, since the package datasets takes other files of a folder for rows
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "README.md")
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "LICENSE*", "README.md")
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class HubError(UserError, RuntimeError):
    """Raised where the hub does not give what was asked for; the message names it and says what to do."""


@attrs.frozen
class HubName:
    """A model or a data set of the hub.

    Attributes:
        name: ``OWNER/NAME``.
        dataset: whether it is a data set.
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
    try:
        check_empty(out)
        snapshot = hub_snapshot(name)
        pinned = attrs.evolve(name, revision=snapshot.name)
        with replaced_folder(out) as aside:
            copied = _copy(name, snapshot, aside, pinned)
    except UsageError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error}") from error
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
            f"({' '.join(str(error).split()):.200}); write the commit's 40 digits, as shown on the hub's page "
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
                reason = " ".join(str(error).split())
                raise HubError(f"{name} cannot be downloaded: {reason:.300}") from error
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
