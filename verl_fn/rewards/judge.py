"""A model as a judge: it is asked for a score by its address, and its reply is read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import attrs
import httpx

from verl_fn.data.tasks import text_of
from verl_fn.rewards.replies import Replies
from verl_fn.rewards.reward import Answer, RewardError, describe
from verl_fn.rewards.served_model import ServedModel
from verl_fn.rewards.worker import LARGEST, short

# Later, or elsewhere, the same request may succeed.
TEMPORARY = frozenset({408, 409, 425, 429, *range(500, 600)})
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0


@attrs.frozen
class Question:
    """What a judge is asked, and how its reply is read.

    Attributes:
        model: the name of the judge's model.
        prompt: the question; ``{prompt}``, ``{response}`` and ``{ground_truth}`` are replaced.
        pattern: a regular expression whose first group is the score; the last match in a reply counts.
        unreadable_score: the score where there is no match.

    Example:
        >>> from verl_fn.data.tasks import Problem
        >>> question = Question("m", "Grade: {response}", "Score: ([0-9]+)")
        >>> question.body(Answer(Problem("2+2?", "4"), "{prompt}"))["messages"][0]["content"]
        'Grade: {prompt}'
        >>> question.score("Score: 0 or rather Score: 3"), question.score("no idea")
        (3.0, None)
    """

    model: str
    prompt: str
    pattern: str
    unreadable_score: float = 0.0

    path: ClassVar[str] = "/chat/completions"
    expected: ClassVar[str] = "choices[0].message.content, as an OpenAI-compatible API gives"

    def body(self, answer: Answer) -> dict[str, Any]:
        """Returns the request that asks for the score of an answer."""
        parts = {
            "{prompt}": text_of(answer.problem.prompt),
            "{response}": answer.text,
            "{ground_truth}": answer.problem.answer,
        }
        # At once, so that a response with such a name in it is not changed.
        text = re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]], self.prompt)
        return {"model": self.model, "temperature": 0.0, "messages": [{"role": "user", "content": text}]}

    def read(self, content: Any) -> str | None:
        """Returns the reply in the content of a response; None if it has none."""
        match content:
            case {"choices": [{"message": {"content": str() | None as text}}, *_]}:
                return text or ""
        return None

    def score(self, reply: str) -> float | None:
        """Returns the score in a reply, or None if there is none."""
        *_, last = [None, *re.finditer(self.pattern, reply)]
        try:
            score = float(last[1]) if last is not None and last[1] is not None else math.nan
        except ValueError:
            return None
        return score if -LARGEST < score < LARGEST else None


class _Failed(Exception):
    """Raised for an attempt without a reply; the message describes it."""


class Judge:
    """Judges answers by the score that a language model or a reward model gives.

    Equal questions are asked once, and never again in a run: what was replied is kept, so scores do not change when a
    run is resumed, and a replay asks nobody. A response whose reply has no score gets ``unreadable_score``, and
    counts in the metric ``reward/judge_unreadable/mean``.

    Args:
        url: the API's address, without the question's path.
        question: what is asked of a language model, or of a reward model, and how replies are read.
        replies: keeps what was replied.
        timeout: seconds that a reply may take.
        retries: further attempts where the judge is not reached, is late, or has an error of its own.
        concurrency: most requests at a time.
        api_key_env: the environment variable with the API's key; empty if it needs none.

    Raises:
        RewardError: that variable is not set, or holds what no header of HTTP can.
    """

    def __init__(
        self,
        url: str,
        question: Question | ServedModel,
        replies: Replies,
        *,
        timeout: float = 30.0,
        retries: int = 3,
        concurrency: int = 16,
        api_key_env: str = "",
    ) -> None:
        self._url, self._question, self._replies = url.rstrip("/") + question.path, question, replies
        self._timeout, self._retries, self._concurrency = timeout, retries, concurrency
        self._key = ""
        if api_key_env and not replies.offline:
            self._key = os.environ.get(api_key_env, "").strip()
            if not (self._key.isascii() and self._key.isprintable()):
                raise RewardError(f"the key in {api_key_env} has characters that no key has; set it again")
            if not self._key:
                raise RewardError(
                    f"reward.api_key_env names {api_key_env}, which is not set in the environment; set it"
                )

    def __call__(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Returns ``score``, ``pred`` and ``judge_unreadable`` (1 or 0) of each answer.

        Raises:
            RewardError: the judge does not reply, or refuses a request; the message names the address, what happened
                and the answer.
        """
        bodies = [self._question.body(answer) for answer in answers]
        names = [_name_of(body) for body in bodies]
        self._ask({name: (body, answer) for name, body, answer in zip(names, bodies, answers, strict=True)})
        results, unreadable = [], []
        for name, answer in zip(names, answers, strict=True):
            reply = self._replies.get(name) or ""
            score = self._question.score(reply)
            if score is None:
                unreadable.append(reply)
            value = self._question.unreadable_score if score is None else score
            results.append({"score": value, "pred": answer.text.strip(), "judge_unreadable": float(score is None)})
        if unreadable:
            warnings.warn(
                f"{len(unreadable)} of {len(answers)} replies of the judge have no score by reward.pattern, such as "
                f"{short(repr(unreadable[0]), 200)}; these responses get reward.unreadable_score = "
                f"{self._question.unreadable_score:g}",
                stacklevel=2,
            )
        return results

    def _ask(self, questions: Mapping[str, tuple[dict[str, Any], Answer]]) -> None:
        """Asks the questions that have no reply yet."""
        missing = {name: parts for name, parts in questions.items() if self._replies.get(name) is None}
        if not missing:
            return
        if self._replies.offline:
            _, answer = next(iter(missing.values()))
            where = self._replies.file or "the run's folder, which does not exist"
            raise RewardError(
                f"there is no reply of the judge in {where} to {len(missing)} of {len(questions)} questions, and "
                f"reward.offline forbids to ask; the first is {describe(answer)}"
            )
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self._concurrency)
        with (
            httpx.Client(headers=headers, timeout=self._timeout, limits=limits) as client,
            ThreadPoolExecutor(self._concurrency, "judge") as threads,
        ):
            end = threading.Event()
            futures = [threads.submit(self._ask_one, client, end, name, *parts) for name, parts in missing.items()]
            try:
                for future in futures:
                    future.result()
            finally:
                # After an error nobody tries again, and questions that have not begun are left.
                end.set()
                threads.shutdown(wait=False, cancel_futures=True)

    def _ask_one(
        self, client: httpx.Client, end: threading.Event, name: str, body: dict[str, Any], answer: Answer
    ) -> None:
        for attempt in range(self._retries + 1):
            if attempt and end.wait(min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE)):
                return
            try:
                self._replies.add(name, self._reply(client, body, answer))
                return
            except _Failed as error:
                failure = str(error)
        raise RewardError(
            f"the judge at {self._url} gave no reply in {self._retries + 1} attempts (reward.retries): the last one "
            f"{failure}, judging {describe(answer)}; replies so far are kept, and a run that is continued asks only "
            "for the rest"
        )

    def _reply(self, client: httpx.Client, body: dict[str, Any], answer: Answer) -> str:
        """Returns the text that the judge replies with.

        Raises:
            _Failed: there is none, and another attempt may succeed.
            RewardError: the request is refused.
        """
        deadline, content = time.monotonic() + self._timeout, bytearray()
        try:
            with client.stream("POST", self._url, content=json.dumps(body)) as response:
                # A time limit of httpx applies to each read, and a reply may come in many.
                for part in response.iter_bytes():
                    content += part
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("")
        except httpx.TimeoutException:
            raise _Failed(f"took longer than {self._timeout:g} s (reward.timeout)") from None
        except httpx.HTTPError as error:
            raise _Failed(f"failed with {type(error).__name__}: {self._shown(str(error))}") from None
        shown = self._shown(content.decode(errors="replace"))
        if response.status_code in TEMPORARY:
            raise _Failed(f"had status {response.status_code}: {shown}")
        if not response.is_success:
            raise RewardError(
                f"the judge at {self._url} refuses requests with status {response.status_code}: {shown}; look at "
                f"reward.url, reward.model and reward.api_key_env, judging {describe(answer)}"
            )
        try:
            reply = self._question.read(json.loads(content))
        except (ValueError, RecursionError):
            reply = None
        if reply is None:
            raise _Failed(f"had no {self._question.expected}: {shown}")
        return self._without_key(reply)

    def _shown(self, text: str) -> str:
        return short(repr(self._without_key(text)), 200)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _name_of(body: dict[str, Any]) -> str:
    """Returns the name under which the reply to a request is kept: the same wherever the judge is."""
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
