"""Notices about problems from files: what a run can be trained on, but its user may not have meant."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.processor import MARK
from verl_fn.backends.hf.tokenizer import chat_texts, template_text
from verl_fn.config.schema import DataConfig
from verl_fn.data.columns import MARKS, WORDS, is_filled, learned_turns
from verl_fn.data.files import describe_unknown, has_unknown, label_of
from verl_fn.data.rendering import REASONING, Message, all_ends, in_parts, opens_reasoning, token_ids
from verl_fn.data.rows import parsed, strings
from verl_fn.data.tasks import Problem

# Bits of ``Traits.flags``.
JSON, EMPTY, SPECIAL, SPECIAL_ANSWER, TOOLS, IMAGES, BEGUN, GOOD, BAD, REPEATED, TEXT, TOOL_ARGUMENTS = (
    1 << bit for bit in range(12)
)

OF_TOOLS = ("tools_kwargs", "interaction_kwargs")
"""Keys of ``extra_info`` with arguments of an environment, as verl's data have them."""

ROLES = ("system", "developer", "user", "assistant", "tool")

MOST_ENCODED = 1000  # ground truths that are compared with the tokenizer's vocabulary
MOST_CHARACTERS = 2000  # of a problem's texts, in which characters are looked for that the tokenizer drops
MOST_RENDERED = 8  # problems of a group, to see which fields the template reads

_NO_SIGNS = "\ufe0f\ufffd"  # how to show the sign before it, and of tokens a part of a character
_json = json.JSONEncoder(sort_keys=True, default=repr).encode


@attrs.frozen
class Group:
    """What few problems of a file differ in.

    Attributes:
        data_source: as of the problems.
        fields: of the messages, each behind its role, such as ``user.name`` and ``assistant.tool_calls.id``; without
            role, content and marks that are followed.
        arguments: names of arguments of the chat template.
        roles: of the messages, without the usual ones.
    """

    data_source: str
    fields: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Traits:
    """Traits of problems, each a column of numpy.

    Attributes:
        prompts: 64 bits of a digest of each prompt; equal prompts have equal ones.
        flags: bits: ``JSON`` for a prompt that is JSON, ``EMPTY`` for an empty answer, ``SPECIAL`` and
            ``SPECIAL_ANSWER`` for special tokens in prompt and answer, ``TOOLS`` for tools of the row, ``IMAGES`` for
            its images, ``BEGUN`` for a prompt that ends with a turn of the assistant, ``GOOD`` and ``BAD`` for
            responses that are labelled so, ``REPEATED`` for responses that begin with the last text of the prompt,
            ``TEXT`` for a prompt that no template renders, ``TOOL_ARGUMENTS`` for keys of ``OF_TOOLS`` in extra_info.
        groups: the place in ``names`` of each problem's group.
        names: the groups.

    Example:
        >>> made = traits_of([Problem("a", "", data_source="s"), Problem("a", "b", data_source="s")], None)
        >>> made.count(EMPTY), len(np.unique(made.prompts)), made.names
        (1, 1, (Group(data_source='s', fields=(), arguments=(), roles=()),))
    """

    prompts: np.ndarray
    flags: np.ndarray
    groups: np.ndarray
    names: tuple[Group, ...]

    def __len__(self) -> int:
        return len(self.flags)

    def __getitem__(self, chosen: Any) -> Traits:
        """Returns the traits of some problems, by a slice, numbers or a mask."""
        return Traits(self.prompts[chosen], self.flags[chosen], self.groups[chosen], self.names)

    def count(self, flags: int) -> int:
        """Returns the number of problems that have one of the flags."""
        return int(np.count_nonzero(self.flags & flags))

    def rows_of(self) -> list[tuple[Group, int]]:
        """Returns each group that occurs with the number of its problems."""
        counts = np.bincount(self.groups, minlength=len(self.names)).tolist()
        return [(group, count) for group, count in zip(self.names, counts, strict=True) if count]


