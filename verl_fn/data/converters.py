"""Functions for ``data.convert``: rows of public data sets become rows in verl's columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_fn.data.columns import SHOWN, SYSTEM, holds_media, is_media_only
from verl_fn.data.rows import parsed
from verl_fn.data.tasks import GSM8K
from verl_fn.scores import boxed

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
MATH_INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "bing", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""The roles of the speakers of ``sharegpt``."""


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Converts a row with ``question`` and ``answer``, whose last line is ``#### NUMBER``.

    Of the other columns, the ones that the model is to see stay; the rest is left out.

    Source: verl's ``examples/data_preprocess/gsm8k.py``.

    Raises:
        ValueError: the answer has no such line.

    Example:
        >>> row = gsm8k({"question": "2+3?", "answer": "2 and 3 is #### 5"})
        >>> row["reward_model"]["ground_truth"], row["prompt"][0]["content"][:24]
        ('5', "2+3? Let's think step by")
    """
    if not {"question", "answer"} <= row.keys():
        return None
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError("question and answer must be strings")
    final = re.search(r"#### (-?[0-9.,]+)", answer)
    if final is None:
        raise ValueError(f"the answer has no number after '#### ': {answer[-80:]!r}")
    return _seen(row) | math_row(
        GSM8K,
        f"{question} {GSM8K_INSTRUCTION}",
        final[1].replace(",", ""),
        {"answer": answer, "question": question},
    )


def math(row: Mapping[str, Any]) -> dict[str, Any] | None:
    r"""Converts a row with ``problem`` and ``solution``, whose last ``\boxed{}`` has the answer.

    Of the other columns, the ones that the model is to see stay; the rest becomes ``extra_info``.

    Source: verl's ``examples/data_preprocess/math_dataset.py``.

    Raises:
        ValueError: the solution has no box.

    Example:
        >>> row = math({"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1"})
        >>> row["reward_model"]["ground_truth"], row["extra_info"]["level"]
        ('\\frac{1}{2}', 'Level 1')
    """
    if not {"problem", "solution"} <= row.keys():
        return None
    problem, solution = row["problem"], row["solution"]
    if not isinstance(problem, str) or not isinstance(solution, str):
        raise ValueError("problem and solution must be strings")
    answer = boxed(solution)
    if answer is None:
        hint = "; the row has a column answer, and a function of your own can take it" if row.get("answer") else ""
        raise ValueError(rf"the solution has no \boxed{{}}: {solution[-80:]!r}{hint}")
    seen = _seen(row)
    extra = {name: value for name, value in row.items() if name != "problem" and name not in seen}
    return seen | math_row(MATH_SOURCE, f"{problem} {MATH_INSTRUCTION}", answer, extra)


def _seen(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns with tools, arguments of the template, a system message, images, videos or sounds."""
    return {
        name: value
        for name, value in row.items()
        if (holds_media(value) if is_media_only(name) else name in SHOWN or (value and name in SYSTEM))
    }


def sharegpt(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Converts a row with ``conversations``, whose turns have ``from`` and ``value``, to ``messages``.

    A column ``system`` becomes the first message, and a turn of ``function_call`` holds calls as JSON. Other columns,
    and other fields of turns, stay as they are. A row that also has a list of ``messages``, and no
    ``system``, is returned as it is.

    Raises:
        ValueError: a turn is of an unknown speaker or says two things, or a call is no object of JSON.

    Example:
        >>> turns = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
        >>> [message["role"] for message in sharegpt({"conversations": turns, "system": "Add."})["messages"]]
        ['system', 'user', 'assistant']
    """
    if row.get("conversations") is None or (_are_messages(row.get("messages")) and not row.get("system")):
        return None
    messages = [_message(turn) for turn in parsed(row["conversations"])]
    system = {"role": "system", "content": row.get("system")}
    if system["content"] and system not in messages[:1]:
        messages.insert(0, system)
    return {name: value for name, value in row.items() if name not in ("conversations", "system")} | {
        "messages": messages
    }


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(m, Mapping) and "role" in m for m in value)


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    (speaker, *_), (text, *more) = (_given(turn, names) for names in (("from", "role"), ("value", "content")))
    named = str(speaker).lower()
    role = SHAREGPT.get(named)
    if role is None:
        raise ValueError(f"a turn is of {speaker!r}, and the known speakers are {', '.join(SHAREGPT)}")
    if any(_bare(one) != _bare(text) for one in more):
        raise ValueError(f"a turn has the value {text!r:.40} and the content {more[0]!r:.40}; give one of them")
    others = {name: value for name, value in turn.items() if name not in ("from", "value", "role", "content")}
    if named != "function_call":
        return {"role": role, "content": text} | others
    calls = parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"a turn of function_call is no object of JSON: {text!r:.80}")
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]} | others


def _given(turn: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Returns the values that a turn has under some names; files of tables give it all names of its column."""
    given = [turn[name] for name in names if turn.get(name) is not None]
    return [value for value in given if _bare(value) != ""] or given[:1] or [None]


def _bare(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def math_row(source: str, question: str, answer: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns a question with a ground truth, in verl's columns."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": extra,
    }
