"""Environments in their processes: conversations of several calls, and what hangs or crashes fails alone."""

import os
import sys
import threading
import time
import venv
from pathlib import Path

import attrs
import pytest

from verl_fn.environments import Done, processes
from verl_fn.environments.processes import EnvError, EnvProcesses, Failure, Job, Opening

FOLDER = Path(__file__).parent
PROBLEM = {"prompt": "2+3?", "answer": "5", "id": 0, "data_source": "s", "extra_info": {}}


@pytest.fixture(scope="module")
def run():
    return EnvProcesses("talkers.py:Talker", timeout=3.0, num_workers=2, folder=FOLDER)


def begun(run, count):
    jobs = [Job(i, 10 + i, PROBLEM) for i in range(count)]
    assert [result[0]["content"] for result in run(jobs)] == ["2+3?"] * count
    return jobs


def replied(run, jobs, *replies):
    jobs = [attrs.evolve(job, replies=(*job.replies, reply)) for job, reply in zip(jobs, replies, strict=True)]
    return jobs, run(jobs)


def test_an_instance_serves_its_conversation_to_the_end(run):
    jobs = begun(run, 3)
    jobs, results = replied(run, jobs, "a", "done", "c")
    assert results[0][0]["content"].startswith("1 ") and results[1] == Done(1.0, 1.0)
    _, (first, third) = replied(run, [jobs[0], jobs[2]], "done", "x")
    assert first == Done(2.0, 1.0) and third[0]["content"].startswith("2 ")


def test_what_fails_fails_alone_and_the_others_are_repeated(run):
    jobs = begun(run, 6)
    jobs, before = replied(run, jobs, *"abcdef")
    jobs, results = replied(run, jobs, "hang", "crash", "go", "raise", "go", "number")
    assert results[0] == Failure("env_timed_out", "took longer than env.timeout (3 s)")
    assert results[1] == Failure("env_crashed", "ended its process with exit code 3")
    assert "raised KeyError: 'no such tool' (at " in results[3].problem and "talkers.py:" in results[3].problem
    assert results[5].problem.startswith("returned 7; it must return a list of messages, each")
    # Their processes were replaced, and the random numbers of their first calls are the same again.
    for i in (2, 4):
        content = results[i][0]["content"]
        assert content.startswith("2 ") and content.split()[1] == before[i][0]["content"].split()[1]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("nan", "both must be finite"),
        ("assistant", "the model's own"),
        ("nested", "has them in problem.prompt: return that list"),
        ("text", "returned Done with '0.5'; reward and acc must be numbers"),
        ("acc", "returned Done with '1'; reward and acc must be numbers"),
        ("half", "returned messages that cannot be JSON ('utf-8' codec can't encode character"),
    ],
)
def test_what_is_neither_messages_nor_an_end_is_a_failure(run, reply, problem):
    _, (result,) = replied(run, begun(run, 1), reply)
    assert result.reason == "env_crashed" and problem in result.problem


def test_an_error_about_a_ground_truth_of_json_says_how_it_is_read(run):
    job = Job(0, 1, {**PROBLEM, "answer": '{"a": 1}'}, replies=("raise",))
    (result,) = run([job])
    assert result.problem.endswith("json.loads(problem.answer) reads it") and "KeyError" in result.problem


