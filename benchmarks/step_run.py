"""A trainer in a process of its own, watched through the file that it writes a line to after each step."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn.driver import processes

PR_SET_CHILD_SUBREAPER = 36  # of Linux
POLL = 0.01


class RunFailed(RuntimeError):
    """A trainer ended, or took too long, before it had done its steps; the message has the end of its log."""


def watch(
    command: Sequence[str], environment: Mapping[str, str], file: Path, log: Path, steps: int, seconds: float
) -> list[dict[str, Any]]:
    """Runs a command until its file has a line for each step, and ends all processes that it has started.

    Args:
        command: the command.
        environment: variables besides this process's own.
        file: the file that it writes.
        log: where its output goes.
        steps: the steps to wait for.
        seconds: the most time for it; where it is over after the first step, the steps until then count.

    Returns:
        For each step: ``row``, the line that was written, and ``seconds`` since the line before, for the first one
        since the start.

    Raises:
        RunFailed: it wrote no line, or ended by itself without all of them.
    """
    env, before = {**os.environ, **environment}, below()
    began = last = time.perf_counter()
    done: list[dict[str, Any]] = []
    status: int | None = None
    with log.open("wb") as output, adopting():
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while len(done) < steps and status is None and time.perf_counter() - began < seconds:
                time.sleep(POLL)
                # In this order, since the last line may be written between the two looks.
                status = process.poll()
                lines = _lines(file)[len(done) :]
                now = time.perf_counter()
                for line in lines:
                    done.append({"row": json.loads(line), "seconds": now - last})
                    last = now
        finally:
            process.kill()
            end(before)
            process.wait()
    if not done or (status is not None and len(done) < steps):
        what = f"ended with status {status}" if status is not None else f"was ended after {seconds:.0f} seconds"
        raise RunFailed(f"it {what}, with {len(done)} of {steps} steps\n{tail(log)}")
    return done


def tail(log: Path, size: int = 6000) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-size:]


def end(before: Sequence[int]) -> None:
    """Kills the processes below this one that were not there before; ``adopting`` holds on to all of them."""
    processes.end(lambda: [pid for pid in below() if pid not in before], patience=0.0)


def below() -> list[int]:
    """The processes that this one has started, directly or not."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    found = [os.getpid()]
    for pid in found:
        found += parents.get(pid, [])
    return found[1:]


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Makes this process the parent of processes below it whose own parents have ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _lines(file: Path) -> list[bytes]:
    """The whole lines of a file that may be written just now, or not exist yet."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].splitlines()
