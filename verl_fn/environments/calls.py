"""Tool calls in replies of a model, in the formats that chat templates write.

Hermes' format, also of Qwen2.5 and Qwen3, is JSON between tags and is read here. The package renderers, a part of the
installation of verifiers, reads the others. It reads tokens; here tags and characters take their place, so that an
interpreter of environments needs no tokenizer.

Source: https://github.com/PrimeIntellect-ai/renderers, ``renderers.parsing``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
        tags: the text of each of its arguments that end in ``_id``.
        begins: the text with which calls begin; empty if a reply is a call as a whole.
        typed: whether it gets the schemas of the tools, since arguments are written without quotes.
        header: what the prompt has written of the reply.
        closes: the end token that is no part of the reply.
    """

    function: str
    tags: Mapping[str, str]
    begins: str
    typed: bool = False
    header: str = ""
    closes: str = ""


def _deepseek(name: str) -> str:
    """Returns a token of DeepSeek; its bars and spaces are no ASCII characters."""
    return f"<\N{FULLWIDTH VERTICAL LINE}{name}\N{FULLWIDTH VERTICAL LINE}>".replace(
        "_", "\N{LOWER ONE EIGHTH BLOCK}"
    )


_TAGS = {"tool_call": "<tool_call>", "tool_call_end": "</tool_call>"}
_THINK = {"think": "<think>", "think_end": "</think>"}
_DEEPSEEK = ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep")
_KIMI = ("tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_end")
_ARGUMENTS = {"arg_key": "<arg_key>", "arg_key_end": "</arg_key>"}
_VALUES = {"arg_value": "<arg_value>", "arg_value_end": "</arg_value>"}
_MINIMAX = {"tool_call": "<minimax:tool_call>", "tool_call_end": "</minimax:tool_call>"}
_HARMONY = ("return", "call", "start", "end", "channel", "message", "constrain")

FORMATS = {
    "qwen3_coder": Format("parse_qwen35", {**_THINK, **_TAGS}, "<tool_call>", typed=True),
    "glm": Format("parse_glm", {**_THINK, **_TAGS, **_ARGUMENTS, **_VALUES}, "<tool_call>", typed=True),
    "minimax": Format("parse_minimax", {**_THINK, **_MINIMAX}, "<minimax:tool_call>", typed=True),
    "deepseek": Format(
        "parse_deepseek_v3",
        {name: _deepseek(name) for name in _DEEPSEEK},
        _deepseek("tool_calls_begin"),
    ),
    "kimi": Format(
        "parse_kimi_k2",
        {name: f"<|{name}|>" for name in (*_KIMI, "tool_call_argument_begin")},
        "<|tool_calls_section_begin|>",
    ),
    "llama3": Format("parse_llama_3", {}, ""),
    "harmony": Format(
        "parse_gpt_oss",
        {name: f"<|{name}|>" for name in _HARMONY},
        "",
        header="<|start|>assistant",
        closes="<|call|>",
    ),
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
    letters = _Letters(sorted({*format.tags.values(), "<think>", "</think>"}))
    arguments: dict[str, Any] = {f"{name}_id": letters.numbers[tag] for name, tag in format.tags.items()}
    if format.function != "parse_gpt_oss":
        arguments["stop_ids"] = set()
        # The prompt may have opened the reasoning that the reply closes.
        if format.function != "parse_llama_3":
            arguments["prefilled_thinking"] = "</think>" in reply and "<think>" not in reply.partition("</think>")[0]
    if format.typed:
        arguments["tools"] = [dict(tool) for tool in tools]
    parsed = getattr(parsing, format.function)(letters, letters.encode(text), **arguments)
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
