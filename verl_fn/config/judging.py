"""The checks of the options of a judge that is asked by its address."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

PROMPT = """\
Grade an answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer to grade:
{response}

End with a line "Score: N", where N is a number from 0 (wrong) to 1 (right)."""
PATTERN = r"(?i)score\W*?(-?\d+(?:\.\d+)?)"


def is_address(instance: Any, attribute: Any, value: str) -> None:
    """Validates the address of an API: http or https, and no password, since a run's folder keeps its config."""
    if not value:
        return
    try:
        parts = urlsplit(value)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"must be an address such as http://localhost:8000/v1 (got {value!r})")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must have no user, password or query; reward.api_key_env names the variable with the key")


def has_response(instance: Any, attribute: Any, value: str) -> None:
    """Validates a judge's prompt: without the response, all responses would get one score."""
    if "{response}" not in value:
        raise ValueError("must contain {response}, in whose place the response is written")


def has_a_group(instance: Any, attribute: Any, value: str) -> None:
    """Validates a regular expression: its first group is what is read."""
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if groups < 1:
        raise ValueError(r"must have a group around the number, as in Score: (\d+)")
