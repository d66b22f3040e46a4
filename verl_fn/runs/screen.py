"""Text for people: the one place that prints. A terminal obeys control characters, and data may hold any."""

from __future__ import annotations

import re
import sys
from typing import TextIO

from verl_fn.errors import UserError

# Control characters but line breaks and tabs, and characters that reverse the order of others: a line could show
# something else than it says.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


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
    shown = _OBEYED.sub(_escaped, content)
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


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
