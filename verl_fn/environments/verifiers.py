"""Environments of the package verifiers, for a policy to talk to turn by turn; runs in processes of environments.

A rollout of verifiers asks a client for each reply. Here the rollout waits until the trainer's engine has drawn it.
So verifiers runs its own loop, with its own stop conditions, tools and rubric, and no tokens pass through it.

Source: https://github.com/PrimeIntellect-ai/verifiers, its classic API (``vf.Environment``).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from . import Done
from .calls import FORMATS, HERMES, calls_of

ROW = "verifiers_row"  # the field of a problem's extra_info that has the row of its dataset
UNREAD = (
    "the environment has tools, and the model's chat template writes calls of tools in no format that is known here "
    f"(as of {', '.join((HERMES, *FORMATS))}; not Mistral's [TOOL_CALLS]); take a model with another template"
)
NEEDED = "install 'verifiers>=0.2,<0.4' for the interpreter that runs environments (env.python)"


@attrs.frozen(eq=False)
class Loaded:
    """An environment of verifiers in this process.

    Attributes:
        environment: as ``load_environment`` returns it.
        loop: the event loop of all its rollouts, since its clients belong to one loop.
        calls: the format in which the model calls tools; empty if it is not known.
    """

    environment: Any
    loop: asyncio.AbstractEventLoop
    calls: str

    def __call__(self) -> Rollout:
        """Returns an environment for one conversation."""
        return Rollout(self.environment, self.loop, self.calls, together=self.score_group is not None)

    @property
    def score_group(self) -> Callable[[Sequence[Rollout]], list[Done]] | None:
        """Scores the ended rollouts of a group together; None if the rubric scores each by itself."""
        return self._scored if scores_groups(self.environment) else None

    def _scored(self, rollouts: Sequence[Rollout]) -> list[Done]:
        states = [rollout.state for rollout in rollouts]

        async def score() -> None:
            await self.environment.rubric.score_group(states)
            for state in states:
                await self.environment.rubric.cleanup(state)

        self.loop.run_until_complete(score())
        return [Done(float(state["reward"])) for state in states]

    def problems(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the rows of its datasets, each with ``train`` or ``held_out``."""
        datasets = {"train": self.environment.build_dataset(), "held_out": self.environment.build_eval_dataset()}
        for part, dataset in datasets.items():
            for row in dataset or ():
                yield part, dict(row)


def load(name: str, arguments: Mapping[str, Any], calls: str) -> Loaded:
    """Loads an environment of verifiers.

    Args:
        name: of an installed package as ``vf.load_environment`` takes it, or of a file without ``.py``.
        arguments: keyword arguments of its ``load_environment``.
        calls: the format in which the model calls tools; empty if it is not known.

    Raises:
        ImportError: verifiers is not installed, or has no classic environments.
        TypeError: its ``load_environment`` returns something else than an environment.
        ValueError: it has tools, and the format of their calls is not known.
    """
    # Each process would draw the same bars on the run's screen.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import verifiers
    except ImportError as error:
        raise ImportError(f"verifiers:{name} needs verifiers ({error}); {NEEDED}") from error
    if not hasattr(verifiers, "load_environment"):
        raise ImportError(f"this version of verifiers has no classic environments, as it had before 0.4; {NEEDED}")
    if (parent := Path(name).resolve().parent).is_dir():
        sys.path.insert(0, str(parent))
    environment = verifiers.load_environment(Path(name).name, **arguments)
    if not all(hasattr(environment, part) for part in ("rollout", "rubric", "build_dataset")):
        raise TypeError(f"load_environment of {name} returned a {type(environment).__name__} and no vf.Environment")
    if not calls and has_tools(environment):
        raise ValueError(UNREAD)
    return Loaded(environment, asyncio.new_event_loop(), calls)


def has_tools(environment: Any) -> bool:
    """Returns whether an environment, or one inside it, has tools; others have some that depend on the problem."""
    return bool(getattr(environment, "tool_defs", None)) or any(map(has_tools, getattr(environment, "envs", ())))


def scores_groups(environment: Any) -> bool:
    """Returns whether a rubric of an environment, or of one inside it, has functions of a whole group."""
    # An environment that has others (``vf.EnvGroup``) has a rubric without functions that passes groups on.
    return environment.rubric.has_group_rewards or any(map(scores_groups, getattr(environment, "envs", ())))


