"""Text for people: the one place that prints. A terminal obeys control characters, and data may hold any."""

from __future__ import annotations

import sys
import unicodedata
from typing import TextIO

from verl_fn.errors import UserError

# Characters that reverse the order of others: a line could show something else than it says.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


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
    shown = "".join(_escaped(c) if _is_obeyed(c) else c for c in content)
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


def _is_obeyed(character: str) -> bool:
    return character in _REORDERING or (unicodedata.category(character) == "Cc" and character not in "\n\t")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
