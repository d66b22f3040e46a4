"""The trainer's side of worker processes without any process: variables, messages in parts, and failed work."""

import socket
import time

import pytest

from verl_fn.pool import pool, worker
from verl_fn.pool.pool import Work, Worker, WorkerFailed, WorkerHangs


def test_processes_get_variables_by_name_and_pattern_and_never_the_rest(monkeypatch):
    given = {
        "PATH": "/bin", "LC_ALL": "C", "MKL_NUM_THREADS": "3", "PYTHONPATH": "/own", "VIRTUAL_ENV": "/venv",
        "PYTHONHASHSEED": "7", "HF_HOME": "/hub", "HF_TOKEN": "secret", "MY_KEY": "secret", "MY_PATH": "/",
        "lc_x": "1",
    }  # fmt: skip
    monkeypatch.setattr(pool.os, "environ", given)
    usual = {name: given[name] for name in ("PATH", "LC_ALL", "MKL_NUM_THREADS", "HF_HOME")} | {"PYTHONHASHSEED": "0"}
    assert pool.environment() == usual | {"PYTHONPATH": "/own", "VIRTUAL_ENV": "/venv"}
    assert pool.environment(["MY_KEY"], same_interpreter=False) == usual | {"MY_KEY": "secret"}
    assert pool.environment(["PYTHONPATH"], same_interpreter=False)["PYTHONPATH"] == "/own"


@pytest.fixture
def ends():
    """A worker without a process, and the other end of its connection."""
    process = Worker.__new__(Worker)
    process.connection, other = socket.socketpair()
    process._received = b""
    process._death = lambda: "has ended"
    with process.connection, other:
        yield process, other


def test_messages_may_come_in_parts_and_together(ends):
    process, other = ends
    assert process.is_ready()
    other.sendall(b'[1, null]\n[1, "a')
    assert process.receive(1.0) == [[1, None]] and not process.is_ready()
    other.sendall(b'b"]\n[2]\n')
    assert process.receive(1.0) == [[1, "ab"], [2]] and process.is_ready()
    for seconds in (-1.0, 0.0, 0.01):
        with pytest.raises(WorkerHangs):
            process.receive(seconds)
    other.sendall(b"no json\n")
    with pytest.raises(WorkerFailed, match="sent b'no json' in place of a result"):
        process.receive(1.0)
    process.send({"a": [1]}, 1.0)
    assert other.recv(99) == b'{"a": [1]}\n'
    with pytest.raises(WorkerHangs):
        process.send("x" * 10**7, 0.01)
    other.close()
    for fails in (lambda: process.receive(1.0), lambda: process.send("x", 1.0)):
        with pytest.raises(WorkerFailed, match="has ended"):
            fails()


class Sent:
    def send(self, message, seconds):
        self.message, self.seconds = message, seconds


def work(places, seconds=50.0):
    """Work, what has ended in it, and the suspects of each failure."""
    ended, failed = [], []
    made = Work(
        places, seconds, lambda open_: ["do", *open_], lambda *end: ended.append(end), lambda *how: failed.append(how)
    )
    return made, ended, failed


def test_work_tells_the_calls_that_may_have_failed_and_repeats_the_others():
    made, ended, failed = work([4, 5, 6, 7])
    assert made.deadline == 0.0
    made.begin(process := Sent())
    assert (process.message, process.seconds) == (["do", 4, 5, 6, 7], 50.0)
    first = made.deadline
    assert first > time.monotonic()
    time.sleep(0.002)
    for message in ([4, None], [4, 1.5], [6, None], [5, None]):
        made.report(message)
    assert made.deadline > first, "each report begins the time of the next"
    assert ended == [(4, 1.5)] and made.open == {5: True, 6: True, 7: False}
    made.report([4, None])  # late, as of an instance that is closed
    made.report([-1, None])
    made.fail("it crashed")
    assert failed == [([5, 6], "it crashed")]
    assert made.open == {6: False, 7: False} and made.deadline == 0.0
    made.begin(process)
    assert process.message == ["do", 6, 7]
    made.fail("")
    assert failed[1:] == [([6], "")] and made.open == {7: False}, "the first, if none has begun"
    for message in ([6, 1.0], [7], {"a": 1}, None, [None, None]):
        with pytest.raises(WorkerFailed, match="in place of a result"):
            made.report(message)
    with pytest.raises(WorkerFailed, match=r"^no such module$"):
        made.report("no such module")
    made.report([7, None])
    made.report([7, {"end": [1, 1]}])
    assert made.open == {} and ended[1:] == [(7, {"end": [1, 1]})]


def test_garbage_is_shown_in_short():
    said = pool._garbled(b"x" * 1000)
    assert len(said) < 200 and said.startswith("sent b'xxxx") and "xxxx' in place of a result" in said
    assert worker.short("a" * 10, 10) == "a" * 10
