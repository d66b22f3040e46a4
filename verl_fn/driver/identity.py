"""Identifies the code of a process: the package's version, path and sources, and the versions of libraries."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from verl_fn import __version__
from verl_fn.config.names import source_file

PACKAGES = ("verl_fn", "verl_fn.state", "verl_fn.steps", "verl_fn.backends", "verl_fn.benchmarks")
LIBRARIES = ("torch", "ray", "transformers")


@attrs.frozen
class Identity:
    """The code that a process imports.

    Attributes:
        path: the package's folder.
        sources: a digest of its source files.
        versions: of the package, Python and the libraries that results depend on.
        code: a digest of the source of each of the user's own objects, by reference; empty where there is none.
    """

    path: str
    sources: str
    versions: Mapping[str, str]
    code: Mapping[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{versions}, sources {self.sources[:8]} from {self.path}"


def identity(code: Sequence[str] = ()) -> Identity:
    """Returns the identity of the code of this process.

    Args:
        code: references to the user's own objects, ``FILE.py:NAME`` or ``package.module:NAME``.

    Example:
        >>> identity() == identity(), sorted(identity().versions)
        (True, ['python', 'ray', 'torch', 'transformers', 'verl_fn'])
    """
    versions = {"verl_fn": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in LIBRARIES}
    return Identity(str(_folder("verl_fn")), _sources(), versions, {name: _source_of(name) for name in code})


def difference(driver: Identity, other: Identity, whose: str) -> str | None:
    """Describes how the code of another process differs from the driver's; None where it is the same.

    Args:
        driver: the code of this process.
        other: the code of the other process.
        whose: names the other process.

    Example:
        >>> driver = identity()
        >>> difference(driver, driver, "rank 1") is None
        True
        >>> print(difference(driver, attrs.evolve(driver, sources="0123456789"), "rank 1"))
        rank 1 does not run the driver's code.
          driver: ...
          rank 1: ...
        Install the same versions on every node, or ...
    """
    if (driver.versions, driver.sources) == (other.versions, other.sources):
        if differing := [name for name, source in driver.code.items() if other.code.get(name) != source]:
            return (
                f"{whose} does not have the driver's {differing[0]}. Put the same file on every node, or send it "
                "with the run: working_dir in the file of ray.runtime_env"
            )
        return None
    return (
        f"{whose} does not run the driver's code.\n  driver: {driver}\n  {whose}: {other}\n"
        "Install the same versions on every node, or send the driver's sources with the run: py_modules or "
        "working_dir in the file of ray.runtime_env"
    )


def _sources() -> str:
    """Returns a digest of the names and bytes of all source files, in whichever folder the packages are."""
    files: dict[str, Path] = {}
    for package in PACKAGES:
        folder = _folder(package)
        files |= {f"{package.replace('.', '/')}/{file.relative_to(folder)}": file for file in folder.rglob("*.py")}
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        h.update(name.encode())
        h.update(files[name].read_bytes())
    return h.hexdigest()


def _source_of(reference: str) -> str:
    try:
        file = source_file(reference)
        return "" if file is None else hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except (ImportError, OSError, ValueError):
        return ""


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).resolve()