def test_an_environment_that_crashes_at_once(run):
    results = run([Job(0, 1, PROBLEM | {"prompt": "crash"}), Job(1, 1, PROBLEM)])
    assert results[0].reason == "env_crashed" and results[1][0]["content"] == "2+3?"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("talker.py:Talker", "there is no file .*talker.py; did you mean talkers.py"),
        ("talkers.py:Talkr", "has no class 'Talkr'; did you mean Talker"),
        ("talkers.py:Stepless", "has no method step"),
        ("talkers.py:END", "END of talkers.py is .* and no class"),
        ("talkers.py:WithArguments", "cannot be made with env.arguments \\(no arguments\\): missing .* 'size'"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(name, message):
    with pytest.raises(EnvError, match=f"env.name: .*{message}"):
        EnvProcesses(name, folder=FOLDER)


def test_a_variable_that_is_not_set_is_refused():
    with pytest.raises(EnvError, match=r"env\.variables names NO_SUCH_KEY"):
        EnvProcesses("talkers.py:Talker", folder=FOLDER, variables=["NO_SUCH_KEY"])


def test_arguments_tools_and_the_end_of_an_instance(tmp_path):
    arguments = {"size": 2, "log": str(tmp_path / "log")}
    run = EnvProcesses("talkers.py:Caller", folder=FOLDER, arguments=arguments)
    jobs = [Job(i, i, PROBLEM) for i in range(2)]
    (opened, _) = run(jobs)
    assert isinstance(opened, Opening) and [m["content"] for m in opened.messages] == ["2", "2+3?"]
    assert opened.tools[0]["function"]["name"] == "add"
    results = run([attrs.evolve(job, replies=(reply,)) for job, reply in zip(jobs, ("x", "fail"), strict=True)])
    assert results[0] == Done(2.0, 1.0) and results[1].reason == "env_crashed"
    assert (tmp_path / "log").read_text() == "closed\n" * 2
    run([Job(0, 0, PROBLEM)])
    run([Job(0, 1, PROBLEM)])
    assert (tmp_path / "log").read_text() == "closed\n" * 3, "the conversation that was left"


def test_each_instance_that_is_closed_has_the_time_of_a_call(tmp_path):
    arguments = {"size": 2, "log": str(tmp_path / "log"), "closing": 1.0}
    run = EnvProcesses("talkers.py:Caller", 2.5, folder=FOLDER, arguments=arguments)
    run([Job(i, i, PROBLEM) for i in range(3)])
    assert isinstance(run([Job(0, 3, PROBLEM)])[0], Opening)
    assert (tmp_path / "log").read_text() == "closed\n" * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"sice": 1}, r"cannot be made with env.arguments \(sice\)"), ({"size": {1}}, "env.arguments cannot be JSON")],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, message):
    with pytest.raises(EnvError, match=message):
        EnvProcesses("talkers.py:Caller", folder=FOLDER, arguments=arguments)


BARE = """
import os
import sys


class Bare:
    def reset(self, problem):
        try:
            import numpy
        except ImportError:
            pass
        else:
            raise RuntimeError(numpy.__file__)
        return [{"role": "user", "content": sys.prefix + " " + os.environ.get("PYTHONPATH", "")}]

    def step(self, reply):
        class Done:
            reward, acc = 1.0, 0.5

        return Done()
"""


def test_environments_run_in_an_interpreter_without_any_package_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    venv.create(tmp_path / "own", with_pip=False)
    (tmp_path / "bare.py").write_text(BARE)
    run = EnvProcesses("bare.py:Bare", folder=tmp_path, python=str(tmp_path / "own/bin/python"))
    (opened,) = run([Job(0, 0, PROBLEM)])
    assert opened == ({"role": "user", "content": f"{tmp_path / 'own'} "},)
    assert run([Job(0, 0, PROBLEM, ("5",))]) == [Done(1.0, 0.5)]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (None, r"cannot be run \(No such file or directory\)"),
        ("echo hello", "is no Python interpreter"),
        ("echo 3 9", "is Python 3.9, and environments need Python 3.11 or later"),
        ("echo 3 12; exit 1", "is no Python interpreter"),
        ("exec sleep 60", "did not start within 0.2 s; set it to the interpreter of a virtual environment"),
    ],
)
def test_interpreters_that_cannot_be_used_are_refused(tmp_path, program, message, monkeypatch):
    python = tmp_path / "python"
    monkeypatch.setattr(processes, "INTERPRETER_SECONDS", 0.2 if program and "sleep" in program else 60.0)
    if program:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    with pytest.raises(EnvError, match=f"env.python: {python} {message}"):
        EnvProcesses("talkers.py:Talker", folder=FOLDER, python=str(python))


def test_the_oldest_python_that_runs_environments_is_accepted(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3 11\n")
    python.chmod(0o755)
    processes.check_interpreter(str(python))


def test_a_call_that_was_cancelled_ends_long_before_its_time_limit():
    slow = EnvProcesses("talkers.py:Talker", timeout=60.0, folder=FOLDER)
    jobs, began = begun(slow, 1), time.monotonic()
    threading.Timer(0.2, slow.cancelled.set).start()
    with pytest.raises(EnvError, match="cancelled"):
        replied(slow, jobs, "hang")
    assert time.monotonic() - began < 20
    slow.cancelled.clear()
    begun(slow, 1)
