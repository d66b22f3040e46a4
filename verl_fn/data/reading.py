"""The problems of files: read, checked and encoded by several processes, or found in the user's cache.

The cache has a file for each content of the data, tokenizer and code. The next start with the same data reads
numbers, and a problem when a step needs it. A file is used only if its checksum holds. It is named by a digest of
everything that it depends on, so nothing in the cache is ever old.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fcntl
import functools
import gc
import hashlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO, TypeVar

import attrs
import numpy as np

import verl_fn
from verl_fn.backends.hf.processor import SETTINGS
from verl_fn.backends.hf.tokenizer import ARGUMENTS, template_text
from verl_fn.data.encoded import Asked, Encoded, Encoder, assembled
from verl_fn.data.entries import Entry
from verl_fn.data.examples import Conversation
from verl_fn.data.hub import Table, is_set, open_set
from verl_fn.data.judged import Judged
from verl_fn.data.notices import Group, Traits
from verl_fn.data.rendering import all_ends
from verl_fn.data.rows import MANY, Inexact
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError
from verl_fn.user_files import code_files

MOST = 32  # processes
AHEAD = 4  # results for each process that wait for an earlier one

T = TypeVar("T")
R = TypeVar("R")

FEWEST = 10_000  # fewer problems are encoded in a few seconds, by this process
VERSIONS = ("transformers", "tokenizers", "jinja2", "pyarrow", "numpy", "attrs")
CODE = ("data/*.py", "backends/hf/*.py", "config/schema.py", "scores.py")  # makes problems and tokens of rows
Stat = tuple[int, ...]
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


class ProcessEnded(UserError, RuntimeError):
    """Raised if a process ended by itself; the message has its exit status."""


def in_order(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields the result of each item, in the order of the items.

    The function runs in a process for each core. They are forked, so the function may be anything, and items and
    results are pickled. Each process has one item at a time, and few results wait for an earlier one, so memory does
    not grow with the number of items. If this process is killed, the others end.

    Args:
        function: is called on each item, in the order of the items if there is one core.

    Raises:
        ProcessEnded: a process was killed.
        Exception: what the function raised for the first item on which it fails.

    Example:
        >>> list(in_order(abs, [-1, 2, -3]))
        [1, 2, 3]
    """
    count = min(MOST, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1
    if count == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("fork")
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(function, theirs, [*processes, ours]), daemon=True)
            process.start()
            processes[ours] = process
            theirs.close()
        yield from _gathered(processes, enumerate(items))
    finally:
        for pipe, process in processes.items():
            pipe.close()
            # It may be in the middle of an item.
            process.kill()
            process.join()


