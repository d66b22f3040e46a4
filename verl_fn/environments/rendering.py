"""Messages of an environment as tokens, which follow those that the model drew."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_fn.backends.hf.chat import chat_tokens
from verl_fn.backends.hf.config import ModelError
from verl_fn.data.files import has_unknown

from .contract import Message
from .interpreter import EnvError

CACHE = 4096


class Renderer:
    """Renders messages by the tokenizer's chat template, turn by turn.

    Args:
        tokenizer: has a chat template, which ends a turn of the assistant with an end token.
        end_tokens: those of the model.

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
        if tokenizer.chat_template is None:
            raise EnvError(
                "env.name needs chat messages, and the tokenizer has no chat template; take a model folder with "
                "chat_template.jinja"
            )
        user, reply = {"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}
        self.continuation([user, reply], [user])

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Returns the tokens of messages and tools, up to the start of the model's reply.

        Raises:
            EnvError: the template fails on these messages, or leaves out the tools.
        """
        tokens = self._tokens(messages, tools, generation_prompt=True)
        if tools and tokens == self._tokens(messages, generation_prompt=True):
            raise EnvError(
                "env.name: the environment has tools, and the chat template does not show them to the model; take a "
                "template that renders `tools`"
            )
        return tokens

    def continuation(
        self, said: Sequence[Message], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int] | None:
        """Returns the tokens between the end token of a reply and the start of the next one.

        They are the difference between two renderings, with and without ``messages``. So the tokens before them may
        be those that the model drew, which can differ from what the tokenizer makes of their text.

        Args:
            said: the conversation so far, which ends with the reply.
            messages: the environment's answer to it.
            tools: JSON schemas of the functions that the model can call.

        Returns:
            The tokens; None where the template renders ``said`` otherwise before ``messages``, as templates do that
            drop earlier reasoning.

        Raises:
            EnvError: the template fails, or does not end the reply with an end token.
        """
        before, after = self._tokens(said, tools), self.opening([*said, *messages], tools)
        ends = [place for place, token in enumerate(before) if token in self._end_tokens]
        if not ends:
            token = self._tokenizer.convert_ids_to_tokens(min(self._end_tokens))
            raise EnvError(
                f"env.name: the chat template does not end a turn of the assistant with {token!r}, where sampling "
                "stops; write that token after the assistant's content in the template"
            )
        return after[ends[-1] + 1 :] if after[: len(before)] == before else None

    def check_known(self, messages: Sequence[Message], label: str) -> None:
        """Checks that the tokenizer knows every character of messages, so that nothing of them is lost.

        Raises:
            EnvError: it does not.
        """
        for message in messages:
            content = message["content"]
            if has_unknown(self._tokenizer(content, add_special_tokens=False)["input_ids"], self._tokenizer):
                raise EnvError(
                    f"{label}: the tokenizer does not know every character of the environment's {content!r:.80}"
                )

    def _tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = False,
    ) -> list[int]:
        return list(self._rendered(json.dumps([list(messages), list(tools)]), generation_prompt))

    def _render(self, conversation: str, generation_prompt: bool) -> list[int]:
        messages, tools = json.loads(conversation)
        try:
            return chat_tokens(self._tokenizer, messages, tools, generation_prompt=generation_prompt)
        except ModelError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise EnvError(
                f"env.name: messages of the roles {roles} cannot be rendered ({error}); let the environment use "
                "roles that the template knows, or take another template"
            ) from error
