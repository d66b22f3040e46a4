"""Shows the doctests of docstrings as code; plain Markdown would show ``>>>`` as a quotation."""

import re
import textwrap
from typing import Any

import griffe

# Lines from one that starts with >>> to the next empty one, at one indentation.
EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n[ ]*\S.*)*", re.MULTILINE)


def fenced(match: re.Match[str]) -> str:
    """Returns an example as a fenced block, with its indentation."""
    block = f"```pycon\n{textwrap.dedent(match[0])}\n```"
    return "\n" + textwrap.indent(block, match[1]) if match[1] else f"\n{block}"


class Doctests(griffe.Extension):
    """Fences the examples of every docstring when it is loaded, except examples that griffe itself recognizes."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and "Examples:\n" not in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)
