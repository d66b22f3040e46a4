"""What a run reads beside its config: a continued run reports which of these files have changed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verl_fn.config import Plan
from verl_fn.config.names import source_file
from verl_fn.config.tasks import reasoning_names, verifiers_name
from verl_fn.data.hub import recorded
from verl_fn.data.sets import is_set, set_files

from .checkpoints import crc_of, write_text

INPUTS = "inputs.json"


def fingerprints(plan: Plan) -> dict[str, str]:
    """Returns the size and the checksum of every input of a run, by path, and the commits of folders from the hub."""
    files = dict.fromkeys(file for file in _files(plan) if file.is_file())
    prints = {str(file): f"{file.stat().st_size} bytes, CRC {crc_of(file):08x}" for file in files}
    prints |= {entry: _whole(read) for entry in _data(plan) if is_set(entry) and (read := set_files(entry))}
    folders = dict.fromkeys([*map(Path, _folders(plan)), *(up for file in _data_files(plan) for up in file.parents)])
    if (
        not any(_data(plan))
        and reasoning_names(plan.data.task)
        and importlib.util.find_spec("reasoning_gym") is not None
    ):
        # Another version may make other questions of the same seeds.
        prints["reasoning-gym"] = f"version {importlib.metadata.version('reasoning-gym')}"
    # A folder that was copied from the hub is recorded by its commit there.
    return prints | {str(folder): source for folder in folders if (source := recorded(folder)) is not None}


def write_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Writes the fingerprints of a run's inputs into its folder."""
    write_text(folder / INPUTS, json.dumps(dict(inputs), indent=1))


def changed_inputs(folder: Path, inputs: Mapping[str, str]) -> list[str]:
    """Returns the inputs whose fingerprints differ from those when the folder was last trained in.

    Files that the run did not read then are not among them, nor are files that are gone.
    """
    try:
        before = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    before = before if isinstance(before, dict) else {}
    return [file for file, now in inputs.items() if before.get(file, now) != now]


def _data(plan: Plan) -> tuple[str, ...]:
    return (*plan.data.train_files, *plan.data.val_files)


def _whole(files: Sequence[Path]) -> str:
    """Returns one fingerprint of all files of a data set, which also changes where a file is added or removed."""
    lines = "".join(f"{file} {file.stat().st_size} {crc_of(file):08x}\n" for file in files)
    return f"{len(files)} files, CRC {zlib.crc32(lines.encode()):08x}"


def _data_files(plan: Plan) -> Iterator[Path]:
    """Yields the files of the data; sets of the hub have none, since the config has their commit."""
    for entry in _data(plan):
        yield from set_files(entry) if is_set(entry) else (Path(entry),)


def _folders(plan: Plan) -> Iterator[str]:
    """Yields the folders of models that the run did not make itself."""
    yield from (role.folder for role in plan.roles.values() if plan.new_model is None or role.folder != plan.model)


def _files(plan: Plan) -> Iterator[Path]:
    """Yields the data, the user's code, and what makes tokens of text in a model that the run did not make itself."""
    yield from (Path(entry) for entry in _data(plan) if not is_set(entry))
    # Modules of rewards and environments are found from the processes that run them.
    of_user = (*plan.data.convert, *plan.reward.functions, plan.env.name)
    for reference in (*plan.code, *(name for name in of_user if ".py:" in name)):
        if (file := source_file(reference)) is not None:
            yield file
    if name := verifiers_name(plan.env.name):
        # An installed environment is found from the processes that run it.
        file = Path(name).resolve()
        yield file.with_name(file.name.replace("-", "_") + ".py")
    if plan.new_model is None:
        for pattern in ("tokenizer*", "chat_template*", "special_tokens*", "added_tokens*", "generation_config*"):
            yield from sorted(Path(plan.model).glob(pattern))
