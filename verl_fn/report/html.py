"""HTML elements of the report page; every string is escaped here."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape

from verl_fn.report import plots
from verl_fn.runs.screen import printable

MISSING = "–"  # noqa: RUF001  (an en dash, as typography has it for an empty cell)


def escaped(value: str) -> str:
    """Escapes a string so that it may stand in an element or in an attribute.

    Example:
        >>> escaped("a < b")
        'a &lt; b'
    """
    return escape(printable(str(value)))


def block(content: str) -> str:
    """Returns a box with a prompt or a response."""
    return f'<div class="text">{escaped(content)}</div>' if content else '<div class="soft">(empty)</div>'


def number_cell(value: str, note: str = "") -> str:
    """Returns a table cell with a number and a small note below it."""
    return f'<td class="number">{value}{f"<small>{note}</small>" if note else ""}</td>'


def table(head: Iterable[str], rows: Iterable[str], kind: str, label: str) -> str:
    """Returns a table in a box that scrolls on its own.

    Args:
        head: the names of the columns.
        rows: the cells of each row, as HTML.
        kind: the table's CSS class.
        label: what the table shows, for screen readers.
    """
    columns = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}"><table class="{kind}">\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def card(title: str, metric: str, drawing: str, note: str) -> str:
    """Returns a figure with a title, the metric's name, a drawing and a caption."""
    caption = f"<figcaption>{note}</figcaption>" if note else ""
    return f'<figure class="card"><h3>{title}</h3><code>{escaped(metric)}</code>{drawing}{caption}</figure>\n'


def swatch(run: int) -> str:
    """Returns a short line in the colour of a run's number."""
    return f'<span class="swatch {plots.line_class(run)}" aria-hidden="true"></span>'


def colors() -> str:
    """Returns the CSS of the runs' colours for light and dark pages; the PNG uses the same list."""
    light, dark = ("".join(f"--run{i}:{c[k]};" for i, c in enumerate(plots.COLORS)) for k in (0, 1))
    runs = "".join(f".run{i}{{border-color:var(--run{i})}}" for i in range(len(plots.COLORS)))
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{runs}\n"


def date(timestamp: float) -> str:
    """Formats a Unix time as a date and time in UTC.

    Example:
        >>> date(0.0)
        '1970-01-01 00:00 UTC'
    """
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M UTC")
