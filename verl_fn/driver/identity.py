"""Identifies the code of a process: the package's sources, and the versions of libraries."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_fn import __version__
from verl_fn.config.names import source_file

PACKAGES = ("verl_fn", "verl_fn.state", "verl_fn.steps", "verl_fn.backends", "verl_fn.benchmarks")
LIBRARIES = ("torch", "ray", "transformers")


def identity(code: Sequence[str] = ()) -> dict[str, str]:
    """Returns what the results of this process depend on: versions, and digests of sources, by name.

    Args:
        code: references to the user's own objects, ``FILE.py:NAME`` or ``package.module:NAME``; their names are the
            references, and their digests are empty if there is no file.

    Example:
        >>> identity() == identity(), sorted(identity())
        (True, ['python', 'ray', 'sources', 'torch', 'transformers', 'verl_fn'])
    """
    versions = {"verl_fn": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in LIBRARIES}
    folders = {package: _folder(package) for package in PACKAGES}
    # A package may be a link to another folder, so files are named by their packages.
    files = {f"{name}/{file.relative_to(top)}": file for name, top in folders.items() for file in top.rglob("*.py")}
    h = hashlib.blake2b(digest_size=4)
    for name in sorted(files):
        h.update(name.encode() + files[name].read_bytes())
    return versions | {"sources": f"{h.hexdigest()} from {folders['verl_fn']}"} | {one: _digest(one) for one in code}


def difference(driver: Mapping[str, str], other: Mapping[str, str], whose: str) -> str | None:
    """Describes how the code of another process, named by ``whose``, differs from the driver's; None if it does not.

    The same sources may lie in another folder.

    Example:
        >>> driver = identity()
        >>> difference(driver, driver, "rank 1") is None
        True
        >>> print(difference(driver, {**driver, "torch": "1.0"}, "rank 1"))
        rank 1 does not run the driver's code, but torch 1.0 instead of ...
        Install the same versions and files on all nodes, or ...
    """
    differing = [name for name in driver if driver[name].split(" from ")[0] != other[name].split(" from ")[0]]
    if not differing:
        return None
    described = ", ".join(f"{name} {other[name]} instead of {driver[name]}" for name in differing)
    return (
        f"{whose} does not run the driver's code, but {described}\nInstall the same versions and files on all nodes, "
        "or send the driver's with the run: py_modules or working_dir in the file of ray.runtime_env"
    )


def _digest(reference: str) -> str:
    try:
        file = source_file(reference)
        return "" if file is None else hashlib.blake2b(file.read_bytes(), digest_size=4).hexdigest()
    except (ImportError, OSError, ValueError):
        return ""


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).resolve()