def joined(parts: Sequence[Traits]) -> Traits:
    """Returns the traits of several parts of the problems.

    Example:
        >>> one = traits_of([Problem("a", "b", data_source="s")], None)
        >>> joined([one, one]).rows_of()
        [(Group(data_source='s', fields=(), arguments=(), roles=()), 2)]
    """
    places: dict[Group, int] = {}
    groups = [
        np.array([places.setdefault(group, len(places)) for group in part.names], np.int32)[part.groups]
        for part in parts
    ]
    return Traits(
        np.concatenate([np.zeros(0, np.uint64), *(part.prompts for part in parts)]),
        np.concatenate([np.zeros(0, np.uint16), *(part.flags for part in parts)]),
        np.concatenate([np.zeros(0, np.int32), *groups]),
        tuple(places),
    )


def traits_of(problems: Sequence[Problem], tokenizer: Any) -> Traits:
    """Returns the traits of problems: the sequence's own ``traits``, or else new ones.

    Args:
        tokenizer: has the special tokens.
    """
    if isinstance(made := getattr(problems, "traits", None), Traits):
        return made
    special = special_pattern(tokenizer)
    places: dict[tuple[Any, ...], int] = {}
    groups = []
    for one in problems:
        fields, roles = _fields_and_roles(one)
        group = (one.data_source, tuple(sorted(fields)), tuple(one.chat_template_kwargs), tuple(sorted(roles)))
        groups.append(places.setdefault(group, len(places)))
    prompts = [hashlib.blake2b(_hashable(one), digest_size=8).digest() for one in problems]
    return Traits(
        np.frombuffer(b"".join(prompts), np.uint64),
        np.array([_flags(one, special) for one in problems], np.uint16),
        np.array(groups, np.int32),
        tuple(Group(*group) for group in places),
    )


def special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Returns a pattern of a tokenizer's special tokens; None if it has none."""
    tokens = {} if tokenizer is None else tokenizer.added_tokens_decoder
    special = sorted({str(token) for token in tokens.values() if token.special}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, special))) if special else None


def _flags(problem: Problem, special: re.Pattern[str] | None) -> int:
    flags = JSON if _is_json(problem.prompt) else 0
    # The turn of a conversation may be a tool call; an empty one is refused.
    flags |= 0 if problem.answer or getattr(problem, "messages", "") else EMPTY
    flags |= TOOLS if problem.tools else 0
    flags |= IMAGES if problem.images else 0
    flags |= BEGUN if not isinstance(problem.prompt, str) and problem.prompt[-1]["role"] == "assistant" else 0
    flags |= GOOD if getattr(problem, "chosen", ()) else 0
    flags |= BAD if getattr(problem, "rejected", ()) else 0
    flags |= REPEATED if _is_repeated(problem) else 0
    flags |= TEXT if isinstance(problem.prompt, str) else 0
    flags |= TOOL_ARGUMENTS if any(is_filled(problem.extra_info.get(name)) for name in OF_TOOLS) else 0
    if special is not None:
        flags |= SPECIAL if any(map(special.search, _texts(problem))) else 0
        flags |= SPECIAL_ANSWER if any(map(special.search, _answers(problem))) else 0
    return flags


def _is_repeated(problem: Problem) -> bool:
    """Returns whether all responses say the whole prompt, or its last message, and go on."""
    last = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1].get("content")
    said = [*getattr(problem, "chosen", ()), *getattr(problem, "rejected", ())] or [problem.answer]
    texts = [one if isinstance(one, str) else one[0].get("content") for one in said]
    text = (last or "").strip()
    # A greeting is answered by one.
    return len(text.split()) >= WORDS and all(
        len(one.strip()) > len(text) and one.strip().startswith(text) for one in map(str, texts)
    )


def _texts(problem: Problem) -> list[str]:
    """Returns the strings that the model sees of a problem; of preferences the responses too."""
    texts = [text.replace(MARK, "") if problem.images else text for text in strings(problem.prompt)]
    judged = (*getattr(problem, "chosen", ()), *getattr(problem, "rejected", ()))
    return texts + strings(problem.tools) + strings(judged)


def _answers(problem: Problem) -> list[str]:
    """Returns what is said at last: the answer, and the last turn of a conversation if another answer is judged."""
    return [problem.answer, *strings(getattr(problem, "messages", ())[-1:])]


def _is_json(prompt: Any) -> bool:
    if not isinstance(prompt, str) or not prompt.lstrip().startswith(("{", "[")):
        return False
    return isinstance(parsed(prompt), dict | list)


