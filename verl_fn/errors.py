"""What a user reads: errors that a user can cause and fix, what their messages name, and lines on the screen."""

import ast
import contextlib
import difflib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

# Names that other trainers use, and the name here that each of them means.
MEANT = {
    "gpu": "cuda", "constant_with_warmup": "constant", "sigmoid": "dpo", "robust": "cdpo", "kto_pair": "kto",
    **dict.fromkeys(("vanilla", "grpo", "dr_grpo"), "ppo_clip"), "gmpo": "geo_mean",
    "seq-mean": "seq-mean-token-mean", "gkd": "distill", "rm": "reward_model", "raft": "rejection",
}  # fmt: skip
# Control characters but line breaks and tabs, and characters that reverse the order of others: a line could show
# something else than it says.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class UserError(Exception):
    """An error whose message says what to do: the command line shows it as one line, without a traceback.

    >>> class DiskError(UserError, OSError):
    ...     pass
    >>> isinstance(DiskError("no room"), UserError)
    True
    """


class UsageError(UserError, ValueError):
    """An argument or a setting that cannot be used; the command line ends with status 2, as for unknown options."""


class ArgumentError(UserError, TypeError):
    """A function was called with a value of another kind than it takes."""


def cause_of(error: Exception) -> Exception:
    """Returns what a worker raised, without Ray's error around it, whose message begins with a traceback."""
    of_ray = type(error).__name__.startswith("RayTaskError")
    cause = getattr(error, "cause", None)
    return cause if of_ray and isinstance(cause, Exception) else error


def in_one_line(error: Exception) -> str:
    """Returns what an error says in one line, behind its class unless it is written for users.

    Example:
        >>> in_one_line(KeyError("x")), in_one_line(ValueError("a\\nb")), in_one_line(UserError("no room\\nhere"))
        ("KeyError: 'x'", 'ValueError: a', 'no room')
        >>> in_one_line(UserError()), in_one_line(RuntimeError("\\nbehind an empty line"))
        ('UserError', 'RuntimeError: behind an empty line')
    """
    cause = cause_of(error)
    first = next(filter(None, map(str.strip, str(cause).splitlines())), "")
    name = "" if isinstance(cause, UserError) and first else type(cause).__name__
    return ": ".join(filter(None, (name, first)))


@contextlib.contextmanager
def raised_as(becomes: type[UserError], about: str, *caught: type[Exception]) -> Iterator[None]:
    """Turns some errors inside into one for the user that begins with what it is about.

    Example:
        >>> with raised_as(UsageError, "a.json cannot be read", OSError):
        ...     raise OSError("no such file")
        Traceback (most recent call last):
        verl_fn.errors.UsageError: a.json cannot be read: no such file
    """
    try:
        yield
    except caught as error:
        raise becomes(f"{about}: {error}") from error


def install(*requirements: str) -> str:
    """Returns the command that installs packages beside this one; ``make setup`` makes an environment without pip.

    Example:
        >>> install("wandb").endswith(" wandb")
        True
    """
    uv = Path(sys.prefix).parent / ".uv" / "bin" / "uv"
    return " ".join([str(uv if uv.is_file() else "uv"), "pip install --python", sys.executable, *requirements])


