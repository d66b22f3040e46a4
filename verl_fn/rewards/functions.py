"""Rewards by functions of the user, run in processes of their own, so that one that hangs can be ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

from verl_fn.rewards.reward import Answer, RewardError, describe, fingerprint
from verl_fn.rewards.worker import Judged, Row, late

START_SECONDS = 300.0
GRACE_SECONDS = 1.0
DEATH_SECONDS = 2.0


class RewardFunctions:
    """Judges answers by the weighted sum of functions with verl's signature.

    A function is called with the keywords ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info`` and
    returns a number, or a dict with ``score``. It may be ``async``: its rows then run concurrently. One whose
    parameters are verl's batched names (``data_sources`` and so on) is called once, with lists. Processes are kept
    between calls, replaced after a failure, and end with this object or with the process that holds it; subprocesses
    that functions have started end with them, unless they have made a session of their own.

    Scores can be repeated, whatever the number of workers and the order of rows: each call finds ``random`` and
    ``numpy.random`` seeded from the problem's id and source and the text (a batched call from those of all its rows),
    and hashes of texts are the same in every process. Other generators are for the function to seed. State that a
    function keeps between calls is its own affair: each worker has its own, no checkpoint holds it, and scores that
    depend on it break exact resume.

    Args:
        functions: ``module:function`` or ``FILE.py:function``, imported when this object is made.
        weights: of each function's score, by default 1.
        timeout: seconds that one call may take.
        num_workers: processes that share the rows.
        folder: what modules and files are looked up from, by default the current directory.

    Raises:
        RewardError: a function is not found or cannot be called so.
    """

    def __init__(
        self,
        functions: Sequence[str],
        weights: Sequence[float] = (),
        timeout: float = 30.0,
        num_workers: int = 1,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._functions, self._names = tuple(functions), _names(functions)
        self._weights = tuple(weights) or (1.0,) * len(functions)
        self._timeout, self._num_workers = timeout, num_workers
        self._folder = str(Path(folder or ".").resolve())
        self._workers: list[_Worker] = []
        self._kinds: list[str] = []
        weakref.finalize(self, _stop, self._workers)
        # The first process starts now, so that a wrong name ends a run before it has sampled anything.
        self._start(1)

    def __call__(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """``score``, ``acc``, ``pred`` and metrics of each answer.

        Raises:
            RewardError: a function raised, hung, ended its process, or returned something else than its contract
                says; the message names the function and the answer.
        """
        rows = [
            {
                "data_source": a.problem.data_source,
                "solution_str": a.text,
                "ground_truth": a.problem.answer,
                "extra_info": dict(a.problem.extra_info),
            }
            for a in answers
        ]
        seeds = [fingerprint(f"{a.problem.id} {a.problem.data_source} {a.text}") % 2**32 for a in answers]
        results: list[list[Judged]] = [[(0.0, None, None, {})] * len(rows) for _ in self._functions]
        try:
            self._run(self._calls(len(rows)), answers, rows, seeds, results)
        except BaseException:
            # What the others have not yet answered must not be taken for answers to the next call.
            _stop(self._workers)
            raise
        return [self._combined(a, [of[i] for of in results]) for i, a in enumerate(answers)]

    def _calls(self, rows: int) -> list[_Call]:
        calls = []
        for number, kind in enumerate(self._kinds):
            shares = min(1 if kind == "batched" else self._num_workers, rows)
            calls += [_Call(number, list(range(rows))[share::shares]) for share in range(shares)]
        return calls

    def _run(
        self,
        calls: Sequence[_Call],
        answers: Sequence[Answer],
        rows: Sequence[Row],
        seeds: Sequence[int],
        results: list[list[Judged]],
    ) -> None:
        self._start(min(self._num_workers, len(calls)))
        idle, pending = list(self._workers), deque(calls)
        busy: dict[Connection, tuple[_Worker, _Call]] = {}
        while pending or busy:
            while idle and pending:
                worker, call = idle.pop(), pending.popleft()
                busy[worker.connection] = worker, call
                self._extend(call)
                try:
                    worker.connection.send((call.function, [(rows[i], seeds[i]) for i in call.rows]))
                except OSError:
                    raise self._failure(call, worker.death(), answers) from None
            first = min(call.deadline for _, call in busy.values())
            ready = wait(list(busy), max(first - time.monotonic(), 0.0))
            for connection, (worker, call) in list(busy.items()):
                if connection not in ready:
                    if call.deadline < time.monotonic():
                        raise self._failure(call, self._late(call), answers)
                    continue
                try:
                    i, outcome = connection.recv()
                except (EOFError, OSError):
                    raise self._failure(call, worker.death(), answers) from None
                self._extend(call)
                if isinstance(outcome, str):
                    raise self._failure(call, outcome, answers, i)
                if outcome is None:
                    call.left[i] = True
                else:
                    results[call.function][call.rows[i]] = outcome
                    del call.left[i]
                if not call.left:
                    del busy[connection]
                    idle.append(worker)

    def _extend(self, call: _Call) -> None:
        # A worker tells itself of coroutines that are late; its parent comes in where one blocks all the others.
        grace = GRACE_SECONDS if self._kinds[call.function] == "async" else 0.0
        call.deadline = time.monotonic() + self._timeout + grace

    def _late(self, call: _Call) -> str:
        blocks = " and let no other coroutine run" if self._kinds[call.function] == "async" else ""
        return late(self._timeout) + blocks

    def _failure(self, call: _Call, what: str, answers: Sequence[Answer], row: int | None = None) -> RewardError:
        suspects = call.suspects() if row is None else [row]
        where = describe(answers[call.rows[suspects[0]]])
        if self._kinds[call.function] == "batched" and len(call.rows) > 1:
            where = f"a batch of {len(call.rows)} with {where}"
        elif len(suspects) > 1:
            where += f" (or one of {len(suspects) - 1} others that had begun)"
        return RewardError(f"the reward function {self._functions[call.function]} {what}, judging {where}")

    def _combined(self, answer: Answer, judged: Sequence[Judged]) -> dict[str, Any]:
        score = sum(w * of[0] for w, of in zip(self._weights, judged, strict=True))
        acc = next((of[1] for of in judged if of[1] is not None), float(judged[0][0] >= 1.0))
        pred = next((of[2] for of in judged if of[2] is not None), answer.text.strip())
        found = {"score": score, "acc": acc, "pred": pred}
        if len(judged) == 1:
            return found | judged[0][3]
        for name, (own, _, _, extra) in zip(self._names, judged, strict=True):
            found |= {f"{name}/{key}": value for key, value in ({"score": own} | extra).items()}
        return found

    def _start(self, count: int) -> None:
        """Have ``count`` living processes that have loaded the functions."""
        for worker in [w for w in self._workers if not w.lives()]:
            self._workers.remove(worker)
            worker.stop()
        try:
            started = [_Worker(self._folder) for _ in range(count - len(self._workers))]
            self._workers += started
            for worker in started:
                self._kinds = worker.load(self._functions, self._folder, self._timeout)
        except BaseException:
            _stop(self._workers)
            raise


@attrs.define(eq=False)
class _Call:
    """Rows that one worker judges by one function; ``left`` are those not answered, and whether each has begun."""

    function: int
    rows: list[int]
    deadline: float = 0.0
    left: dict[int, bool] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.left = dict.fromkeys(range(len(self.rows)), False)

    def suspects(self) -> list[int]:
        """The rows that may be why no answer comes."""
        return [i for i, begun in self.left.items() if begun] or list(self.left)[:1]


class _Worker:
    """A process that runs reward functions, and the connection to it."""

    def __init__(self, folder: str) -> None:
        self.connection, theirs = Pipe()
        lifeline, self._alive = Pipe(duplex=False)
        with theirs, lifeline:
            ends = theirs.fileno(), lifeline.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "verl_fn.rewards.worker", *map(str, ends)],
                stdin=subprocess.DEVNULL,
                # What functions print goes where errors go, past progress lines and protocol.
                stdout=2,
                pass_fds=ends,
                cwd=folder,
                # Else a score by way of a set's order could not be repeated.
                env=os.environ | {"PYTHONHASHSEED": "0"},
                # Ctrl-C is for the driver, which then ends its workers, each with its group.
                process_group=0,
            )

    def load(self, functions: Sequence[str], folder: str, timeout: float) -> list[str]:
        """The kind of each function, once it is loaded."""
        try:
            self.connection.send((folder, functions, timeout))
            if not self.connection.poll(START_SECONDS):
                raise RewardError(f"importing reward.functions took longer than {START_SECONDS:g} s")
            told = self.connection.recv()
        except (EOFError, OSError):
            raise RewardError(f"importing reward.functions {self.death()}") from None
        if isinstance(told, str):
            raise RewardError(f"reward.functions: {told}")
        return told

    def lives(self) -> bool:
        """Whether the process has not ended."""
        # Not poll: until stop has it reaped, no other process or group can be given its number.
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def death(self) -> str:
        """Say how the process, whose connection has closed, has ended; end it where it has not."""
        # The connection closes a little before the process has ended: a kill now would hide how.
        patience = time.monotonic() + DEATH_SECONDS
        while (lives := self.lives()) and time.monotonic() < patience:
            time.sleep(0.01)
        self.stop()
        if lives:
            return "closed the connection of its process (has it closed files that it had not opened?)"
        code = self._process.returncode
        names = {one.value: one.name for one in signal.Signals}
        return "ended its process with " + (f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}"))

    def stop(self) -> None:
        """End the process, and those that its functions have started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # It may have left its group.
            self._process.kill()
            self._process.wait()
        self.connection.close()
        self._alive.close()


def _stop(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


def _names(functions: Sequence[str]) -> list[str]:
    """Short names for metrics: the function's, with its module's before it where several have the same."""
    short = [spec.rpartition(":")[2] for spec in functions]
    count = Counter(short)
    stems = [Path(spec.rpartition(":")[0]).name.removesuffix(".py").rpartition(".")[2] for spec in functions]
    names = [name if count[name] == 1 else f"{stem}.{name}" for stem, name in zip(stems, short, strict=True)]
    double = [name for name, times in Counter(names).items() if times > 1]
    if double:
        raise RewardError(f"reward.functions has {double[0]} twice; their metrics need different names")
    return names
