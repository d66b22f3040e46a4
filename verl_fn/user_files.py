"""Modules from files of the user, ``FILE.py``, under names that every process can import.

The name of such a module says its file: ``file:/home/me/project/.rewards@4fa2c1``. So two files of one name do not
collide, and the processes of a pool find the module of a function that they get. The folder is the module's package,
and so a file may import its neighbours by ``from .helper import same``.

This module imports the standard library alone, since processes run it that do not import the package.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from urllib.parse import quote_from_bytes, unquote_to_bytes

PREFIX = "file:"
PACKAGE = str(Path(__file__).parent) + os.sep  # this project's own files
LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_INSTALLED = re.compile(r"/(site|dist)-packages/")  # Debian, and containers of NVIDIA, have the latter
_COLOURS = re.compile(r"\x1b\[\d+m")
_FRAME = re.compile(r' *File "([^"]+)", line \d+')
_claimed: dict[str, Path] = {}


def is_library(file: str) -> bool:
    """Returns whether a file is Python's own or of an installed package.

    Example:
        >>> is_library("/usr/lib/python3/dist-packages/six.py"), is_library("/home/me/reward.py")
        (True, False)
    """
    return file.startswith(LIBRARIES) or _INSTALLED.search(file) is not None


def load(file: Path) -> ModuleType:
    """Imports a file, unless it was imported with the same contents before.

    Raises:
        ImportError: it imports a neighbour whose name another file has given to a neighbour of its own.
        OSError: it cannot be read.
    """
    file = file.resolve()
    _claim(file)
    importlib.invalidate_caches()  # for neighbours that have just been written
    return importlib.import_module(name_of(file))


def place_of(error: BaseException, caller: str) -> str:
    """Returns file and line of the user's code that an exception comes from, for the end of a message.

    Args:
        error: was raised, or is about the syntax of a file.
        caller: the file that ran the user's code, or the folder of the files.
    """
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f" (at {error.filename}:{error.lineno})"
    others = (caller, __file__, importlib.__file__, "<")
    files = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename]
    frames = [frame for frame in files if not frame.filename.startswith(others)]
    own = [frame for frame in frames if not (is_library(frame.filename) or frame.filename.startswith(PACKAGE))]
    own = own or frames
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""


def name_of(file: Path) -> str:
    """Returns the name of the module of a file; it changes with the contents.

    Folders that hold an ``__init__.py`` are packages of the module, so that ``from ..common import x`` works.
    """
    root = file.parent
    while (root / "__init__.py").is_file() and root.parent != root:
        root = root.parent
    inner = file.parent.relative_to(root).parts
    folders = ".".join(_quoted(part) + "/" for part in (str(root).rstrip("/"), *inner))
    return f"{PREFIX}{folders}.{_quoted(file.stem)}@{_digest(file)}"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the folders and the files that ``name_of`` has named; their neighbours are found as in any package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        tail = fullname.removeprefix(PREFIX).rpartition(".")[2]
        parent = path[0] if path else ""
        if tail.endswith("/"):
            # Without its __init__.py: that may ask for far more than the file does.
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [os.path.join(parent, _unquoted(tail))]
            return spec
        stem, marked, digest = tail.partition("@")
        if not marked:
            return None
        file = Path(parent, _unquoted(stem) + ".py")
        if _digest(file) != digest:
            raise ImportError(f"{file} has changed since another process has imported it", path=str(file))
        return importlib.util.spec_from_file_location(fullname, file)


def _claim(file: Path) -> None:
    """Refuses a second neighbour of one name: ``import helper`` gives all files the one that was imported first."""
    for name in sorted(_imported(file, relative=False)):
        for beside in (file.with_name(f"{name}.py"), file.with_name(name)):
            if beside.exists() and (other := _claimed.setdefault(name, beside)) != beside:
                raise ImportError(
                    f"{file} imports {name}, of which there are two: {beside} and {other}, which another file has "
                    f"imported; write `from . import {name}` or `from .{name} import ...`, or rename one of them"
                )


def _imported(file: Path, *, relative: bool) -> set[str]:
    """Returns the first parts of the names that a file imports; none for one that cannot be read or imported."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return set()
    names = {alias.name for one in nodes if isinstance(one, ast.Import) for alias in one.names}
    for one in nodes:
        if isinstance(one, ast.ImportFrom) and (relative or not one.level):
            names |= {one.module} if one.module else {alias.name for alias in one.names}
    return {name.partition(".")[0] for name in names}


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=6).hexdigest()


def _quoted(part: str) -> str:
    """Returns a part of a path without the characters that have a meaning in a module's name."""
    return quote_from_bytes(os.fsencode(part), safe="/ ").replace(".", "%2E")


def _unquoted(part: str) -> str:
    return os.fsdecode(unquote_to_bytes(part))


def code_files(module: str) -> Iterator[Path]:
    """Yields the files of a module of the user's, given as a file or by name; installed packages have none."""
    if module.endswith(".py"):
        yield from with_imports(Path(module))
        return
    # Processes of rewards and environments find modules in the working directory.
    spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path])
    if spec is None or spec.origin is None or is_library(spec.origin):
        return
    file = Path(spec.origin)
    yield from with_imports(file) if file.name != "__init__.py" else sorted(file.parent.rglob("*.py"))


def with_imports(file: Path) -> list[Path]:
    """Returns a file, and the files of modules and packages in its folder that it imports, directly or not."""
    found = [file]
    for one in found:
        for name in _imported(one, relative=True):
            package = file.parent / name
            files = [package.with_suffix(".py"), *sorted(package.rglob("*.py"))]
            found += [path for path in files if path.is_file() and path not in found]
    return found


def own_traceback(error: BaseException, *, frames_only: bool = False) -> list[str]:
    """Returns the lines of an error's traceback, with only the frames of the user's files; none without such.

    The message of another process's error has the traceback there as text; it is shortened as well.

    Args:
        frames_only: leave out the messages, too.
    """
    ours = (PACKAGE, "<")
    lines: list[str] = []
    kept = in_frame = found = False
    for line in _COLOURS.sub("", "".join(traceback.format_exception(error))).splitlines():
        if frame := _FRAME.match(line):
            in_frame = kept = not (frame[1].startswith(ours) or is_library(frame[1]))
            found |= kept
        elif not line.startswith("    "):  # the code of a frame is indented
            kept, in_frame = not frames_only, False
        # Ray leaves out lines of frames, and not the marks below them.
        if kept and (in_frame or line.strip(" ^~")) and line not in lines[-1:]:
            lines.append(line)
    return lines if found else []


sys.meta_path.insert(0, _Finder())
