"""A model as a judge: it is asked for a score by its address, and its reply is read.

A chat model gets a question in words (``Question``), and a reward model that vLLM serves gets the tokens of a row
(``ServedModel``). Replies are kept in the run's folder (``Replies``).
"""

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
from pathlib import Path
from typing import Any, ClassVar

import attrs
import httpx

from verl_fn.data.tasks import text_of
from verl_fn.pool.worker import LARGEST, short
from verl_fn.rewards.reward import Answer, RewardError, describe

# Later, or elsewhere, the same request may succeed.
TEMPORARY = frozenset({408, 409, 425, 429, *range(500, 600)})
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0


@attrs.frozen
class Question:
    """What a judge is asked, and how its reply is read.

    Attributes:
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


FILE = "judge.jsonl"


class Replies:
    """Replies by question; several threads may use them.

    Each reply is written to ``judge.jsonl`` as soon as it is there, so that a run that is stopped does not ask for it
    again. An incomplete last line, from a process that was killed, is removed.

    Args:
        folder: the folder of the file; with None, or if there is no such folder, replies stay in memory.
        offline: there is nobody to ask, so nothing is written and a missing reply is an error.

    Raises:
        RewardError: the file cannot be read, or a line is damaged.

    Example:
        >>> replies = Replies(None)
        >>> replies.add("a question", "Score: 1")
        >>> replies.get("a question"), replies.get("another")
        ('Score: 1', None)
    """

    def __init__(self, folder: Path | None, *, offline: bool = False) -> None:
        self.offline = offline
        self.file = folder / FILE if folder is not None and folder.is_dir() else None
        self._lock = threading.Lock()
        self._by_question: dict[str, str] = {}
        if self.file is not None and self.file.is_file():
            self._read(self.file)

    def get(self, question: str) -> str | None:
        """Returns the reply to a question, or None."""
        return self._by_question.get(question)

    def add(self, question: str, reply: str) -> None:
        """Keeps a reply.

        Raises:
            RewardError: it cannot be written.
        """
        with self._lock:
            self._by_question[question] = reply
            if self.file is None:
                return
            line = json.dumps({"question": question, "reply": reply}).encode() + b"\n"
            try:
                # One write, so that lines of two processes do not mix.
                with self.file.open("ab", buffering=0) as out:
                    written = out.write(line)
            except OSError as error:
                raise RewardError(f"{self.file} cannot be written: {error.strerror}") from error
            if written < len(line):
                raise RewardError(f"{self.file} cannot be written: the disk is full")

    def _read(self, file: Path) -> None:
        try:
            data = file.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data) and not self.offline:
                os.truncate(file, len(whole))
        except OSError as error:
            raise RewardError(f"{file} cannot be read: {error.strerror}") from error
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                match json.loads(line):
                    case {"question": str(question), "reply": str(reply)}:
                        self._by_question[question] = reply
                        continue
            except (ValueError, RecursionError):
                pass
            raise RewardError(f"{file}, line {number}, is damaged; remove the line, and the judge is asked again")


@attrs.frozen
class ServedModel:
    """What ``Judge`` sends to vLLM's pooling API, and how it reads the score.

    The model gets the tokens that the policy drew, with prompt and end token, so no text is encoded again. It has the
    policy's tokenizer, as a reward model that was trained from the policy has.

    Attributes:
        model: the name under which the model is served.

    Example:
        >>> import torch
        >>> from verl_fn.data.tasks import Problem
        >>> served = ServedModel("scores")
        >>> served.body(Answer(Problem("2+2?", "4"), "4", tokens=torch.tensor([5, 9, 2])))["input"]
        [5, 9, 2]
        >>> served.score(served.read({"data": [{"data": [[0.5], [0.1], [0.25]]}]}))
        0.25
    """

    model: str

    path: ClassVar[str] = "/pooling"
    unreadable_score: ClassVar[float] = 0.0  # never used: a reply without a score is none
    expected: ClassVar[str] = (
        "one number, or one for each token, in data[0].data, as vLLM's pooling API gives for a reward model"
    )

    def body(self, answer: Answer) -> dict[str, Any]:
        """Returns the request for the score of an answer."""
        assert answer.tokens is not None  # Reward gives them
        # Without its activation, a sigmoid, the score is the model's number.
        return {
            "model": self.model,
            "input": answer.tokens.tolist(),
            "use_activation": False,
            "encoding_format": "float",
        }

    def read(self, content: Any) -> str | None:
        """Returns the score in the content of a reply as a string with all of its digits; None if there is none.

        A head that classifies tokens gives a number for each, and the last token's is the score.
        """
        match content:
            case {"data": [{"data": [*_, [score]] | [score]}]} if (
                isinstance(score, int | float) and math.isfinite(score) and abs(score) < LARGEST
            ):
                return repr(float(score))
        return None

    def score(self, reply: str) -> float:
        """Returns the score of a reply that ``read`` has returned."""
        return float(reply)
