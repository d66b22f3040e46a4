"""Declaration of config keys: a default, a line of documentation, checks, and when a key has an effect."""

from __future__ import annotations

import datetime
import json
import operator
import os
import re
from collections.abc import Callable
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import attrs
from attrs.validators import deep_iterable

from verl_fn.errors import UsageError, closest, did_you_mean

MOST = 1e6  # upper limit of factors and ranges, far beyond any useful value; much larger ones would overflow


class ConfigError(UsageError):
    """Raised for a configuration that cannot be used; the message names the key."""


class RangeError(ValueError):
    """Raised for a value out of range; the arguments are the field's name and a message."""


@attrs.frozen
class Condition:
    """Says when a key has an effect.

    Attributes:
        unmet: from the table with the key, the table's dotted name with a dot, and the whole config to the reason why
            the key has no effect there; an empty string if it has one.
        label: the condition in front of the key's documentation, or an empty string.
    """

    unmet: Callable[[Any, str, Any], str]
    label: str = ""


def given(key: str, *values: object, label: str | None = None) -> Condition:
    """Returns the condition that another key has one of ``values``; without ``values``, that it is set.

    Args:
        key: a key of the same table, or the dotted key of another one.
        values: what it may be.
        label: in front of the documentation; by default the values, if there are at most three.

    Example:
        >>> given("use_kl_loss").unmet(type("Table", (), {"use_kl_loss": False}), "algorithm.", None)
        'without algorithm.use_kl_loss'
    """

    def unmet(table: Any, prefix: str, cfg: Any) -> str:
        name, value = _key_and_value(key, table, prefix, cfg)
        if value in values if values else value:
            return ""
        if len(values) > 1:
            return _with(name, value)
        return f"without {name}" + "".join(f" = {json.dumps(wanted)}" for wanted in values)

    return Condition(unmet, (", ".join(map(str, values)) if len(values) < 4 else "") if label is None else label)


def unless(key: str, *values: object) -> Condition:
    """Returns the condition that another key has none of ``values``; without ``values``, that it is not set.

    Example:
        >>> unless("type", "fixed").unmet(type("Table", (), {"type": "fixed"}), "kl_ctrl.", None)
        'with kl_ctrl.type = "fixed"'
    """

    def unmet(table: Any, prefix: str, cfg: Any) -> str:
        name, value = _key_and_value(key, table, prefix, cfg)
        if values:
            return _with(name, value) if value in values else ""
        return f"with {name}" if value else ""

    return Condition(unmet)


def provided(test: Callable[[Any, Any], object], otherwise: str) -> Condition:
    """Returns the condition that a function of the key's table and of the whole config is true.

    Args:
        otherwise: why the key has no effect if the function is false; may have values such as ``{cfg.data.task}``.

    Example:
        >>> provided(lambda table, cfg: table > cfg, "above {cfg}").unmet(1, "", 3)
        'above 3'
    """
    return Condition(lambda table, prefix, cfg: "" if test(table, cfg) else otherwise.format(cfg=cfg))


def _key_and_value(key: str, table: Any, prefix: str, cfg: Any) -> tuple[str, Any]:
    if "." in key:
        return key, operator.attrgetter(key)(cfg)
    return prefix + key, getattr(table, key)


def _with(name: str, value: object) -> str:
    return f"without {name}" if value is None else f"with {name} = {json.dumps(value)}"


When: TypeAlias = Condition | tuple[Condition, ...]
"""Conditions that must all hold for a key to have an effect."""


def about(doc: str, when: When = ()) -> dict[str, Any]:
    """Returns the metadata of a field: its documentation, and when it has an effect."""
    conditions = when if isinstance(when, tuple) else (when,)
    labels = ", ".join(condition.label for condition in conditions if condition.label)
    return {"doc": f"{labels}: {doc}" if labels else doc, "when": conditions}


def opt(default: Any, doc: str, *checks: Callable[..., Any], when: When = (), place: str = "") -> Any:
    """Declares a field with a default, a line of documentation, and checks of its range.

    Args:
        doc: the documentation that ``verl-fn config`` prints.
        checks: attrs validators. They are not applied to None.
        when: when the field has an effect; a value that has none is noted before a run.
        place: of a path, its kind; see ``paths``.

    Example:
        >>> @attrs.frozen(kw_only=True)
        ... class Options:
        ...     margin: float = opt(0.0, "learn from responses whose score is above the mean by this")
        >>> Options(margin=0.5), attrs.fields(Options).margin.metadata["doc"][:10]
        (Options(margin=0.5), 'learn from')
    """

    def check(instance: Any, attribute: Any, value: Any) -> None:
        for validator in checks if value is not None else ():
            try:
                validator(instance, attribute, value)
            except ValueError as error:
                raise RangeError(attribute.name, str(error.args[0])) from error

    metadata = about(doc, when) | {"place": place}
    return attrs.field(default=default, converter=home if place else None, validator=check, metadata=metadata)


