"""Conversations as a model sees and writes them, by its chat template, and as rows of tokens with a mask."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.processor import MARK, parts_of, processor_of
from verl_fn.backends.hf.tokenizer import chat_texts, end_tokens
from verl_fn.data.columns import learned_turns
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem

Message: TypeAlias = Mapping[str, Any]
Example: TypeAlias = tuple[list[int], list[float]]
"""The tokens of a row, and its ``response_mask``."""

Render: TypeAlias = Callable[[Sequence[tuple[Sequence[Message], bool]]], list[str]]
Same: TypeAlias = Callable[[Sequence[Message]], bool]

Parts: TypeAlias = list[tuple[str, bool]]
"""The text of a row in parts, and whether each is learned."""

REASONING = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts")
"""Fields of an assistant's message that hold what it thought before its content."""

ELSEWHERE = {"function_call": "tool_calls", "tools": "the column tools", "functions": "the column tools"}
"""Fields of messages that few templates read, and where the others look for what they hold."""

PLAIN_CALLS = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]

_json = json.JSONEncoder(ensure_ascii=False, default=str).encode
_CLOSED = re.compile(r"<(\w+)>\s*</\1>\s*$")
_OPENED = re.compile(r"<(\w+)>(\s*)$")


def all_ends(tokenizer: Any, ends: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that end an answer; for a single one, also the ones that the tokenizer's folder names.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> all_ends(char_tokenizer("ab"), 2), all_ends(char_tokenizer("ab"), [2, 3])
        ((2,), (2, 3))
    """
    if not isinstance(ends, int):
        return tuple(ends)
    try:
        named = end_tokens(tokenizer.name_or_path, tokenizer) if tokenizer.name_or_path else ()
    except ModelError:
        named = ()
    return (ends, *(token for token in named if token != ends))


def prompt_text(tokenizer: Any, problem: Problem) -> str:
    """Returns the text of a prompt of chat messages, up to the start of the assistant's answer.

    Raises:
        DataError: the template leaves out a message, a tool call or the tools.
        ModelError: the template fails.
    """
    assert not isinstance(problem.prompt, str)
    messages: Sequence[Message] = problem.prompt
    if tokenizer.eos_token_id is not None and any(one["role"] == "assistant" for one in messages):
        ends = tokenizer.batch_decode([[token] for token in all_ends(tokenizer, tokenizer.eos_token_id)])
        messages = [_without_end(i, message, ends) for i, message in enumerate(messages)]
    render = _renderer(tokenizer, problem, "string prompts, or ")
    text = render([(messages, True)])[0]
    _check_seen(messages, text, render, tokenizer, problem)
    return text


def turn_parts(
    tokenizer: Any, problem: Problem, messages: Sequence[Message], ends: Sequence[int], start: int = 0
) -> list[Parts]:
    """Returns the texts of the rows from which the turns of a conversation are learned.

    Each turn follows the text that the model would get for it: what the template makes of the messages before it, up
    to the start of an answer. What is learned is the rest of what the template makes of the turn, up to the first
    token that ends an answer. A row holds as many turns as possible; the next one begins where the template renders
    earlier messages otherwise once more follow, as templates do that drop earlier reasoning.

    Where the prompt of an answer opens a tag such as ``<think>``, which the template does not write in a turn, the
    answer begins with the reasoning that closes it: the message's, or none.

    Args:
        start: turns before this message are not learned from.

    Raises:
        DataError: the template begins a turn otherwise than for sampling, ends it without such a token, or leaves out
            something.
        ModelError: the template fails.
    """
    written = [tokenizer.decode([token]) for token in ends]
    messages = [_without_end(i, message, written) for i, message in enumerate(messages)]
    render, turns = _renderer(tokenizer, problem), learned_turns(messages, start)
    texts = render([(messages[: i + said], not said) for i in turns for said in (0, 1)])
    rows: list[Parts] = []
    for i, before, after in zip(turns, texts[::2], texts[1::2], strict=True):
        said = _ended(_said(messages[i], before, after, i), written, i)
        _check_seen(messages[:i], before, render, tokenizer, problem)
        _check_said(messages, i, said, after, render)
        seen = "".join(text for text, _ in rows[-1]) if rows else None
        if seen is not None and before.startswith(seen):
            rows[-1] += [(before[len(seen) :], False), (said, True)]
        else:
            rows.append([(before, False), (said, True)])
    return rows


def encode_parts(rows: Sequence[Parts], tokenizer: Any) -> list[Example]:
    """Returns the tokens and masks of rows.

    A part's tokens follow the tokens of earlier parts, as they follow a prompt when they are sampled: where a token
    would reach from one part into the next, both are encoded by themselves.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> encode_parts([[("ab", False), ("c<eos>", True)]], char_tokenizer("abc"))
        [([4, 5, 6, 2], [0.0, 0.0, 1.0, 1.0])]
    """
    whole = [["".join(text for text, _ in parts[: i + 1]) for i in range(len(parts))] for parts in rows]
    encoded = iter(token_ids([text for texts in whole for text in texts], tokenizer))
    examples: list[Example] = []
    for parts in rows:
        ids, mask = list[int](), list[float]()
        for text, learned in parts:
            tokens = next(encoded)
            new = tokens[len(ids) :] if tokens[: len(ids)] == ids else following([text], tokenizer)[0]
            ids, mask = ids + new, mask + [float(learned)] * len(new)
        examples.append((ids, mask))
    return examples


def token_ids(strings: list[str], tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of each string; one call for all takes half the time of a call for each.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> token_ids(["ab", "c"], char_tokenizer("abc"))
        [[4, 5], [6]]
    """
    return [encoded if isinstance(encoded, list) else encoded.ids for encoded in _encoded(strings, tokenizer)]


def following(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of texts that follow others, without the space that some tokenizers begin a text with.

    SentencePiece's do, so there the text is encoded behind a line break.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> following(["ab", "c"], char_tokenizer("abc"))
        [[4, 5], [6]]
    """
    start, digit, both, *alone = token_ids(["\n", "0", "\n0", *texts], tokenizer)
    if both == start + digit or both[: len(start)] != start or tokenizer.unk_token_id in both:
        return alone
    behind = token_ids([f"\n{text}" for text in texts], tokenizer)
    return [ids[len(start) :] if ids[: len(start)] == start else own for ids, own in zip(behind, alone, strict=True)]


def token_counts(strings: list[str], tokenizer: Any) -> list[int]:
    """Returns the number of tokens of each string, in less time than ``token_ids`` takes."""
    return list(map(len, _encoded(strings, tokenizer)))


def _encoded(strings: list[str], tokenizer: Any) -> list[Any]:
    """Returns for each string its token ids, or an ``Encoding`` of the package tokenizers."""
    if not strings:
        return []
    # This call also sets what the tokenizer's options change in its Rust part.
    first = tokenizer(strings[:1], add_special_tokens=False)["input_ids"]
    calls = (getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus"))
    if [getattr(call, "__module__", "") for call in calls] != PLAIN_CALLS:  # the class has its own
        return first + (tokenizer(strings[1:], add_special_tokens=False)["input_ids"] if strings[1:] else [])
    # Without offsets, and without what transformers copies for each string, it takes 40 % less time.
    return first + tokenizer.backend_tokenizer.encode_batch_fast(strings[1:], add_special_tokens=False)


def _renderer(tokenizer: Any, problem: Problem, instead: str = "") -> Render:
    if tokenizer.chat_template is None:
        raise DataError(
            f"the prompt is a list of chat messages, and the tokenizer has no chat template; use {instead}a "
            "tokenizer folder with chat_template.jinja (`verl-fn new-model ... --chat-template` writes one)"
        )
    if problem.images:
        processor_of(tokenizer)  # templates of models of text fail on parts of messages, or drop them

    def render(conversations: Sequence[tuple[Sequence[Message], bool]]) -> list[str]:
        if problem.images:
            conversations = [([in_parts(m) for m in messages], begun) for messages, begun in conversations]
        return chat_texts(tokenizer, conversations, problem.tools, problem.chat_template_kwargs)

    return render


def in_parts(message: Message) -> Message:
    """Returns a message whose content has a part for each image that is marked in it."""
    content = message.get("content")
    return {**message, "content": parts_of(content)} if content and MARK in content else message


def _without_end(number: int, message: Message, ends: Sequence[str]) -> Message:
    """Returns an assistant's message without the end token after its content, since the template writes it."""
    if message["role"] != "assistant":
        return message
    content = message.get("content") or ""
    others = {name: _json(message.get(name)) for name in (*REASONING, "tool_calls")}
    for end in ends:
        text, _, rest = content.partition(end)
        places = ["content"] if functools.reduce(lambda left, one: left.replace(one, ""), ends, rest).strip() else []
        if places := places + [name for name, written in others.items() if end in written]:
            raise DataError(
                f"message {number} has {end!r}, the token that ends an answer, inside its {places[0]}, so the rest "
                "would never be said; remove it"
            )
        content = text
    return {**message, "content": content} if content else message


def _said(message: Message, before: str, after: str, number: int) -> str:
    """Returns what the model writes after the prompt ``before``, of the template's text of the turn ``after``."""
    if after.startswith(before):
        return after[len(before) :]
    opened = opens_reasoning(before, after)
    if opened is None or not after.startswith(before[: opened.start()]):
        if closed := _CLOSED.search(before):
            raise DataError(
                f"message {number} has reasoning, and the prompt of its answer ends with none "
                f"({closed[0].strip()!r}), as enable_thinking = false has it; set that argument "
                "otherwise for the row (chat_template_kwargs), or remove the reasoning"
            )
        raise DataError(
            f"the chat template begins message {number} otherwise than the prompt of an answer "
            "(add_generation_prompt); use a template in which the rendered turn continues that prompt"
        )
    tag, line = opened[1], "\n" if opened[2] else ""
    content, close = message.get("content") or "", f"</{tag}>"
    within = content.rpartition(close)[0].rpartition(f"<{tag}>")[2]
    thought = next((message[name] for name in REASONING if message.get(name)), within)
    answer = after[opened.start() :]
    return f"{thought.strip()}{line}{close}{line}{line}{answer.rpartition(close)[2].lstrip(line)}"


def opens_reasoning(before: str, after: str) -> re.Match[str] | None:
    """Returns the tag that the prompt of an answer opens and the template's text of the turn lacks, or None."""
    return None if after.startswith(before) else _OPENED.search(before)


def _ended(text: str, ends: Sequence[str], number: int) -> str:
    """Returns the text up to the first end token, with it."""
    places = [text.find(end) + len(end) for end in ends if end in text]
    if not places:
        raise DataError(
            f"the chat template does not end message {number} with {' or '.join(map(repr, ends))}, so the model "
            "would never learn to stop; write that token after the assistant's content in the template, or "
            "name the token that it writes as eos_token_id in generation_config.json"
        )
    return text[: min(places)]


def _check_seen(messages: Sequence[Message], text: str, render: Render, tokenizer: Any, problem: Problem) -> None:
    """Raises DataError unless a prompt shows its tools and what ``check_shown`` looks at."""
    said, tools = _json(messages), problem.tools
    for place, tool in enumerate(tools):
        # A tool's name may also be a word of the conversation.
        if times_named(tool, text) > times_named(tool, said):
            continue
        others = (*tools[:place], *tools[place + 1 :])
        without = chat_texts(tokenizer, [(messages, True)], others, problem.chat_template_kwargs)[0]
        if without == text:
            raise DataError(
                f"the chat template does not show the tools of the row to the model, such as {name_of(tool)!r}; take "
                "a template that renders `tools`, or remove the column tools"
            )
    check_shown(messages, text, render)


def check_shown(messages: Sequence[Message], text: str, render: Render, start: int = 0) -> None:
    """Checks that a prompt shows tool calls, and messages other than the assistant's.

    Args:
        text: what the template makes of it, up to the start of the assistant's answer.
        render: returns the text of each conversation, with whether the assistant's answer is begun.
        start: messages before this one are not looked at.

    Raises:
        DataError: it does not: with something else in its place, the text is the same.
    """
    said, same = _json(messages), _same(text, render, True)
    for i, message in enumerate(messages[start:], start):
        content = message.get("content")
        if content and message["role"] != "assistant" and not _has(text, content, said):
            _check_changes(messages, i, {"content": content + "x"}, "content", same)
        _check_calls(messages, i, text, said, same)
        _check_elsewhere(messages, i, same)


def _same(text: str, render: Render, prompt: bool) -> Same:
    """Returns a function that tells whether other messages make the same text."""

    def same(messages: Sequence[Message]) -> bool:
        try:
            return render([(messages, prompt)])[0] == text
        except ModelError:
            # The template looks at what has changed.
            return False

    return same


def _check_said(messages: Sequence[Message], number: int, said: str, after: str, render: Render) -> None:
    """Raises DataError unless a turn to learn says all that its message has: content, reasoning and tool calls."""
    message, until, same = messages[number], messages[: number + 1], _same(after, render, False)
    content = message.get("content") or ""
    if not _has(said, content):
        parts = re.split(r"(</?\w+>)", content)
        for place, part in enumerate(parts):
            if part.strip() and not re.fullmatch(r"</?\w+>", part) and not _has(said, part):
                changed = "".join([*parts[: place + 1], "x", *parts[place + 1 :]])
                _check_changes(until, number, {"content": changed}, "content", same)
    for name in REASONING:
        value = message.get(name)
        if isinstance(value, str) and value.strip() and not _has(said, value):
            _check_changes(until, number, {name: value + "x"}, name, same)
    _check_calls(until, number, said, _json(message), same)
    _check_elsewhere(until, number, same)


def _check_elsewhere(messages: Sequence[Message], number: int, same: Same) -> None:
    for name in ELSEWHERE.keys() & messages[number].keys():
        if messages[number][name]:
            _check_changes(messages, number, {name: "x"}, name, same)


def _check_calls(messages: Sequence[Message], number: int, seen: str, said: str, same: Same) -> None:
    calls = list(messages[number].get("tool_calls") or ())
    for place, call in enumerate(calls):
        if _shows(seen, call, said):
            continue
        # Some templates show only the first call, or only arguments that are an object.
        none = {"type": "function", "function": {"name": "x", "arguments": {}}}
        for other, name in ((none, "tool_calls"), (_otherwise(call), "the arguments of tool_calls")):
            if other != call:
                fields = {"tool_calls": [*calls[:place], other, *calls[place + 1 :]]}
                _check_changes(messages, number, fields, name, same)
    for call in calls:
        written = call.get("function", call).get("arguments")
        if isinstance(written, str) and _json(written) in seen:
            raise DataError(
                f"the chat template writes the arguments of a call in message {number} as a string in quotes, "
                f"{_json(written)!r:.60}, and not as it writes calls; make them an object with json.loads (in data, "
                "a function of data.convert can)"
            )


def _check_changes(messages: Sequence[Message], number: int, fields: Message, name: str, same: Same) -> None:
    """Raises DataError if a field has no effect on the text."""
    if same([*messages[:number], {**messages[number], **fields}, *messages[number + 1 :]]):
        hint = " (templates have other names for reasoning, or none)" if name in REASONING else ""
        hint = " (many show only an object, not a string of JSON)" if "arguments" in name else hint
        hint = f" (it belongs into {ELSEWHERE[name]})" if name in ELSEWHERE else hint
        raise DataError(
            f"the chat template leaves out {name} of message {number}, of the role {messages[number]['role']}, or a "
            f"part of it{hint}; take another template, or change the message"
        )


def _has(text: str, part: str, said: str = "") -> bool:
    """Returns whether a text has a part; templates may strip the part or write it as JSON.

    Args:
        said: JSON of messages; the text must have the part as often as they have it.
    """
    part = part.strip()
    written = _json(part)[1:-1]
    often = max(1, said.count(written)) if part else 0
    return (
        text.count(part) >= often
        or text.count(written) >= often
        or "".join(text.split()).count("".join(part.split())) >= often
    )


def _shows(text: str, call: Message, said: str) -> bool:
    """Returns whether a text has the name and the arguments of a call."""
    inner = call.get("function", call)
    arguments = inner.get("arguments") if isinstance(inner, Mapping) else None
    values = list(arguments.values()) if isinstance(arguments, Mapping) else [arguments or ""]
    return _has(text, name_of(call), said) and all(
        _has(text, value if isinstance(value, str) else _json(value), said) for value in values
    )


def _otherwise(call: Message) -> Message:
    """Returns a tool call with other arguments of the same kind.

    Example:
        >>> _otherwise({"function": {"name": "add", "arguments": {"a": 1}}})
        {'function': {'name': 'add', 'arguments': {'other': 'value'}}}
    """
    inner = call.get("function", call)
    if not isinstance(inner, Mapping) or not inner.get("arguments"):
        return call
    text = isinstance(inner["arguments"], str)
    changed = {**inner, "arguments": '{"other": "value"}' if text else {"other": "value"}}
    return {**call, "function": changed} if "function" in call else changed


def times_named(tool: Message, text: str) -> int:
    """Returns how often a text has the name of a tool, other than as a part of another tool's."""
    return len(re.findall(rf"(?<![\w.-]){re.escape(name_of(tool))}(?![\w-])", text))


def name_of(function: Message) -> str:
    """Returns the name of a tool or of the function that a call names."""
    inner = function.get("function", function)
    return str(inner.get("name")) if isinstance(inner, Mapping) else ""