def installed_version(distribution: str) -> str:
    """Returns the version of an installed distribution; empty if there is none.

    Example:
        >>> installed_version("no-such-distribution")
        ''
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def closest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the known name that is most similar to ``name``; an empty string if none is as similar as ``cutoff``.

    A name of another trainer in ``MEANT`` stands for the one that it means.

    Example:
        >>> closest("bf16", ["float32", "bfloat16"]), closest("x", ["cpu"]), closest("vanilla", ["ppo_clip"])
        ('bfloat16', '', 'ppo_clip')
    """
    names = sorted(known)
    if (meant := MEANT.get(str(name), "")) in names:
        return meant
    return next(iter(difflib.get_close_matches(str(name), names, 1, cutoff)), "")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the known name that was probably meant, or nothing.

    Example:
        >>> did_you_mean("bf16", ["float32", "bfloat16"]), did_you_mean("x", ["cpu"])
        ('; did you mean bfloat16?', '')
    """
    match = closest(name, known)
    return f"; did you mean {match}?" if match else ""


def instead_of(name: str, module: ModuleType) -> str:
    """Returns the end of a message about a name that a module lacks: the name that was meant, or all of its own.

    Example:
        >>> import random
        >>> instead_of("Randon", random), instead_of("x", ModuleType("empty"))
        ('; did you mean Random?', '')
    """
    made = _made_in(module)
    public = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) == module.__name__ or (name in made and callable(value)))
    ]
    return did_you_mean(name, public) or (f"; it has {', '.join(public)}" if public else "")


def _made_in(module: ModuleType) -> set[str]:
    """Returns the names that a module's source defines or assigns, and does not import; none without a source."""
    try:
        body = ast.parse(inspect.getsource(module)).body
    except (OSError, TypeError, ValueError, SyntaxError):  # no source, or one that was edited since
        return set()
    assigned = [target for one in body if isinstance(one, ast.Assign) for target in one.targets]
    assigned += [one.target for one in body if isinstance(one, ast.AnnAssign)]
    defined = {one.name for one in body if isinstance(one, ast.FunctionDef)}
    return defined | {target.id for target in assigned if isinstance(target, ast.Name)}


def place_of(fn: Callable[..., object]) -> str:
    """Returns the name of a function with its file and line.

    Example:
        >>> place_of(place_of)
        'place_of (...errors.py:...)'
    """
    fn = inspect.unwrap(getattr(fn, "func", fn))
    name, code = getattr(fn, "__name__", type(fn).__name__), getattr(fn, "__code__", None)
    return name + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def kind_of(value: object) -> str:
    """Returns the type of a value with an article, for errors.

    Example:
        >>> kind_of(3), kind_of((1.0, "a")), kind_of(None)
        ('a int', 'a tuple of float, str', 'None')
    """
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def signature_of(fn: Callable[..., object]) -> str:
    """Returns the names of a function's parameters.

    Example:
        >>> signature_of(lambda outputs, batch: None)
        '(outputs, batch)'
    """
    return f"({', '.join(inspect.signature(fn).parameters)})"


def takes(fn: Callable[..., object], arguments: Sequence[str], keywords: Iterable[str] = ()) -> bool:
    """Returns whether a function can be called with so many arguments and these keywords.

    Example:
        >>> takes(lambda outputs, batch: None, ["outputs", "batch"]), takes(len, ["outputs", "batch"])
        (True, False)
    """
    try:
        inspect.signature(fn).bind(*arguments, **dict.fromkeys(keywords))
    except TypeError:
        return False
    except ValueError:  # a function that is not written in Python may have no signature
        return True
    return True


def unknown_parameter(fn: Callable[..., object], keywords: Iterable[str]) -> str:
    """Returns the end of a message about a call with keywords: the parameter that an unknown one probably means.

    Example:
        >>> unknown_parameter(lambda batch, power=2: batch, ["powr"]), unknown_parameter(lambda batch: batch, ["x"])
        ('; did you mean power?', '')
    """
    names = inspect.signature(fn).parameters
    return next(filter(None, (did_you_mean(word, names) for word in keywords if word not in names)), "")


class OutputClosed(UserError):
    """Raised where nobody reads the output any more, as after ``verl-fn ... | head``."""


def printable(content: str, encoding: str = "utf-8") -> str:
    r"""Returns a string without anything that a terminal obeys: control characters become escapes.

    Args:
        content: the string; line breaks and tabs stay.
        encoding: of the terminal; characters that it lacks become escapes too.

    Example:
        >>> printable("\x1b[31mred\n")
        '\\x1b[31mred\n'
    """
    shown = _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), content)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def say(line: object = "") -> None:
    """Prints a line.

    Raises:
        OutputClosed: nobody reads the output any more.
    """
    _write(sys.stdout, line)


def complain(line: object) -> None:
    """Prints a line on standard error."""
    _write(sys.stderr, line)


def _write(stream: TextIO, line: object) -> None:
    try:
        print(printable(str(line), stream.encoding or "utf-8"), file=stream, flush=True)
    except BrokenPipeError as error:
        raise OutputClosed("nobody reads the output any more") from error