def _gathered(processes: dict[Connection, Any], items: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    free, at = list(processes), dict[Connection, int]()
    results: dict[int, tuple[Any, BaseException | None]] = {}
    first = 0
    while True:
        for number, item in itertools.islice(items, len(free) if len(results) < AHEAD * len(processes) else 0):
            pipe = free.pop()
            at[pipe] = number
            with contextlib.suppress(BrokenPipeError):  # it has ended, as receiving will find
                pipe.send(item)
        if not at and not results:
            return
        # A process that has answered gets its next item before an earlier result is handed out and used.
        ready = [one for one in wait(list(at), 0 if first in results else None) if isinstance(one, Connection)]
        for pipe in ready:
            try:
                results[at.pop(pipe)] = pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                processes[pipe].join()
                raise ProcessEnded(
                    f"a process that reads data ended with exit status {processes[pipe].exitcode}; the system may "
                    "have killed it for lack of memory"
                ) from error
            free.append(pipe)
        if not ready:
            result, failure = results.pop(first)
            if failure is not None:
                raise failure
            first += 1
            yield result


def _serve(function: Callable[[Any], Any], pipe: Connection, inherited: list[Connection]) -> None:
    """Calls the function on what comes, until the other end is closed."""
    # Of the parent's ends, the parent must have the only copy.
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would compete with the other processes
    gc.freeze()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            item = pipe.recv()
            try:
                answer = pickle.dumps((function(item), None))
            except Exception as error:
                try:
                    answer = pickle.dumps((None, error))
                except Exception:  # an error of a class that cannot be pickled
                    answer = pickle.dumps((None, RuntimeError("".join(traceback.format_exception(error)))))
            pipe.send_bytes(answer)


def encoded_files(files: Sequence[Entry], encoder: Encoder, references: Sequence[str] = ()) -> Encoded:
    """Returns the problems of files and data sets with the lengths of their tokens.

    Few problems stay in memory. Many are read and encoded by a process for each core and lie in the cache, whose
    file is named by all that they depend on.

    Args:
        references: the names of the encoder's functions of ``data.convert``.

    Raises:
        DataError: a file or a row cannot be used.
    """
    opened = [open_set(str(one)) if not isinstance(one, Table) and is_set(str(one)) else one for one in files]
    head, rows = list[Asked](), 0
    for asked in _asked(opened, encoder):
        head.append(asked)
        rows += len(asked.block.numbers)
        if rows >= FEWEST:
            break
    else:
        return assembled(map(encoder, head))
    del head

    def parts() -> Iterator[Encoded]:
        return in_order(attrs.evolve(encoder, pack=packed), _asked(opened, encoder))

    try:
        name = name_of(opened, encoder, references)
        found = in_memory(parts()) if name is None else stored(name, parts)
    except Unstorable:
        return assembled(map(encoder, _asked(opened, encoder)))
    assert isinstance(found.problems, Stored)
    names = [one.name if isinstance(one, Table) else str(Path(one).expanduser()) for one in opened]
    ends = itertools.accumulate(found.sizes)
    return attrs.evolve(found, problems=attrs.evolve(found.problems, files=tuple(zip(ends, names, strict=False))))


def _asked(files: Sequence[Entry], encoder: Encoder) -> Iterator[Asked]:
    """Yields the rows of all files, some at a time."""
    first = 0
    for number, file in enumerate(files):
        for block in encoder.kinds[number].blocks(file, encoder.convert):
            yield Asked(block, number, first)
            first += len(block.numbers)


def encoded_problems(problems: Sequence[Problem], tokenizer: Any) -> Encoded:
    """Returns problems with the lengths of their prompts; many are encoded by several processes."""
    encoder = Encoder((), (), tokenizer)
    some = [problems[start : start + MANY] for start in range(0, len(problems), MANY)]
    return assembled((map if len(problems) < FEWEST else in_order)(encoder.part, some))


@attrs.frozen
class Name:
    """A digest of all that encoded problems depend on.

    Attributes:
        digest: of the contents of files, the settings, the tokenizer with its template and arguments, the code that
            makes problems, and versions.
        stats: sizes, times and places of the files before they were read for it.
    """

    digest: str
    stats: Mapping[Path, Stat]

    def holds(self) -> bool:
        """Returns whether no file has been written or replaced since."""
        return all(_stat(file) == stat for file, stat in self.stats.items())


def name_of(files: Sequence[Entry], encoder: Encoder, references: Sequence[str]) -> Name | None:
    """Returns the name of the encoded problems of files; None if it cannot be known what they depend on.

    Args:
        files: the files and open data sets.
        references: the names of the encoder's functions of ``data.convert``.
    """
    tokenizer = encoder.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        return None
    clock = "strftime_now"
    if clock in template_text(tokenizer) and clock not in getattr(tokenizer, ARGUMENTS, {}):
        return None  # the day decides
    used: list[Path] = []
    for file in files:
        if not isinstance(file, Table):
            used.append(Path(file).expanduser())
        elif not (parts := getattr(file.data, "cache_files", ())):
            return None  # it lies in memory
        else:
            used += [Path(part["filename"]) for part in parts]
    own = [name for name in references if not name.startswith("verl_fn.")]
    code = [file for name in own for file in code_files(name.rpartition(":")[0])]
    stats = {file: _stat(file) for file in (*used, *code)}
    hashed = hashlib.sha256()
    for part in (*_settings(files, encoder, references), *_tokens(tokenizer), *_versions(bool(own))):
        hashed.update(part.encode(errors="surrogatepass") + b"\0")
    for path in (*used, *code):
        with path.open("rb") as opened:
            hashed.update(f"{path.suffix}\0".encode() + hashlib.file_digest(opened, "sha256").digest())
    return Name(hashed.hexdigest(), stats)


def _stat(file: Path) -> Stat:
    now = file.stat()
    # Nobody can set the time of the last change of a file's state, st_ctime.
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _settings(files: Sequence[Entry], encoder: Encoder, references: Sequence[str]) -> Iterator[str]:
    """Yields what is read of files, and which of their rows are learned from."""
    for file, kind in zip(files, encoder.kinds, strict=True):
        yield repr((kind.required, kind.optional))
        if isinstance(file, Table):
            # Several entries may be parts of the same files.
            yield repr((file.name, len(file), file.columns, getattr(file.data, "_fingerprint", "")))
    ends = None if encoder.end_tokens is None else all_ends(encoder.tokenizer, encoder.end_tokens)
    yield repr((ends, encoder.limit, encoder.judged_only))
    yield from references
    # A function may have been imported before its file changed.
    for function in encoder.convert:
        yield repr((getattr(function, "__module__", ""), _shape(getattr(function, "__code__", None))))


def _shape(value: Any) -> Any:
    """Returns what a function's code does, the same in every process."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [_shape(one) for one in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _tokens(tokenizer: Any) -> Iterator[str]:
    """Yields what tokens depend on beside the text."""
    yield repr(type(tokenizer))
    yield tokenizer.backend_tokenizer.to_str()
    yield template_text(tokenizer)
    yield repr(sorted(getattr(tokenizer, ARGUMENTS, {}).items(), key=lambda item: item[0]))
    yield repr(sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()))
    yield repr(tokenizer.split_special_tokens)
    yield repr(() if tokenizer.eos_token_id is None else all_ends(tokenizer, tokenizer.eos_token_id))
    # What images become.
    for name in (*SETTINGS, "config.json"):
        file = Path(tokenizer.name_or_path) / name
        yield file.read_text() if file.is_file() else ""


def _versions(of_all: bool) -> Iterator[str]:
    """Yields versions of Python and packages, all that are installed for code of the user's."""
    yield platform.python_version()
    if of_all:
        yield from sorted(f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    else:
        yield from (f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    yield _code()


@functools.cache
def _code() -> str:
    root = Path(verl_fn.__file__).parent
    files = sorted(file for pattern in CODE for file in root.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


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


def write_stored(out: BinaryIO, parts: Iterable[Encoded]) -> None:
    """Writes the problems of parts, one after the other, then their columns, and a checksum."""
    hashed, kept, ends, end = _DIGEST(), list[Encoded](), list[np.ndarray](), 0

    def put(data: bytes) -> None:
        hashed.update(data)
        out.write(data)

    for part in parts:
        put(b"".join(part.problems))
        ends.append(end + np.cumsum([len(one) for one in part.problems], dtype=np.int64))
        end += sum(map(len, part.problems))
        kept.append(attrs.evolve(part, problems=()))
    whole = assembled(kept)
    traits = whole.traits
    for column in (np.concatenate(ends), whole.prompts, whole.rows, traits.prompts, traits.flags, traits.groups):
        file = io.BytesIO()
        np.save(file, column, allow_pickle=False)
        put(file.getvalue())
    names = list(map(attrs.astuple, traits.names))
    about = json.dumps({"end": end, "names": names, "sizes": whole.sizes, "unused": whole.unused}).encode()
    put(about + len(about).to_bytes(8, "little"))
    out.write(hashed.digest())
    out.flush()


def load_stored(read: Callable[[int, int], bytes], size: int) -> Encoded:
    """Returns what ``write_stored`` wrote; problems stay in the file.

    Args:
        read: returns bytes of the file, from a place on.

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
    names = tuple(Group(source, *map(tuple, others)) for source, *others in about["names"])
    traits = Traits(hashes, flags, groups, names)
    return Encoded(Stored(read, ends), prompts, rows, traits, tuple(about["sizes"]), Counter(about["unused"]))


def stored(name: Name, parts: Callable[[], Iterable[Encoded]]) -> Encoded:
    """Returns encoded problems from the cache, and makes them first if the cache lacks them.

    Several processes that lack the same at once wait for the one that makes it. If the cache cannot be written,
    the problems stay in memory, as bytes.

    Args:
        name: of the problems; if it does not hold any more once they are read, nothing stays in the cache.
        parts: makes the problems, packed.
    """
    file = cache_folder() / f"{name.digest}.rows"
    if (found := _found(file)) is not None:
        return found
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f".{name.digest}.writing")
        with _claimed(aside) as out:
            # Another process may have made it meanwhile.
            if (found := _found(file)) is not None:
                return found
            out.truncate(0)
            write_stored(out, parts())
            made = _of_file(os.dup(out.fileno()))
            if name.holds():
                aside.replace(file)
                _remove_unused(file)
            return made
    except OSError:
        return in_memory(parts())


def in_memory(parts: Iterable[Encoded]) -> Encoded:
    """Returns packed parts as one, in memory; as bytes they take far less room than as problems."""
    memory = io.BytesIO()
    write_stored(memory, parts)
    data = memory.getbuffer()
    return load_stored(lambda start, count: bytes(data[start : start + count]), len(data))


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

    return load_stored(read, os.fstat(descriptor).st_size)


@contextlib.contextmanager
def _claimed(aside: Path) -> Iterator[BinaryIO]:
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
                yield out
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