def _fields_and_roles(problem: Problem) -> tuple[set[str], set[str]]:
    messages = [message for messages in _conversations(problem) for message in messages]
    known = {"role", "content", *(MARKS if hasattr(problem, "messages") or hasattr(problem, "chosen") else ())}
    fields = {f"{message['role']}.{name}" for message in messages for name in message if name not in known}
    for message in messages:
        for call in message.get("tool_calls") or ():
            fields |= {f"{message['role']}.tool_calls.{name}" for name in call if name not in ("function", "type")}
    return fields, {message["role"] for message in messages}.difference(ROLES)


def _conversations(problem: Problem) -> list[list[Message]]:
    """Returns the messages of a problem, once for each of its responses."""
    if messages := getattr(problem, "messages", ()):
        return [list(messages)]
    prompt = [] if isinstance(problem.prompt, str) else list(problem.prompt)
    responses = [*getattr(problem, "chosen", ()), *getattr(problem, "rejected", ())] or [""]
    return [prompt + ([] if isinstance(response, str) else list(response)) for response in responses]


def _hashable(problem: Problem) -> bytes:
    prompt = problem.prompt
    # A string is never equal to messages, whose JSON begins with "[".
    text = ("'" + prompt if isinstance(prompt, str) else _json(prompt)).encode(errors="surrogatepass")
    return text + b"".join(hashlib.blake2b(image).digest() for image in problem.images)


def notices(
    training: Sequence[Problem],
    validation: Sequence[Problem],
    table: DataConfig,
    tokenizer: Any,
    *,
    answers: bool,
    judged_by_env: bool = False,
    sizes: Sequence[int] = (),
) -> Iterator[str]:
    """Yields a line for each unusual property of the problems.

    Args:
        answers: whether the run trains on the answers.
        judged_by_env: whether only an environment judges; then no response has to be the ground truth.
        sizes: the number of training problems of each file, if each has a weight.
    """
    trained, held_out = traits_of(training, tokenizer), traits_of(validation, tokenizer)
    # Of labelled responses each has a row, and a prompt may have several.
    single = trained.prompts[((trained.flags & GOOD) > 0) == ((trained.flags & BAD) > 0)]
    if repeated := len(single) - len(np.unique(single)):
        yield f"data.train_files: {repeated} of {len(single)} prompts repeat an earlier one"
    if known := int(np.isin(held_out.prompts, trained.prompts).sum()):
        yield f"data.val_files: {known} of {len(held_out)} held-out prompts are also in data.train_files"
    yield from _of_steps(table, len(trained), sizes)
    evaluated = {group.data_source for group, _ in held_out[: table.val_size].rows_of()}
    if left_out := sorted({group.data_source for group, _ in held_out.rows_of()} - evaluated):
        yield (
            f"data.val_size = {table.val_size} leaves out all held-out problems of {', '.join(map(repr, left_out))}; "
            "raise it, or mix the rows of data.val_files"
        )
    yield from _of_flags(trained, answers)
    for key, problems in (("data.train_files", training), ("data.val_files", validation)):
        first = range(min(len(problems), MOST_ENCODED))  # one is read at a time, with its images
        # The ground truth of a program may be many tests.
        truths = [] if answers or judged_by_env else [problems[i].answer[:MOST_CHARACTERS] for i in first]
        if lacking := _unwritable(truths, tokenizer):
            lacks = describe_unknown("ground truth", truths[lacking[0]], tokenizer)
            yield (
                f"{key}: no response can be {len(lacking)} of the first {len(truths)} ground truths; "
                f"{label_of(problems[lacking[0]])}: {lacks}"
            )
        of = answers and key == "data.train_files"
        texts = [_contents(problems[i], answers=of)[:MOST_CHARACTERS] for i in first]
        if gone := [(i, lost) for i, lost in enumerate(_lost(texts, tokenizer)) if lost]:
            yield (
                f"{key}: the tokenizer drops characters or accents of {len(gone)} of the first {len(texts)} problems,"
                f" and the model does not see them; {label_of(problems[gone[0][0]])}: "
                f"{', '.join(map(repr, gone[0][1][:5]))}"
            )
    yield from _special("data.train_files", training, trained, tokenizer, answers)
    yield from _special("data.val_files", validation, held_out, tokenizer, False)


