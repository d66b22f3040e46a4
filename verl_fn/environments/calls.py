"""Tool calls in replies of a model, in the formats that chat templates write.

Hermes' format, also of Qwen2.5 and Qwen3, is JSON between tags and is read here. The package renderers, a part of the
installation of verifiers, reads the others. It reads tokens; here tags and characters take their place, so that an
interpreter of environments needs no tokenizer.

Source: https://github.com/PrimeIntellect-ai/renderers, ``renderers.parsing``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

HERMES = "hermes"
NEEDED = "install 'renderers>=0.1.12,<0.2' for the interpreter that runs environments (env.python)"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BEYOND = 0x110000  # the first number that is no character


@attrs.frozen
class Format:
    """How the package renderers reads a format.

    Attributes:
        function: its name in ``renderers.parsing``.
        tag: returns the text of a tag, by the name of the function's argument for it without ``_id``.
        begins: the text with which calls begin; empty if a reply is a call as a whole.
        header: what the prompt has written of the reply.
        closes: the end token that is no part of the reply.
    """

    function: str
    tag: Callable[[str], str]
    begins: str
    header: str = ""
    closes: str = ""


def _element(name: str) -> str:
    return f"</{name.removesuffix('_end')}>" if name.endswith("_end") else f"<{name}>"


def _minimax(name: str) -> str:
    return _element(name).replace("tool_call", "minimax:tool_call")


def _barred(name: str) -> str:
    return f"<|{name}|>"


def _deepseek(name: str) -> str:
    """Returns a token of DeepSeek; its bars and spaces are no ASCII characters."""
    bar, space = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
    return f"<{bar}{name}{bar}>".replace("_", space)


FORMATS = {
    "qwen3_coder": Format("parse_qwen35", _element, "<tool_call>"),
    "glm": Format("parse_glm", _element, "<tool_call>"),
    "minimax": Format("parse_minimax", _minimax, "<minimax:tool_call>"),
    "deepseek": Format("parse_deepseek_v3", _deepseek, _deepseek("tool_calls_begin")),
    "kimi": Format("parse_kimi_k2", _barred, "<|tool_calls_section_begin|>"),
    "llama3": Format("parse_llama_3", _barred, ""),
    "harmony": Format("parse_gpt_oss", _barred, "", header="<|start|>assistant", closes="<|call|>"),
}
"""The formats beside Hermes', by name."""

_WRITTEN = (
    # What a template writes for the call of a tool ``probe`` with the argument ``key``, and the format.
    (r"<function=probe>\s*<parameter=key>", "qwen3_coder"),
    (r"<tool_call>\s*probe\s*<arg_key>", "glm"),
    (r"<minimax:tool_call>", "minimax"),
    (_deepseek("tool_calls_begin") + ".*probe", "deepseek"),
    (r"<\|tool_calls_section_begin\|>.*probe", "kimi"),
    (r"to=functions\.probe", "harmony"),
    (r'<tool_call>\s*\{"name": ?"probe"', HERMES),
    (r'>\s*\{"name": ?"probe", ?"parameters"', "llama3"),
)


def format_of(written: str) -> str | None:
    """Returns the format of a text in which a template wrote the call of a tool ``probe`` with an argument ``key``.

    Example:
        >>> format_of('<tool_call>\\n{"name": "probe", "arguments": {"key": "1"}}\\n</tool_call>')
        'hermes'
        >>> format_of("<tool_call><function=probe><parameter=key>1</parameter></function></tool_call>")
        'qwen3_coder'
    """
    return next((name for pattern, name in _WRITTEN if re.search(pattern, written, re.DOTALL)), None)


def calls_of(reply: str, format: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content of a reply and its calls, each a name with its arguments as JSON.

    A reply with a call that cannot be read is content as a whole.

    Args:
        format: ``HERMES`` or a name of ``FORMATS``.
        tools: JSON schemas of the functions that can be called.

    Raises:
        ImportError: the package renderers is needed, and not installed.

    Example:
        >>> calls_of('Let me add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', HERMES, ())
        ('Let me add.', [('add', '{"a": 1}')])
        >>> calls_of("<tool_call>add</tool_call>", HERMES, ())
        ('<tool_call>add</tool_call>', [])
    """
    calls = _hermes(reply) if format == HERMES else _by_renderers(reply, FORMATS[format], tools)
    if not calls:
        return reply, []
    begins = "<tool_call>" if format == HERMES else FORMATS[format].begins
    return reply.partition(begins)[0].strip() if begins else "", calls


def _hermes(reply: str) -> list[tuple[str, str]]:
    calls = []
    for text in _CALL.findall(reply):
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        calls.append((call["name"], _json(call.get("arguments", {}))))
    return calls


def _by_renderers(reply: str, format: Format, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    try:
        from renderers import parsing
    except ImportError as error:
        raise ImportError(f"the model's tool calls are read by the package renderers ({error}); {NEEDED}") from error
    # Llama's own tools are called behind this tag.
    text = format.header + reply.removeprefix("<|python_tag|>") + format.closes
    function = getattr(parsing, format.function)
    takes = inspect.signature(function).parameters
    tags = {name: format.tag(name.removesuffix("_id")) for name in takes if name.endswith("_id")}
    letters = _Letters(sorted({*tags.values(), "<think>", "</think>"}))
    arguments: dict[str, Any] = {
        "stop_ids": set(),
        # The prompt may have opened the reasoning that the reply closes.
        "prefilled_thinking": "</think>" in reply and "<think>" not in reply.partition("</think>")[0],
        # Of arguments that are written without quotes, the schemas say the types.
        "tools": [dict(tool) for tool in tools],
        **{name: letters.numbers[tag] for name, tag in tags.items()},
    }
    given = {name: value for name, value in arguments.items() if name in takes}
    parsed = function(letters, letters.encode(text), **given)
    if any(call.status != "ok" or not call.name for call in parsed.tool_calls):
        return []
    return [(call.name, _json(call.arguments)) for call in parsed.tool_calls]


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


class _Letters:
    """A tokenizer whose tokens are characters and tags.

    Args:
        tags: get the numbers after the characters' numbers.
    """

    unk_token_id = None

    def __init__(self, tags: Sequence[str]) -> None:
        self.numbers = {tag: _BEYOND + i for i, tag in enumerate(tags)}
        self._tags = {number: tag for tag, number in self.numbers.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, tags)) + ")")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Returns the number of a tag; None for others."""
        return self.numbers.get(token)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Returns the numbers of the tags and characters of a text."""
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self.numbers[part]] if part in self.numbers else map(ord, part)
        return ids

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        """Returns the text of numbers."""
        return "".join(self._tags.get(number) or chr(number) for number in ids)
