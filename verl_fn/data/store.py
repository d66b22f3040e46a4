"""Encoded problems in the user's cache: a file for each content of the data, tokenizer and code.

The next start with the same data reads numbers, and a problem when a step needs it. A file is used only if its
checksum holds. It is named by a digest of everything that it depends on, so nothing in the cache is ever old.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fcntl
import hashlib
import io
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np

from verl_fn.data.conversations import Conversation
from verl_fn.data.encoded import Encoded, Part, assembled
from verl_fn.data.judged import Judged
from verl_fn.data.notices import Group, Traits
from verl_fn.data.rows import Inexact
from verl_fn.data.tasks import Problem

UNUSED = 30 * 24 * 3600  # seconds after which a file that no run has read is removed
CHUNK = 1 << 20

_CLASSES = (Problem, Conversation, Judged)
_FIELDS = {of: [field.name for field in attrs.fields(of) if field.name not in ("id", "place")] for of in _CLASSES}
_PLAIN = (
    Inexact,
    decimal.Decimal,
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
)
_NAMES = {(one.__module__, one.__qualname__): one for one in _PLAIN}
_DIGEST = hashlib.sha256


class Unstorable(Exception):
    """Raised for a problem that has an object of a class that no file holds, as a user's function may make it."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if value in _PLAIN if isinstance(value, type) else type(value) in _PLAIN:
            return NotImplemented
        raise Unstorable(f"{type(value).__module__}.{type(value).__qualname__}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns one of few classes of values, so that no file can name code to run."""
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is no class of a row's values")


def packed(problem: Problem) -> bytes:
    """Returns a problem, without its number and the name of its file, as bytes that ``unpacked`` reads.

    Raises:
        Unstorable: it has an object of a class that no file gives.

    Example:
        >>> unpacked(packed(Problem("a", "b", 7, "s")), 5)
        Problem(prompt='a', answer='b', id=5, data_source='s', extra_info={}, chat_template_kwargs={}, tools=())
    """
    if type(problem) not in _CLASSES:
        raise Unstorable(type(problem).__name__)
    fields = [getattr(problem, name) for name in _FIELDS[type(problem)]]
    out = io.BytesIO()
    # The same rows may lie in another file at the next start.
    _Pickler(out, 5).dump((_CLASSES.index(type(problem)), problem.place.rpartition(", ")[2], *fields))
    return out.getvalue()


def unpacked(data: bytes, number: int, file: str = "") -> Problem:
    """Returns the problem that ``packed`` made bytes of, with a number and the name of its file."""
    kind, row, *fields = _Unpickler(io.BytesIO(data)).load()
    of = _CLASSES[kind]
    return of(**dict(zip(_FIELDS[of], fields, strict=True)), id=number, place=f"{file}, {row}" if row else "")


@attrs.frozen(eq=False)
class Stored(Sequence[Problem]):
    """Problems in an open file, each read when it is asked for.

    Attributes:
        read: returns bytes of the file, from a place on.
        ends: the place in the file behind each problem.
        files: for each file of the data, the number of the first problem behind it, and its name.
    """

    read: Callable[[int, int], bytes]
    ends: np.ndarray
    files: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        number = range(len(self))[number]
        start = int(self.ends[number - 1]) if number else 0
        file = next((name for end, name in self.files if number < end), "")
        return unpacked(self.read(start, int(self.ends[number]) - start), number, file)


def write(out: BinaryIO, parts: Iterable[Part]) -> Exception | None:
    """Writes the problems of parts, one after the other, then their columns, and a checksum.

    Returns:
        The first error of a part; what was written is then incomplete.
    """
    hashed, kept, ends, end = _DIGEST(), list[Part](), list[np.ndarray](), 0

    def put(data: bytes) -> None:
        hashed.update(data)
        out.write(data)

    for part in parts:
        problems = [one for one in part.problems if isinstance(one, bytes)]
        put(b"".join(problems))
        ends.append(end + np.cumsum([len(one) for one in problems], dtype=np.int64))
        end += sum(map(len, problems))
        kept.append(attrs.evolve(part, problems=()))
    whole = assembled(kept, ())
    columns = {
        "ends": np.concatenate(ends),
        "prompts": whole.prompts,
        "rows": whole.rows,
        "hashes": whole.traits.prompts,
        "flags": whole.traits.flags,
        "groups": whole.traits.groups,
    }
    for column in columns.values():
        file = io.BytesIO()
        np.save(file, column, allow_pickle=False)
        put(file.getvalue())
    names = [(group.data_source, group.fields, group.arguments) for group in whole.traits.names]
    about = json.dumps({"end": end, "names": names, "sizes": whole.sizes, "unused": whole.unused}).encode()
    put(about + len(about).to_bytes(8, "little"))
    out.write(hashed.digest())
    out.flush()
    return whole.error


def load(read: Callable[[int, int], bytes], size: int) -> Encoded:
    """Returns what ``write`` wrote; problems stay in the file.

    Args:
        read: returns bytes of the file, from a place on.
        size: of the file, in bytes.

    Raises:
        ValueError: the file is not whole, or damaged.
    """
    hashed, last = _DIGEST(), size - _DIGEST().digest_size
    for start in range(0, last, CHUNK):
        hashed.update(read(start, min(CHUNK, last - start)))
    if last < 8 or read(last, size - last) != hashed.digest():
        raise ValueError("the checksum differs")
    length = int.from_bytes(read(last - 8, 8), "little")
    about = json.loads(read(last - 8 - length, length))
    columns = io.BytesIO(read(about["end"], last - 8 - length - about["end"]))
    ends, prompts, rows, hashes, flags, groups = (np.load(columns, allow_pickle=False) for _ in range(6))
    names = tuple(Group(source, tuple(fields), tuple(arguments)) for source, fields, arguments in about["names"])
    traits = Traits(hashes, flags, groups, names)
    return Encoded(Stored(read, ends), prompts, rows, traits, tuple(about["sizes"]), Counter(about["unused"]))


def stored(name: str, parts: Callable[[], Iterable[Part]], unchanged: Callable[[], bool] = lambda: True) -> Encoded:
    """Returns encoded problems from the cache, and makes them first if the cache lacks them.

    Several processes that lack the same at once wait for the one that makes it. If the cache cannot be written,
    the problems stay in memory, as bytes.

    Args:
        name: a digest of everything that the problems depend on.
        parts: makes the problems, packed.
        unchanged: whether what was read is still what the name says; otherwise nothing stays in the cache.
    """
    file = cache_folder() / f"{name}.rows"
    if (found := _found(file)) is not None:
        return found
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(file.with_name(f".{name}.writing")) as (aside, out):
            # Another process may have made it meanwhile.
            if (found := _found(file)) is not None:
                return found
            out.truncate(0)
            error = write(out, parts())
            made = _of_file(os.dup(out.fileno()))
            if error is None and unchanged():
                aside.replace(file)
                _remove_unused(file)
            return attrs.evolve(made, error=error)
    except OSError:
        return in_memory(parts())


def in_memory(parts: Iterable[Part]) -> Encoded:
    """Returns packed parts as one, in memory; as bytes they take far less room than as problems."""
    memory = io.BytesIO()
    error = write(memory, parts)
    data = memory.getbuffer()
    made = load(lambda start, count: bytes(data[start : start + count]), len(data))
    return attrs.evolve(made, error=error)


def cache_folder() -> Path:
    """Returns the folder of the cache, below ``XDG_CACHE_HOME``."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "verl_fn" / "rows"


def _found(file: Path) -> Encoded | None:
    """Returns what a file of the cache holds; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        found = _of_file(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        with contextlib.suppress(OSError):
            os.utime(file)
        return found
    return None


def _of_file(descriptor: int) -> Encoded:
    opened = os.fdopen(descriptor, "rb")

    def read(start: int, count: int) -> bytes:
        # Unlike a map of the file, it fails with an error if the file was cut off.
        data = os.pread(opened.fileno(), count, start)
        if len(data) < count:
            raise OSError(f"{opened.name}: the file has changed while it was read")
        return data

    return load(read, os.fstat(descriptor).st_size)


@contextlib.contextmanager
def _claimed(aside: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Opens a file for one process at a time, others wait; afterwards it is gone, unless it was renamed.

    The claim of a killed process ends with it, and the next one continues with its file.
    """
    while True:
        with aside.open("ab+") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            # The process before has renamed or removed it.
            if not _is(out, aside):
                continue
            try:
                yield aside, out
            finally:
                with contextlib.suppress(OSError):
                    if _is(out, aside):
                        aside.unlink()
                # Copies of the descriptor, in workers or for reading, would hold it.
                fcntl.flock(out, fcntl.LOCK_UN)
            return


def _is(out: BinaryIO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(out.fileno()), os.stat(file))
    except FileNotFoundError:
        return False


def _remove_unused(kept: Path) -> None:
    for file in kept.parent.iterdir():
        with contextlib.suppress(OSError):
            if file != kept and time.time() - file.stat().st_mtime > UNUSED:
                file.unlink()