def _of_steps(table: DataConfig, prompts: int, sizes: Sequence[int]) -> Iterator[str]:
    for file, size, weight in zip(table.train_files, sizes, table.weights, strict=False):
        drawn = table.train_batch_size * weight / sum(table.weights)
        if drawn > size:
            yield (
                f"data.weights give {file} {drawn:.0f} of the {table.train_batch_size} prompts of a step, and it has "
                f"only {size}: a step takes some of them more than once"
            )
    if not sizes and 0 < prompts < table.train_batch_size:
        yield (
            f"data.train_batch_size is {table.train_batch_size}, but data.train_files has fewer prompts "
            f"({prompts}): a step takes some of them more than once"
        )


def _of_flags(trained: Traits, answers: bool) -> Iterator[str]:
    if encoded := trained.count(JSON):
        yield f"data.train_files: {encoded} of {len(trained)} prompts are JSON, which the model sees as text"
    if begun := trained.count(BEGUN):
        yield (
            f"data.train_files: {begun} of {len(trained)} prompts end with a turn of the assistant: the model begins "
            "another one behind it, and does not continue it"
        )
    if answers and (empty := trained.count(EMPTY)):
        yield f"data.train_files: {empty} of {len(trained)} ground truths are empty: the model learns to say nothing"
    good, bad = trained.count(GOOD), trained.count(BAD)
    if (answers or good or bad) and (repeated := trained.count(REPEATED)):
        yield (
            f"data.train_files: the responses of {repeated} of {len(trained)} prompts begin with the prompt's own "
            "text, so the model learns to say it again; remove it from responses that only quote what they answer"
        )
    if bool(good) != bool(bad):
        yield (
            f"data.train_files: all responses are labelled {'good' if good else 'bad'}: a preference is learned from "
            "responses of both kinds"
        )


def _unwritable(truths: list[str], tokenizer: Any) -> list[int]:
    """Returns the numbers of the ground truths with characters that the tokenizer does not know."""
    if tokenizer is None or tokenizer.unk_token_id is None:
        return []
    return [i for i, ids in enumerate(token_ids(truths, tokenizer)) if has_unknown(ids, tokenizer)]