class Rollout:
    """A rollout of verifiers as an environment of one conversation.

    Args:
        loop: its event loop.
        calls: the format in which the model calls tools; empty if it is not known.
        together: the rollout is scored with its group, after its end.

    Attributes:
        tools: JSON schemas of the functions that the model can call.
        state: verifiers' state of a rollout that has ended and is scored with its group.
    """

    def __init__(
        self, environment: Any, loop: asyncio.AbstractEventLoop, calls: str = HERMES, *, together: bool = False
    ) -> None:
        self._environment, self._loop, self._calls, self._together = environment, loop, calls, together
        self.state: Any = None
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._task: asyncio.Task[float] | None = None
        self._answer: asyncio.Future[Any] | None = None
        self._messages: list[dict[str, Any]] = []
        self._replies = 0
        self.tools: list[dict[str, Any]] = []

    def reset(self, problem: Any) -> list[dict[str, Any]] | Done:
        """Begins the rollout of a problem; see ``Environment``."""
        self._task = self._loop.create_task(self._played(row_of(problem)))
        asked = self._loop.run_until_complete(self._next())
        if self.tools and not self._calls:
            raise ValueError(UNREAD)
        return asked

    def step(self, reply: str) -> list[dict[str, Any]] | Done:
        """Gives the rollout a reply; see ``Environment``."""
        assert self._answer is not None
        message = said(reply, self._replies, self._calls, self.tools) if self.tools else {"content": reply}
        self._replies += 1
        self._messages.append(plain({"role": "assistant", **message}))
        self._answer.set_result(message)
        return self._loop.run_until_complete(self._next())

    def close(self) -> None:
        """Ends a rollout that is not at its end, so that verifiers cleans up after it."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._loop.run_until_complete(asyncio.wait([self._task]))

    async def _played(self, row: dict[str, Any]) -> float:
        """Returns the reward of a rollout, when all its replies are there; 0 if it is scored with its group."""
        state = await self._environment.rollout(row, client(self._requests), "policy", {})
        if state.get("error") is not None:
            raise RuntimeError(f"the rollout ended with {causes(state['error'])}")
        if self._together:
            self.state = state
            return 0.0
        rubric = self._environment.rubric
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        return float(state["reward"])

    async def _next(self) -> list[dict[str, Any]] | Done:
        """Returns the messages since the last reply when the rollout asks for the next one, or its end."""
        assert self._task is not None
        asked = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([asked, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return Done(self._task.result())
        prompt, tools, self._answer = asked.result()
        messages = [plain(message) for message in prompt]
        if self._messages and tools != self.tools:
            raise ValueError("the tools have changed during the conversation, and the chat template shows them once")
        before = len(self._messages)
        if messages[:before] != self._messages:
            raise ValueError("earlier messages have changed or are missing; a conversation can only be continued")
        self.tools, self._messages = tools, messages
        return messages[before:]


def causes(error: BaseException | None) -> str:
    """Returns an error and its causes, since errors of verifiers often say nothing themselves.

    Example:
        >>> error = RuntimeError()
        >>> error.__cause__ = KeyError("b")
        >>> causes(error)
        "RuntimeError() from KeyError('b')"
    """
    names = []
    while error is not None:
        names.append(repr(error))
        error = error.__cause__
    return " from ".join(names)


def client(requests: asyncio.Queue[Any]) -> Any:
    """Returns a client of verifiers that puts each request into a queue, with a future for the reply."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Waiting(Client):
        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            keys = ("name", "description", "parameters")
            return {"type": "function", "function": {key: getattr(tool, key) for key in keys}}

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **others: Any
        ) -> Any:
            reply = asyncio.get_running_loop().create_future()
            requests.put_nowait((prompt, tools or [], reply))
            return await reply

        async def raise_from_native_response(self, response: Any) -> None:
            pass

        async def from_native_response(self, response: Any) -> Any:
            reason = "tool_calls" if response.get("tool_calls") else "stop"
            message = ResponseMessage(**response, finish_reason=reason, is_truncated=False)
            return Response(id="", created=0, model="policy", message=message)

        async def close(self) -> None:
            pass

    return Waiting(None)


def row_of(problem: Any) -> dict[str, Any]:
    """Returns the row of a dataset of verifiers for a problem; the problem may also come from a file.

    Example:
        >>> from types import SimpleNamespace
        >>> row_of(SimpleNamespace(prompt="2+3?", answer="5", id=0, extra_info={"level": 1}))["prompt"]
        [{'role': 'user', 'content': '2+3?'}]
    """
    if ROW in problem.extra_info:
        return dict(problem.extra_info[ROW])
    prompt = problem.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    return {"prompt": messages, "answer": problem.answer, "info": problem.extra_info, "example_id": problem.id}


def said(reply: str, turn: int, format: str = HERMES, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Returns the content and the tool calls of a reply.

    A reply with a call that cannot be read is content as a whole.

    Args:
        turn: its number; the ids of calls are made of it.
        format: of the calls, as for ``calls_of``.
        tools: JSON schemas of the functions that the model can call.

    Example:
        >>> said('Let me add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', 0)
        {'content': 'Let me add.', 'tool_calls': [{'id': 'call_0_0', 'name': 'add', 'arguments': '{"a": 1}'}]}
        >>> said("<tool_call>add</tool_call>", 0)
        {'content': '<tool_call>add</tool_call>'}
    """
    content, calls = calls_of(reply, format, tools)
    ids = [f"call_{turn}_{i}" for i in range(len(calls))]
    called = [{"id": id, "name": name, "arguments": text} for id, (name, text) in zip(ids, calls, strict=True)]
    return {"content": content, "tool_calls": called} if called else {"content": content}


def plain(message: Any) -> dict[str, Any]:
    """Returns a message of verifiers as chat templates take it.

    Raises:
        ValueError: its content is not only text.

    Example:
        >>> plain({"role": "tool", "content": [{"type": "text", "text": "5"}], "name": None})
        {'role': 'tool', 'content': '5'}
    """
    values = message.model_dump() if hasattr(message, "model_dump") else dict(message)
    content = values.get("content") or ""
    if not isinstance(content, str):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise ValueError(f"a message of the role {values['role']} has other content than text, such as an image")
        content = "".join(part["text"] for part in content)
    calls = [
        {"id": call["id"], "type": "function", "function": {key: call[key] for key in ("name", "arguments")}}
        for call in values.get("tool_calls") or ()
    ]
    kept = {key: value for key, value in values.items() if value is not None and key != "tool_calls"}
    return {**kept, "content": content, **({"tool_calls": calls} if calls else {})}
