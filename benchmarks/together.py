"""The ranks of a process group, as processes: they run a command to its end, or answer calls."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Report: TypeAlias = dict[str, Any]


class RanksFailed(RuntimeError):
    """Ranks failed.

    Attributes:
        cause: the last error that one of them printed, or else its exit status.
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


def free_port() -> int:
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Group:
    """Ranks that answer calls, in processes of their own with the environment of torchrun.

    Args:
        serve: a generator ``(rank, calls, *arguments)`` that yields a report when it is ready, and one for each call.
        ranks: how many processes run it.
        name: what they run, for the error.
        arguments: of ``serve``.
    """

    def __init__(self, serve: Callable[..., Iterator[Report]], ranks: int, name: str, *arguments: Any) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self.name = name
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            values = (serve, rank, ranks, port, theirs, arguments)
            process = context.Process(target=_answer, args=values, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, call: Any) -> list[Report]:
        """Returns the report of each rank on a call; see ``reports`` for errors."""
        for pipe in self.pipes:
            pipe.send(call)
        return self.reports()

    def reports(self) -> list[Report]:
        """Returns the next report of each rank.

        Raises:
            RuntimeError: a rank failed; its traceback is in the message.
        """
        reports = []
        for rank, pipe in enumerate(self.pipes):
            try:
                reports.append(pipe.recv())
            except EOFError:
                self.processes[rank].join()
                raise RuntimeError(f"rank {rank} ended with status {self.processes[rank].exitcode}") from None
            if "error" in reports[-1]:
                for process in self.processes:
                    process.kill()
                raise RuntimeError(f"{self.name} failed\n{reports[-1]['error']}")
        return reports

    def stop(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            process.kill()


def _answer(
    serve: Callable[..., Iterator[Report]], rank: int, ranks: int, port: int, pipe: Any, arguments: Sequence[Any]
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        for report in serve(rank, iter(pipe.recv, None), *arguments):
            pipe.send(report)
    except Exception:
        pipe.send({"error": traceback.format_exc()})


def run_together(command: Sequence[str], ranks: int, name: str, logs: Path | None = None) -> None:
    """Runs a command in as many processes as there are ranks, with the environment of torchrun, until all have ended.

    Ranks wait for one that has failed until the timeout of their process group, so a failure ends them at once. What
    they print goes to files: a process stops at a full pipe, and the others then wait for it.

    Args:
        command: the command.
        ranks: how many processes run it.
        name: what they run, for the error.
        logs: the folder in which the output of each rank stays; by default it does not.

    Raises:
        RanksFailed: a rank failed; the end of its output is in the message.

    Example:
        >>> run_together(["false"], 1, "megatron:tp=2")
        Traceback (most recent call last):
        verl_fn.benchmarks.together.RanksFailed: megatron:tp=2: rank 0 failed with status 1...
    """
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        outputs = [(logs or Path(folder)) / f"rank_{rank}.log" for rank in range(ranks)]
        processes = []
        try:
            for rank, log in enumerate(outputs):
                env = {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                file = stack.enter_context(log.open("wb"))
                processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
            statuses = [process.poll() for process in processes]
            while None in statuses and not any(statuses):
                time.sleep(0.05)
                statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed := [rank for rank, status in enumerate(statuses) if status]:
            ends = [outputs[rank].read_text(errors="replace")[-3000:] for rank in failed]
            lines = [f"{name}: rank {rank} failed with status {statuses[rank]}\n{end}"
                     for rank, end in zip(failed, ends, strict=True)]  # fmt: skip
            causes = _causes(ends)[-1:]
            cause = [*causes, f"rank {failed[0]} failed with status {statuses[failed[0]]}"][0]
            raise RanksFailed("\n".join([*lines, *(f"{name}: {cause}" for cause in causes)]), cause)


def _causes(outputs: Sequence[str]) -> list[str]:
    """Returns the last line of each traceback: the error and its message.

    Example:
        >>> _causes(["Traceback (most recent call last):\\n  ...\\nmine.LayoutError: tp = 3 does not divide\\n"])
        ['LayoutError: tp = 3 does not divide']
    """
    found = (re.findall(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w*Error: .+)$", output, re.MULTILINE) for output in outputs)
    return [errors[-1] for errors in found if errors]