def home(value: Any) -> Any:
    """Replaces a leading ``~`` by the home folder, in one path or in each of several."""
    if isinstance(value, tuple):
        return tuple(map(home, value))
    try:
        return os.path.expanduser(value) if isinstance(value, str) else value
    except ValueError:  # the name has a null byte; check_path reports it
        return value


def check_path(value: str) -> str:
    """Returns a path whose ``~`` was replaced, if a file can have it.

    Raises:
        ValueError: it has a null byte or is not Unicode, its ``~name`` is of no user, or it has a variable.

    Example:
        >>> check_path("~nobody_of_this_name/x")
        Traceback (most recent call last):
        ValueError: '~nobody_of_this_name/x' names the home of a user who does not exist; write ./~ for such a name
    """
    if "\0" in value:
        raise ValueError(f"{value!r} has a null byte; no path may have one")
    files = (value, value.partition("#")[0], value.rpartition(":")[0])  # of FILE#SPLIT and FILE:FUNCTION
    if (variable := re.search(r"\$([A-Za-z_]\w*|\{[^{}]+\})", value)) and not any(map(os.path.lexists, files)):
        raise ValueError(
            f"{value!r} has the variable {variable[0]}, and no shell or Hydra reads it here; write the folder itself"
        )
    if value.startswith("~"):
        raise ValueError(f"{value!r} names the home of a user who does not exist; write ./~ for such a name")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} is not Unicode; rename the file") from None
    return value


def paths(default: Any, doc: str, *, kind: str = "path", required: bool = False, when: When = ()) -> Any:
    """Declares a field of one or several paths.

    Args:
        kind: ``path``; ``code`` for a reference to an object in a file; or ``link`` for a path that is not resolved.
        required: whether an empty path is an error.
    """

    def check(instance: Any, attribute: Any, value: str) -> None:
        if not check_path(value) and required:
            raise ValueError("must not be empty")

    return opt(default, doc, deep_iterable(check) if isinstance(default, tuple) else check, when=when, place=kind)


def free(doc: str, when: When = ()) -> Any:
    """Declares a table of keys that are checked where they are used."""
    return attrs.field(factory=dict, metadata=about(doc, when))


def sub(cls: type, when: When = ()) -> Any:
    """Declares a nested table; ``when`` says when it has an effect."""
    return attrs.field(factory=cls, metadata=about("", when))


def all_or_some(instance: Any, attribute: Any, value: int) -> None:
    """Validates a count: -1 for all, or at least 1."""
    if value != -1 and value < 1:
        raise ValueError(f"must be -1 (keeps all) or at least 1 (got {value})")


def is_date(instance: Any, attribute: Any, value: str) -> None:
    """Validates a day as ``YYYY-MM-DD``."""
    try:
        right = datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"must be a day as YYYY-MM-DD (got {value!r})")


def one_of(*choices: str) -> Callable[[Any, Any, str], None]:
    """Returns a validator that checks that a string is one of ``choices``."""

    def check(instance: Any, attribute: Any, value: str) -> None:
        if value not in choices:
            *first, last = choices
            raise ValueError(f"must be {', '.join(first)} or {last} (got {value!r}){did_you_mean(value, choices)}")

    return check


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


# What a judge is asked by default, and where its score stands in a reply.
PROMPT = """\
Grade an answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer to grade:
{response}

End with a line "Score: N", where N is a number from 0 (wrong) to 1 (right)."""
# A range in brackets may follow the word.
PATTERN = r"(?i)score\s*(?:\([^)\n]*\))?\W*?(-?(?:\d+(?:\.\d+)?|\.\d+))"


ASKED_ABOUT = ("prompt", "response", "ground_truth")
OTHER_NAMES = {
    **dict.fromkeys(("question", "problem", "instruction", "input"), "prompt"),
    **dict.fromkeys(("completion", "output", "solution", "solution_str"), "response"),
    **dict.fromkeys(("answer", "reference", "reference_answer", "truth", "label"), "ground_truth"),
}


def has_response(instance: Any, attribute: Any, value: str) -> None:
    """Validates a judge's prompt: without the response, all responses would get one score."""
    if "{response}" not in value:
        raise ValueError("must contain {response}, in whose place the response is written")
    for name in re.findall(r"(?<![\\\w}])\{(\w+)\}", value):
        meant = OTHER_NAMES.get(name) or closest(name, ASKED_ABOUT, 0.75)
        if name not in ASKED_ABOUT and meant:
            raise ValueError(f"{{{name}}} stands for nothing; write {{{meant}}}")


def has_a_group(instance: Any, attribute: Any, value: str) -> None:
    """Validates a regular expression: its first group is what is read."""
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if groups < 1:
        raise ValueError(r"must have a group around the number, as in Score: (\d+)")
