"""Scores of mathematical answers in LaTeX: the last box of a response, compared as a string or as mathematics."""

from __future__ import annotations

import re
from typing import Any

from verl_fn.errors import install

from .answers import Score, judged

_SPACING = re.compile(r"\\[!,;: ]|~|\s")
_SHORT = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(left|right)(?![a-z])"), ""),
    (re.compile(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\^\{?\\circ\}?|\\%|%|\\\$|\$"), ""),
    (re.compile(r"\\frac(\w)(\w)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac(\w)\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\{[^{}]*\})(\w)"), r"\1{\2}"),
    (re.compile(r"\\sqrt(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"^(-?\d+)/(\d+)$"), r"\\frac{\1}{\2}"),
    (re.compile(r"^-\\frac\{(\d+)\}"), r"\\frac{-\1}"),
    (re.compile(r"(?<![\d.])\.(?=\d)"), "0."),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"^(-?\d+)\.0*$"), r"\1"),
    (re.compile(r"\.$"), ""),
)


def boxed(response: str) -> str | None:
    r"""Returns what the last ``\boxed{}`` or ``\fbox{}`` of a response holds; None if there is none that ends.

    Example:
        >>> boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    start = max(response.rfind(r"\boxed{"), response.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = response.index("{", start) + 1
    depth = 1
    for i in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[i], 0)
        if depth == 0:
            return response[start:i]
    return None


def equal(answer: str, truth: str) -> bool:
    r"""Returns whether two answers are the same string, apart from how LaTeX can write it.

    Spaces, sizes of brackets and fractions, text, units of degrees and per cent, and separators of thousands do not
    count; a name in front, as in ``x = 5``, neither. It does no mathematics: ``0.5`` is not ``\frac12``.

    Example:
        >>> equal(r"\dfrac12", r"\frac{1}{2}"), equal("x = 1,000", "1000"), equal("0.5", r"\frac12")
        (True, True, False)
    """
    return _plain(answer) == _plain(truth)


def verified(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    r"""Scores 1 if a response's final answer is mathematically the ground truth, by Math-Verify.

    The last box counts, or else the last expression that is found. The ground truth may be only the answer, or text
    with a box. It needs the extra ``verl_fn[math]``.

    Source: https://github.com/huggingface/Math-Verify.

    Raises:
        ImportError: Math-Verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("verl_fn.scores:verified needs Math-Verify: " + install("'verl_fn[math]'")) from error
    truth = boxed(ground_truth) or ground_truth
    answers = parse(solution_str)
    # Both forms are tried: a bare number is no LaTeX, and LaTeX outside of dollars is not found.
    truths = parse(f"${truth}$") or parse(truth)
    pred = str(answers[-1]) if answers else ""
    return judged(bool(answers and truths and verify(truths, answers)), pred)


def _plain(answer: str) -> str:
    plain = _SPACING.sub("", answer)
    if (name := re.match(r"[A-Za-z]=", plain)) is not None:
        plain = plain[name.end() :]
    for pattern, replacement in _SHORT:
        plain = pattern.sub(replacement, plain)
    return plain
