"""The replies of a judge, kept in a run's folder, so that no question is asked twice and a replay asks none."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from verl_fn.rewards.reward import RewardError

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
            if self.file is None or self.offline:
                return
            line = json.dumps({"question": question, "reply": reply}) + "\n"
            try:
                # One write, so that lines of two processes do not mix.
                descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                try:
                    written = os.write(descriptor, line.encode())
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise RewardError(f"{self.file} cannot be written: {error.strerror}") from error
            if written < len(line.encode()):
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
