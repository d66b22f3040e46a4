"""Conversations with an environment as tokens, while they go on: their rows, their turns, and their groups.

The messages of an environment become tokens that follow the ones that the model drew.
"""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from itertools import groupby
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.processor import MARK, Processor, Shown, filled, images_of, processor_of
from verl_fn.backends.hf.tokenizer import chat_texts, template_text
from verl_fn.data.files import describe_unknown, has_unknown
from verl_fn.data.images import check_marks
from verl_fn.data.notices import special_pattern
from verl_fn.data.rendering import check_shown, in_parts, name_of
from verl_fn.data.rows import DataError
from verl_fn.state import EndReason, Key, Outcome, Request, RowImages, Sample

from . import Message
from .calls import HERMES, format_of
from .processes import Call, EnvError, Failure, Job, Result, Scores, Scoring

CACHE = 4096
# Fields of messages that are looked at otherwise, or that only tie a tool's answer to its call.
PLAIN_FIELDS = {"role", "content", "tool_calls", "tool_call_id"}


@attrs.frozen
class TemplateArguments:
    """What a chat template gets besides messages.

    Attributes:
        tools: JSON schemas of the functions that the model can call.
        kwargs: arguments of the template, as of ``chat_texts``.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)


NONE = TemplateArguments()


class Renderer:
    """Renders messages by the tokenizer's chat template, turn by turn.

    Args:
        tokenizer: has a chat template that ends a turn of the assistant with an end token, or begins each turn with
            one, as GLM's.
        end_tokens: of the model.

    Raises:
        EnvError: there is no template, or it cannot render a conversation turn by turn; the message says what to do.

    Example:
        >>> from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer
        >>> tokenizer = char_tokenizer("ab\\n")
        >>> tokenizer.chat_template = CHAT_TEMPLATE
        >>> renderer, asked = Renderer(tokenizer, [2]), [{"role": "user", "content": "a"}]
        >>> said = [*asked, {"role": "assistant", "content": "b"}]
        >>> renderer.opening(asked), renderer.continuation(said, asked)
        ([1, 4, 6], [4, 6])
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int]) -> None:
        self._tokenizer, self._end_tokens = tokenizer, frozenset(end_tokens)
        # Conversations of a group begin alike, and many go on alike.
        self._rendered = functools.lru_cache(CACHE)(self._render)
        self._encoded = functools.lru_cache(CACHE)(self._encode)
        self._ends = tokenizer.convert_ids_to_tokens(sorted(self._end_tokens))
        self._special = special_pattern(tokenizer)
        # Kinds of messages that the template is known to show, and fields of which it is known whether it does.
        self._shown: set[str] = set()
        self._fields: set[str] = set()
        if tokenizer.chat_template is None:
            raise EnvError(
                "env.name needs chat messages, and the tokenizer has no chat template; take a model folder with "
                "chat_template.jinja (`verl-fn new-model ... --chat-template` writes one)"
            )
        user, reply = {"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}
        # Of a template that ends no turn, the end token of a reply is the first token of the next turn.
        self._begins = not self._new_ends([user], [user, reply]) and bool(
            self._new_ends([user, reply], [user, reply, user])
        )
        whole = self._by_tokens([user, reply], [user])
        # Some tokenizers encode the start of a text differently, for example with a space before it.
        self._from_end = whole is not None and whole == self._by_text([user, reply], [user])

    def opening(self, messages: Sequence[Message], arguments: TemplateArguments = NONE) -> list[int]:
        """Returns the tokens of a conversation so far and of its tools, up to the start of the model's reply.

        Raises:
            EnvError: the template fails on these messages, or leaves out the tools.
        """
        tokens = self._tokens(messages, arguments, generation_prompt=True)
        roles = [message["role"] for message in messages]
        kind = json.dumps([roles, list(arguments.tools), dict(arguments.kwargs)])
        if arguments.tools and kind not in self._shown:
            for number, tool in enumerate(arguments.tools):
                others = (*arguments.tools[:number], *arguments.tools[number + 1 :])
                without = attrs.evolve(arguments, tools=others)
                if tokens == self._tokens(messages, without, generation_prompt=True):
                    raise EnvError(
                        f"env.name: the environment has tools, and the chat template does not show them to the "
                        f"model, such as {name_of(tool)!r}; take a template that renders `tools`, as "
                        "the one of `verl-fn new-model ... --chat-template` does"
                    )
            self._shown.add(kind)
        return tokens

    def opening_with_images(
        self, messages: Sequence[Message], arguments: TemplateArguments, images: RowImages, label: str
    ) -> tuple[list[int], RowImages]:
        """Returns the tokens as ``opening`` does, and what a row that begins with them holds of its images.

        Args:
            messages: the conversation so far, with a mark for each image.
            images: of the problem, with the text of each.

        Raises:
            EnvError: as ``opening``; the messages have more or fewer marks than there are images.
        """
        processor = processor_of(self._tokenizer)
        try:
            asked = [message for message in messages if message["role"] != "assistant"]
            check_marks(label, "the environment's messages", asked, len(images.texts))
        except DataError as error:
            raise EnvError(str(error)) from error
        messages = [_without_tokens(message, processor) for message in with_image_parts(messages)]
        # It also looks whether tools are shown.
        self.opening(messages, arguments)
        with _renderable(messages):
            text = chat_texts(self._tokenizer, [(messages, True)], arguments.tools, arguments.kwargs)[0]
            if (marks := text.count(processor.mark)) != len(images.texts):
                raise ModelError(f"the text has {marks} marks {processor.mark} for {len(images.texts)} images")
            ids = self._encoded(filled(text, iter(images.texts), processor.mark))
            features = sum(each.count(processor.feature) for each in images.texts)
            return list(ids), images_of(ids, Shown(list(images.texts), images.fields, features), processor)

    def _new_ends(self, before: Sequence[Message], after: Sequence[Message]) -> int:
        """Returns how many more end tokens a template writes for a longer conversation."""
        shorter, longer = (
            sum(token in self._end_tokens for token in self._tokens(messages, NONE)) for messages in (before, after)
        )
        return longer - shorter

    def continuation(
        self,
        said: Sequence[Message],
        messages: Sequence[Message],
        arguments: TemplateArguments = NONE,
        drawn: int | None = None,
    ) -> list[int] | None:
        """Returns the tokens between the end token of a reply and the start of the next one.

        They are the difference between two renderings, with and without ``messages``. So the tokens before them may
        be the ones that the model drew, and they can differ from what the tokenizer makes of their text. Where the
        tokenizer allows it, only the text after the reply is made into tokens.

        Args:
            said: the conversation so far; it ends with the reply.
            messages: the environment's answer to it.
            drawn: the end token that the model drew.

        Returns:
            The tokens; None where the template renders ``said`` otherwise before ``messages``, as templates do that
            drop earlier reasoning, or begins ``messages`` with another end token than the one that was drawn.

        Raises:
            EnvError: the template fails, or does not end the reply with an end token.
        """
        if "</think>" in said[-1]["content"] and self._drops_reasoning(said, arguments):
            return None
        tokens = self._by_text(said, messages, arguments) if self._from_end else None
        tokens = self._by_tokens(said, messages, arguments) if tokens is None else tokens
        if tokens is None or (self._begins and drawn not in (None, tokens[0])):
            return None
        return tokens[1:]

    def _drops_reasoning(self, said: Sequence[Message], arguments: TemplateArguments) -> bool:
        """Returns whether the template leaves the reasoning of the last reply out, as R1's always does."""
        with _renderable(said):
            before, whole = chat_texts(
                self._tokenizer, [(said[:-1], False), (said, False)], arguments.tools, arguments.kwargs
            )
        reasoning = said[-1]["content"].partition("</think>")[0].rpartition("<think>")[2]
        return reasoning.strip() not in whole.removeprefix(before)

    def _by_text(
        self, said: Sequence[Message], messages: Sequence[Message], arguments: TemplateArguments = NONE
    ) -> list[int] | None:
        """Returns the tokens of the text from the end token of the reply on; None where the text before differs."""
        with _renderable([*said, *messages]):
            whole = [*said, *messages]
            before, after = chat_texts(
                self._tokenizer, [(said, False), (whole, True)], arguments.tools, arguments.kwargs
            )
        last = len(before) if self._begins else max(before.rfind(end) for end in self._ends)
        if last < 0 or not after.startswith(before):
            return None
        tokens = self._encoded(after[last:])
        return list(tokens) if self._end_tokens.intersection(tokens[:1]) else None

    def _by_tokens(
        self, said: Sequence[Message], messages: Sequence[Message], arguments: TemplateArguments = NONE
    ) -> list[int] | None:
        """Returns the tokens from the end token of the reply on; None if the tokens before it are not the same."""
        before = self._tokens(said, arguments)
        after = self.opening([*said, *messages], arguments)
        ends = [place for place, token in enumerate(before) if token in self._end_tokens]
        if self._begins and after[: len(before)] == before:
            ends = [len(before)] if self._end_tokens.intersection(after[len(before) :][:1]) else []
        if not ends:
            token = self._tokenizer.convert_ids_to_tokens(min(self._end_tokens))
            raise EnvError(
                f"env.name: the chat template does not end a turn of the assistant with {token!r}, where sampling "
                "stops; write that token after the assistant's content in the template"
            )
        return after[ends[-1] :] if after[: len(before)] == before else None

    def check_seen(
        self, said: Sequence[Message], messages: Sequence[Message], arguments: TemplateArguments, label: str
    ) -> None:
        """Checks that the model sees all of an environment's messages, and can write the names of its tools.

        It warns once of special tokens in them, and of each field of theirs that makes no difference.

        What the template leaves out, it leaves out of all messages of that role at that place, so that a sequence of
        roles is looked at once. A character that the tokenizer does not know may be in any message.

        Args:
            said: the conversation before them.

        Raises:
            EnvError: it does not.
        """
        roles = [message["role"] + "." * bool(message.get("tool_calls")) for message in [*said[-1:], *messages]]
        kind = json.dumps([bool(said), roles, bool(arguments.tools), dict(arguments.kwargs)])
        # Of a message without content, nothing can be left out.
        if kind not in self._shown and all(m["content"] or m["role"] == "assistant" for m in messages):
            self._check_shown(said, messages, arguments, label)
            self._shown.add(kind)
        for name in () if said else map(name_of, arguments.tools):
            if has_unknown(self._encode(name), self._tokenizer):
                raise EnvError(f"{label}: {describe_unknown('name of a tool', name, self._tokenizer)}")
        self._check_fields(said, messages, arguments, label)
        for message in messages:
            content = message["content"].replace(MARK, "")
            if has_unknown(self._tokenizer(content, add_special_tokens=False)["input_ids"], self._tokenizer):
                raise EnvError(f"{label}: {describe_unknown('message of the environment', content, self._tokenizer)}")
            if self._special is not None and (found := self._special.search(content)):
                self._special = None
                warnings.warn(
                    f"{label}: the environment's message has the special token {found[0]!r}, and others may have "
                    "some; they become control tokens",
                    stacklevel=2,
                )

    def _check_shown(
        self, said: Sequence[Message], messages: Sequence[Message], arguments: TemplateArguments, label: str
    ) -> None:
        whole = [*said, *messages]

        def render(conversations: Sequence[tuple[Sequence[Message], bool]]) -> list[str]:
            shown = [(with_image_parts(messages), begun) for messages, begun in conversations]
            return chat_texts(self._tokenizer, shown, arguments.tools, arguments.kwargs)

        try:
            with _renderable(whole):
                check_shown(whole, render([(whole, True)])[0], render, start=len(said))
        except DataError as error:
            raise EnvError(f"{label}: of the environment's messages {error}") from error

    def _check_fields(
        self, said: Sequence[Message], messages: Sequence[Message], arguments: TemplateArguments, label: str
    ) -> None:
        for place, message in enumerate(messages, len(said)):
            for name in sorted(message.keys() - PLAIN_FIELDS):
                # Templates often ask whether a field is true.
                if (field := f"{message['role']}.{name}") in self._fields or not message[name]:
                    continue
                self._fields.add(field)
                whole = [*said, *messages]
                others = [*whole[:place], {key: message[key] for key in message if key != name}, *whole[place + 1 :]]
                shown = [(with_image_parts(some), True) for some in (whole, others)]
                with contextlib.suppress(ModelError):  # without it, a template that looks at it may fail
                    before, after = chat_texts(self._tokenizer, shown, arguments.tools, arguments.kwargs)
                    if before == after:
                        warnings.warn(
                            f"{label}: the chat template does not show {name} of the environment's messages of the "
                            f"role {message['role']}, so the model does not see it",
                            stacklevel=3,
                        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _tokens(
        self, messages: Sequence[Message], arguments: TemplateArguments, *, generation_prompt: bool = False
    ) -> list[int]:
        conversation = json.dumps([list(messages), list(arguments.tools), dict(arguments.kwargs)])
        return list(self._rendered(conversation, generation_prompt))

    def _render(self, conversation: str, generation_prompt: bool) -> list[int]:
        messages, tools, kwargs = json.loads(conversation)
        with _renderable(messages):
            text = chat_texts(self._tokenizer, [(messages, generation_prompt)], tools, kwargs)[0]
        return self._encode(text)


def call_format(tokenizer: Any) -> str:
    """Returns the format in which a chat template writes calls of tools, a name as ``calls_of`` takes it.

    It is found in what the template makes of a call. Empty if the format is not known. For a template that writes no
    calls it is Hermes'.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> tokenizer = char_tokenizer("ab")
        >>> call = "<tool_call>{{ c.function | tojson }}</tool_call>"
        >>> inner = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
        >>> tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + inner + "{% endfor %}"
        >>> call_format(tokenizer)
        'hermes'
    """
    if "tool_calls" not in template_text(tokenizer):
        return HERMES
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    function = {"name": "probe", "description": "", "parameters": parameters}
    asked = {"role": "user", "content": "1"}
    # Some templates write arguments that are strings, others only mappings.
    for arguments in ({"key": "1"}, '{"key": "1"}'):
        call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        with contextlib.suppress(ModelError):
            tool = {"type": "function", "function": function}
            before, after = chat_texts(tokenizer, [([asked], True), ([asked, said], False)], [tool])
            if (found := format_of(after.removeprefix(before.rstrip()))) is not None:
                return found
    return ""


def _without_tokens(message: Message, processor: Processor) -> Message:
    """Returns a message without tokens of images that the model wrote: in a prompt they would stand for images."""
    if message["role"] != "assistant":
        return message
    content = message["content"].replace(processor.mark, "").replace(processor.feature, "")
    return {**message, "content": content}


def with_image_parts(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in which each mark of an image is a part; a mark that the model wrote is text.

    Example:
        >>> with_image_parts([{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "<image>"}])
        [{'role': 'user', 'content': [{'type': 'image'}]}, {'role': 'assistant', 'content': '<image>'}]
    """
    return [message if message["role"] == "assistant" else in_parts(message) for message in messages]


def check_no_marks(messages: Sequence[Message], label: str) -> None:
    """Raises EnvError if an environment's answer shows an image.

    Example:
        >>> check_no_marks([{"role": "tool", "content": "<image>"}], "problem 3 of 'mine'")
        Traceback (most recent call last):
        verl_fn.environments.processes.EnvError: problem 3 of 'mine': the environment's answer has the mark <image>;
        images are shown only in the first messages, so leave it out
    """
    if any(MARK in message["content"] for message in messages):
        raise EnvError(
            f"{label}: the environment's answer has the mark {MARK}; images are shown only in the first messages, so "
            "leave it out"
        )


@contextlib.contextmanager
def _renderable(messages: Sequence[Message]) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise EnvError(
            f"env.name: messages of the roles {roles} cannot be rendered ({error}); let the environment use "
            "roles that the template knows, or take another template"
        ) from error


@attrs.define(eq=False)
class TokenRow:
    """A row of tokens that the model has seen as they are.

    Attributes:
        prompt: the tokens before the first reply.
        parts: for each reply and each part between two replies: tokens, log-probs, log-probs before a cut, mask and
            versions.
        near_ties: of all replies.
        routed: the experts of the tokens that the model computed, or None where the engine does not give them.
        images: of the prompt, if it has any.
    """

    prompt: list[int]
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = attrs.field(factory=list)
    near_ties: int = 0
    routed: Tensor | None = None
    images: RowImages | None = None

    @property
    def ids(self) -> list[int]:
        """Returns all tokens so far."""
        return [*self.prompt, *(token for part in self.parts for token in part[0].tolist())]

    def draw(self, sample: Sample) -> None:
        """Adds a reply of the model."""
        self.near_ties += sample.near_ties
        if sample.routed_experts is not None:
            # Tokens keep the experts with which they were computed when the replies after them were drawn; a sample's
            # last token was not computed.
            known = sample.routed_experts[:0] if self.routed is None else self.routed
            self.routed = torch.cat([known, sample.routed_experts[len(known) : -1]])
        full = sample.log_probs if sample.full_log_probs is None else sample.full_log_probs
        self.parts.append((sample.tokens, sample.log_probs, full, sample.mask, sample.versions))

    def routes(self) -> Tensor | None:
        """Returns the experts of all tokens; tokens after the last computed one have its experts, as in a sample."""
        if self.routed is None:
            return None
        rest = len(self.ids) - len(self.routed)
        return torch.cat([self.routed, self.routed[-1:].expand(rest, -1, -1)])

    def write(self, tokens: Sequence[int], version: int) -> None:
        """Adds tokens that the model did not draw."""
        zeros = torch.zeros(len(tokens))
        versions = torch.full((len(tokens),), version)
        self.parts.append((torch.tensor(tokens, dtype=torch.int64), zeros, zeros, zeros, versions))


@attrs.define(eq=False)
class Conversation:
    """A conversation of the model with an environment.

    Attributes:
        place: its place among all conversations of a call.
        number: its number among the conversations of the request.
        group: the number of the request; its conversations are a group.
        tools: JSON schemas of the functions that the model can call.
        replies: the texts of the model's replies.
        rows: the rows so far; the last one goes on.
        limit: the most tokens of a row.
        reason: why the conversation ended; None while it goes on.
        score, acc: as the environment says; 0 until it does.
    """

    place: int
    request: Request
    number: int
    group: int
    messages: list[Message] = attrs.field(factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    replies: list[str] = attrs.field(factory=list)
    rows: list[TokenRow] = attrs.field(factory=list)
    limit: int = 0
    reason: EndReason | None = None
    score: float = 0.0
    acc: float = 0.0

    @property
    def key(self) -> Key:
        """Returns the key of this conversation. It depends only on its request and number."""
        return self.request.key.fold_in(self.number)

    @property
    def problem(self) -> Mapping[str, Any]:
        """Returns what the environment begins with."""
        assert self.request.problem is not None
        return self.request.problem

    @property
    def template_arguments(self) -> TemplateArguments:
        """Returns what the chat template gets besides the messages."""
        return TemplateArguments(self.tools, self.problem.get("chat_template_kwargs") or {})

    @property
    def label(self) -> str:
        """Returns the problem's name in error messages."""
        return f"problem {self.request.id} of {self.problem.get('data_source')!r}"

    def job(self) -> Job:
        """Returns the call of the environment that is due."""
        seed = self.key.fold_in("environment").seed() % 2**32
        return Job(self.place, seed, self.problem, tuple(self.replies), self.group)

    def ask(self, longest: int) -> Request:
        """Returns the request for the next reply.

        Args:
            longest: the limit of a reply, unless the row has less room.
        """
        row, ids = self.rows[-1], self.rows[-1].ids
        sampling = attrs.evolve(self.request.sampling, max_tokens=min(longest, self.limit - len(ids)), n=1)
        return Request(self.place, ids, sampling, self.key.fold_in(len(self.replies)), images=row.images)

    def samples(self, first: int) -> list[Sample]:
        """Returns a sample for each row, numbered from ``first``."""
        assert self.reason is not None
        said = json.dumps(list(map(dict, self.messages)))
        outcome = Outcome(self.number, self.reason, self.score, self.acc, len(self.replies), said)
        samples = []
        for i, row in enumerate(self.rows):
            tokens, log_probs, full, mask, versions = zip(*row.parts, strict=True)
            cut_off = self.reason == "length" and i == len(self.rows) - 1
            samples.append(
                Sample(
                    request=self.request.id,
                    number=first + i,
                    prompt=torch.tensor(row.prompt),
                    tokens=torch.cat(tokens),
                    log_probs=torch.cat(log_probs),
                    full_log_probs=torch.cat(full) if self.request.sampling.cuts else None,
                    mask=torch.cat(mask),
                    versions=torch.cat(versions),
                    finish_reason="length" if cut_off else "stop",
                    temperature=self.request.sampling.temperature or 1.0,
                    near_ties=row.near_ties,
                    outcome=outcome,
                    routed_experts=row.routes(),
                    images=row.images,
                )
            )
        return samples


Advance: TypeAlias = Callable[[Sequence[Conversation], Sequence[Sample], Callable[[Conversation], None]], list[str]]


class Turns:
    """Takes replies from an engine, and gives it requests for the next ones as soon as the environment has answered.

    All conversations that wait for the environment are given to it together, once it has answered earlier ones.

    Args:
        conversations: begin together.
        longest: the longest reply in tokens.
        advance: adds a reply to each of some conversations, and then the environment's answer, and reports each
            conversation that goes on; returns failures. It runs in the thread.
        thread: runs one call after the other.

    Attributes:
        failures: a sentence about each conversation that failed.
    """

    def __init__(
        self, conversations: Sequence[Conversation], longest: int, advance: Advance, thread: Executor
    ) -> None:
        self.failures: list[str] = []
        self._longest, self._advance, self._thread = longest, advance, thread
        self._drawing: dict[int, Conversation] = {}
        self._waiting: list[tuple[Conversation, Sample]] = []
        # The other thread appends to it.
        self._ready: deque[Conversation] = deque()
        self._answers: Future[list[str]] | None = thread.submit(advance, conversations, (), self._ready.append)

    def more(self, samples: Sequence[Sample]) -> list[Request] | None:
        """Takes samples of earlier requests; returns new requests, or None once all conversations have ended.

        Raises:
            EnvError: messages of the environment cannot be rendered.
        """
        self._waiting += [(self._drawing.pop(sample.request), sample) for sample in samples]
        if self._answers is not None and self._answers.done():
            self.failures += self._answers.result()
            self._answers = None
        requests = []
        for _ in range(len(self._ready)):
            one = self._ready.popleft()
            self._drawing[one.place] = one
            requests.append(one.ask(self._longest))
        if self._answers is None and self._waiting:
            conversations, drawn = zip(*self._waiting, strict=True)
            self._waiting = []
            self._answers = self._thread.submit(self._advance, conversations, drawn, self._ready.append)
        return requests if self._drawing or self._answers is not None else None

    def wait(self) -> None:
        """Waits until the environment has answered, so that all that are ready are asked for together."""
        if self._answers is not None:
            wait([self._answers])


class Groups:
    """Has the environment score each group once, when the last of its conversations has ended.

    The environment gets the conversations that it has ended, in the order of their numbers. Others of the group keep
    their reward of 0, or have failed. If the scoring fails, so have all conversations that were to be scored.

    Args:
        conversations: of all groups.
        environments: answers jobs; without the attribute ``scores_groups``, or where it is false, nothing is scored.
    """

    def __init__(
        self, conversations: Sequence[Conversation], environments: Callable[[Sequence[Call]], list[Result]]
    ) -> None:
        self._environments = environments
        together = getattr(environments, "scores_groups", False)
        by_number = groupby(conversations, lambda one: one.group)
        self._open = {number: list(group) for number, group in by_number} if together else {}

    def score(self, advanced: Sequence[Conversation]) -> list[str]:
        """Scores the groups that have ended with these conversations.

        Returns:
            A sentence about each conversation that failed.
        """
        numbers = sorted({one.group for one in advanced if one.group in self._open})
        ended = [n for n in numbers if all(one.reason is not None for one in self._open[n])]
        groups = [[one for one in self._open.pop(n) if one.reason == "done"] for n in ended]
        groups = [group for group in groups if group]
        if not groups:
            return []
        failures = []
        results = self._environments([_scoring(group) for group in groups])
        for group, result in zip(groups, results, strict=True):
            if isinstance(result, Failure):
                for one in group:
                    one.reason, one.score, one.acc = result.reason, 0.0, 0.0
                    failures.append(f"{one.label} first: in scoring its group the environment {result.problem}")
                continue
            assert isinstance(result, Scores)
            for one, end in zip(group, result.ends, strict=True):
                one.score, one.acc = end.reward, end.acc
        return failures


def _scoring(group: Sequence[Conversation]) -> Scoring:
    """Returns the job that scores conversations of a request."""
    seed = group[0].request.key.fold_in("environment").fold_in("group").seed() % 2**32
    return Scoring(seed, tuple(one.job() for one in group))
