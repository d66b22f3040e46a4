"""What a run reads beside its config: a continued run reports which of these files have changed."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from verl_fn import __version__
from verl_fn.config import Plan
from verl_fn.config.names import is_reference
from verl_fn.config.tasks import reasoning_names, verifiers_name
from verl_fn.data.hub import recorded
from verl_fn.data.sets import is_set, set_files

from .checkpoints import crc_of

INPUTS = "inputs.json"
_VERSION = "version "


def fingerprints(plan: Plan) -> dict[str, str]:
    """Returns what a run reads beside its config.

    Returns:
        The size and the checksum of every file by path, the commits of folders from the hub, and the versions of
        libraries.
    """
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
        prints["reasoning-gym"] = _VERSION + importlib.metadata.version("reasoning-gym")
    prints |= {"verl_fn": _VERSION + __version__, "python": _VERSION + platform.python_version()}
    for library in ("torch", "transformers", *(["vllm"] if plan.rollout.name == "vllm" else [])):
        # A cluster may have a library that this process lacks.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            prints[library] = _VERSION + importlib.metadata.version(library)
    # A folder that was copied from the hub is recorded by its commit there.
    return prints | {str(folder): source for folder in folders if (source := recorded(folder)) is not None}


def read_inputs(file: Path) -> dict[str, str]:
    """Reads recorded fingerprints; returns none if they were not recorded or are damaged."""
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    items = recorded.items() if isinstance(recorded, dict) else ()
    return {name: fingerprint for name, fingerprint in items if isinstance(fingerprint, str)}


def is_version(fingerprint: str) -> bool:
    """Returns whether a fingerprint is the version of a package."""
    return fingerprint.startswith(_VERSION)


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describes the inputs whose fingerprints differ; those that are only on one side are not among them.

    Example:
        >>> before = {"/a.py": "3 bytes, CRC 1", "torch": "version 1"}
        >>> changed_inputs(before, {"/a.py": "4 bytes, CRC 2", "torch": "version 2"})
        ['another content of /a.py', 'another version of torch (1 -> 2)']
    """
    changed = [
        (name, before[name], fingerprint)
        for name, fingerprint in now.items()
        if before.get(name, fingerprint) != fingerprint
    ]
    return [
        f"another version of {name} ({was.removeprefix(_VERSION)} -> {fingerprint.removeprefix(_VERSION)})"
        if is_version(fingerprint)
        else f"another content of {name}"
        for name, was, fingerprint in changed
    ]


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
    for reference in (*plan.code, *plan.data.convert, *plan.reward.functions, plan.env.name):
        if is_reference(reference) and not verifiers_name(reference):
            yield from _code(reference.rpartition(":")[0])
    if name := verifiers_name(plan.env.name):
        # An installed environment is found from the processes that run it.
        file = Path(name).resolve()
        yield from _with_imports(file.with_name(file.name.replace("-", "_") + ".py"))
    if plan.new_model is None:
        for pattern in ("tokenizer*", "chat_template*", "special_tokens*", "added_tokens*", "generation_config*"):
            yield from sorted(Path(plan.model).glob(pattern))


def _code(module: str) -> Iterator[Path]:
    """Yields the files of a module of the user's, given as a file or by name; installed packages have none."""
    if module.endswith(".py"):
        yield from _with_imports(Path(module))
        return
    # Processes of rewards and environments find modules in the working directory.
    spec = PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path])
    if spec is None or spec.origin is None or "site-packages" in spec.origin:
        return
    file = Path(spec.origin)
    yield from _with_imports(file) if file.name != "__init__.py" else sorted(file.parent.rglob("*.py"))


def _with_imports(file: Path) -> list[Path]:
    """Returns a file, and the files of modules and packages in its folder that it imports, directly or not."""
    found = [file]
    for one in found:
        for name in _imported(one):
            package = file.parent / name
            files = [package.with_suffix(".py"), *sorted(package.rglob("*.py"))]
            found += [path for path in files if path.is_file() and path not in found]
    return found


def _imported(file: Path) -> set[str]:
    """Returns the first parts of the names that a file imports; none for one that cannot be read."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return set()
    names = {alias.name for one in nodes if isinstance(one, ast.Import) for alias in one.names}
    for one in nodes:
        if isinstance(one, ast.ImportFrom):
            names |= {one.module} if one.module else {alias.name for alias in one.names}
    return {name.partition(".")[0] for name in names}