def _contents(problem: Problem, *, answers: bool) -> str:
    """Returns the texts of a problem that the model sees, with its answer if that is learned."""
    conversations = _conversations(problem)
    said = [*getattr(problem, "chosen", ()), *getattr(problem, "rejected", ()), problem.answer if answers else ""]
    texts = [problem.prompt, *said, *(m.get("content") for messages in conversations for m in messages)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _lost(texts: Sequence[str], tokenizer: Any) -> list[list[str]]:
    """Returns for each text the characters of which the tokenizer keeps nothing, or not all parts.

    Such a character is lost both in the text and by itself: tokenizers may know words and no letters. White space,
    control characters and upper case are not looked at.
    """
    if tokenizer is None:
        return []
    characters = sorted(set().union(*texts))
    encoded = zip(characters, token_ids(characters, tokenizer), strict=True)
    lossy = {one for one, ids in encoded if _parts(_said(ids, tokenizer)).keys() < _parts(one).keys()}
    suspect = [text for text in texts if not lossy.isdisjoint(text)]
    gone = {}
    for text, ids in zip(suspect, token_ids(suspect, tokenizer), strict=True):
        lacking = _parts(text) - _parts(_said(ids, tokenizer))
        # Unknown tokens are errors of their own.
        if not has_unknown(ids, tokenizer):
            gone[text] = [one for one in sorted(lossy & set(text)) if _parts(one).keys() & lacking.keys()]
    return [gone.get(text, []) for text in texts]


def _said(ids: Sequence[int], tokenizer: Any) -> str:
    """Returns what tokens say, without unknown ones."""
    known = [i for i in ids if i != tokenizer.unk_token_id]
    said: str = tokenizer.decode(known, clean_up_tokenization_spaces=False)
    return said


def _parts(text: str) -> Counter[str]:
    """Returns the letters, signs and marks of a text, accents by themselves, and ligatures as their letters."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return Counter(c for c in plain if not c.isspace() and unicodedata.category(c)[0] != "C" and c not in _NO_SIGNS)


class _Read(dict[str, Any]):
    """A message, or a tool call in one, that notes the fields that a template reads.

    Args:
        fields: of the message.
        place: the role, and ``.tool_calls`` for a call.
        read: gets ``place.name`` of each field that is read.
    """

    def __init__(self, fields: Message, place: str, read: set[str]) -> None:
        super().__init__(fields)
        self._place, self._read = place, read
        if calls := fields.get("tool_calls"):
            self["tool_calls"] = [_Read(call, f"{place}.tool_calls", read) for call in calls]

    def __getitem__(self, name: str) -> Any:
        self._read.add(f"{self._place}.{name}")
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        self._read.update(f"{self._place}.{name}" for name in super().__iter__())
        return super().__iter__()

    # Methods of a dict would not call these two.
    get, __contains__ = Mapping.get, Mapping.__contains__  # type: ignore[assignment]
    keys, items, values = Mapping.keys, Mapping.items, Mapping.values  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self.items()))


def _unread(problems: Sequence[Problem], traits: Traits, tokenizer: Any) -> Counter[str]:
    """Returns the fields of messages that the template does not read, with the number of problems that have each."""
    unread = Counter[str]()
    for number, group in enumerate(traits.names):
        places = np.flatnonzero(traits.groups == number)
        read = set[str]()
        for place in places[:: max(1, len(places) // MOST_RENDERED)][:MOST_RENDERED] if group.fields else ():
            problem = problems[int(place)]
            for messages in filter(None, _conversations(problem)):
                seen = [_Read(in_parts(m) if problem.images else m, m["role"], read) for m in messages]
                # Templates may show something of a turn only until others follow.
                said = [m["role"] == "assistant" for m in messages]
                texts = [(seen[: i + 1], not said[i]) for i in range(len(seen)) if said[i] or i == len(seen) - 1]
                try:
                    chat_texts(tokenizer, texts, problem.tools, problem.chat_template_kwargs)
                    read |= _thought(problem, messages, tokenizer)
                except ModelError:
                    read.update(group.fields)  # it may fail at any of them, and is an error later
        unread.update(dict.fromkeys(set(group.fields) - read, len(places)))
    return unread


def _thought(problem: Problem, messages: Sequence[Message], tokenizer: Any) -> set[str]:
    """Returns the fields whose reasoning begins an answer to learn, behind a tag that its prompt opens."""
    if not hasattr(problem, "messages") and not hasattr(problem, "chosen"):
        return set()
    turns = learned_turns(messages, 0 if hasattr(problem, "messages") else len(problem.prompt))
    fields = {i: {f"assistant.{name}" for name in REASONING if messages[i].get(name)} for i in turns}
    asked = [(messages[: i + said], not said) for i in turns for said in (0, 1)] if any(fields.values()) else []
    texts = chat_texts(tokenizer, asked, problem.tools, problem.chat_template_kwargs)
    pairs = zip(turns, texts[::2], texts[1::2], strict=False)
    return {name for i, before, after in pairs if opens_reasoning(before, after) for name in fields[i]}


def of_template(
    known: Sequence[Sequence[Problem]], table: DataConfig, tokenizer: Any, *, converses: bool = False
) -> Iterator[str]:
    """Yields a line if the chat template can print the date, and for what it does not show of arguments and messages.

    Args:
        known: problems for training, and others; their rows may have arguments of their own.
        tokenizer: the model's tokenizer, with the run's arguments.
        converses: whether an environment makes messages of all prompts.
    """
    text = template_text(tokenizer)
    if "strftime_now" in text:
        yield f"the chat template can ask for the date: it gets {table.date} in this run, on all days (data.date)"
    traits = [traits_of(problems, tokenizer) for problems in known]
    groups = joined(traits).rows_of()
    given = sorted({*table.chat_template_kwargs, *(n for group, _ in groups for n in group.arguments)})
    used = [name for name in given if re.search(rf"\b{re.escape(name)}\b", text)]
    for name in given:
        if name not in used:
            yield f"chat_template_kwargs.{name} has no effect: the chat template has no variable of that name"
    yield from _texts_for_false(known, traits, table, used)
    everywhere = bool(table.chat_template_kwargs)
    asked = sum(count for group, count in groups if everywhere or group.arguments)
    plain = joined([one[(one.flags & TEXT) != 0] for one in traits]).rows_of()
    if not converses and (lost := sum(count for group, count in plain if everywhere or group.arguments)):
        yield (
            f"chat_template_kwargs have no effect on {lost} of {asked} prompts: these are strings, and the chat "
            "template renders messages"
        )
    elif not converses:
        yield from _not_rendered(known, traits, tokenizer)
    if not text:
        return
    if unread := sum((_unread(*one, tokenizer) for one in zip(known, traits, strict=True)), Counter[str]()):
        fields = ", ".join(f"{name} ({count} rows)" for name, count in sorted(unread.items()))
        yield f"the chat template does not show these fields of messages, so the model does not see them: {fields}"
    unknown = Counter[str]()
    for group, count in groups:
        unknown.update({name: count for name in group.roles if f"'{name}'" not in text and f'"{name}"' not in text})
    if unknown and not re.search(r"\b(m|msg|message)\s*\|\s*tojson", text):
        roles = ", ".join(f"{name} ({count} rows)" for name, count in sorted(unknown.items()))
        yield (
            f"messages have roles that the chat template does not name: {roles}; it may show them as they stand, and "
            f"only what the assistant says is learned; the usual ones are {', '.join(ROLES)}"
        )


def _not_rendered(known: Sequence[Sequence[Problem]], traits: Sequence[Traits], tokenizer: Any) -> Iterator[str]:
    """Yields a line if prompts are strings without what the chat template writes behind a prompt.

    A base model may have a template too. Its answers do not end as the template ends a turn.
    """
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        return
    asked, said = {"role": "user", "content": "\ue000"}, {"role": "assistant", "content": "\ue001"}
    with contextlib.suppress(ModelError):
        prompt, whole = chat_texts(tokenizer, [([asked], True), ([asked, said], False)])
        ends = tokenizer.batch_decode([[token] for token in all_ends(tokenizer, tokenizer.eos_token_id)])
        written = (prompt.partition(asked["content"])[2].split() or [""])[0]
        places = [np.flatnonzero((one.flags & TEXT != 0) & (one.flags & SPECIAL == 0)) for one in traits]
        in_turns = whole.partition(said["content"])[2].lstrip().startswith(tuple(ends))
        first = [(made, int(i)) for made, of in zip(known, places, strict=True) for i in of[:MOST_ENCODED]]
        if written and in_turns and (plain := sum(written not in made[i].prompt for made, i in first)):
            yield (
                f"{plain} of the first {len(first)} prompts that are strings are not as the chat template writes a "
                "prompt: the model continues them as text; write messages for a model that answers in turns"
            )


def _texts_for_false(
    known: Sequence[Sequence[Problem]], traits: Sequence[Traits], table: DataConfig, used: Sequence[str]
) -> Iterator[str]:
    """Yields a line for each argument that is the text "false" in the config or in one of the first rows with it.

    Args:
        used: the arguments that the template has variables for.
    """
    given = [table.chat_template_kwargs]
    for problems, made in zip(known, traits, strict=True):
        for number, group in enumerate(made.names):
            places = np.flatnonzero(made.groups == number)[:MOST_RENDERED] if group.arguments else ()
            given += [problems[int(place)].chat_template_kwargs for place in places]
    texts = [(name, value) for one in given for name, value in one.items() if isinstance(value, str)]
    for name, value in sorted(set(texts)):
        if name in used and value.lower() == "false":
            yield f"chat_template_kwargs.{name} is the text {value!r}, and templates take it for true; write false"


def _special(key: str, problems: Sequence[Problem], traits: Traits, tokenizer: Any, answers: bool) -> Iterator[str]:
    """Yields a line if the tokenizer reads special tokens in texts as control tokens, not as text."""
    places = np.flatnonzero(traits.flags & (SPECIAL | SPECIAL_ANSWER if answers else SPECIAL))
    pattern = special_pattern(tokenizer)
    if not len(places) or pattern is None:
        return
    first = problems[int(places[0])]
    token = next(filter(None, map(pattern.search, [*_texts(first), *_answers(first)])))[0]
    yield (
        f"{key}: {len(places)} of {len(problems)} problems have special tokens in their texts, such as {token!r} "
        f"in {label_of(first)}; they become control tokens"
    )
