"""Ground truths as strings: numbers have one form, whatever their type in a file, and nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from verl_fn.data.rows import Inexact

EXACT = 2**53  # from here on, neighbouring whole numbers are the same float


def truth(value: Any) -> str:
    """Returns a ground truth as a string.

    A string stays as it is. A whole number has no decimal point, whether the file holds 72, 72.0 or
    ``Decimal("72.00")``; any other number has the digits that were written. Everything else becomes JSON, with its
    numbers in this form.

    Raises:
        ValueError: the value is of another type, or a number that would not be the one that was written.

    Example:
        >>> truth("072"), truth(72.0), truth(Decimal("0.50")), truth([3.0, {"unit": "m²"}])
        ('072', '72', '0.5', '[3, {"unit": "m²"}]')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        digits = format(value, "f")
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        # Only a string could hold all digits of some decimals.
        number = int(value) if value == int(value) else float(value)
        if Decimal(repr(number)) != value:
            raise ValueError(f"has {value}, with too many digits for a number in a list; write strings")
        return number
    if isinstance(value, float) and abs(value) < float("inf") and not isinstance(value, Inexact):
        return int(value) if value.is_integer() and abs(value) < EXACT else value
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float | Decimal):
        raise ValueError(f"has {value}; it is not finite or was written with more digits; write a string")
    raise ValueError(f"has the type {type(value).__name__} ({value!r:.80}); write a string")
