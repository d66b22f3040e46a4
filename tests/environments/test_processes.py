"""Environments in their processes: conversations of several calls, and what hangs or crashes fails alone."""

from pathlib import Path

import attrs
import pytest

from verl_fn.environments.processes import End, EnvError, EnvProcesses, Failure, Job

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
    assert results[0][0]["content"].startswith("1 ") and results[1] == End(1.0, 1.0)
    _, (first, third) = replied(run, [jobs[0], jobs[2]], "done", "x")
    assert first == End(2.0, 1.0) and third[0]["content"].startswith("2 ")


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


@pytest.mark.parametrize(("reply", "problem"), [("nan", "both must be finite"), ("assistant", "the model's own")])
def test_what_is_neither_messages_nor_an_end_is_a_failure(run, reply, problem):
    _, (result,) = replied(run, begun(run, 1), reply)
    assert result.reason == "env_crashed" and problem in result.problem


def test_an_environment_that_crashes_at_once(run):
    results = run([Job(0, 1, PROBLEM | {"prompt": "crash"}), Job(1, 1, PROBLEM)])
    assert results[0].reason == "env_crashed" and results[1][0]["content"] == "2+3?"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("talker.py:Talker", "there is no file .*talker.py; did you mean talkers.py"),
        ("talkers.py:Talkr", "has no class 'Talkr'; did you mean Talker"),
        ("talkers.py:Stepless", "has no method step"),
        ("talkers.py:WithArguments", "made without arguments: missing a required argument: 'size'"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(name, message):
    with pytest.raises(EnvError, match=f"env.name: .*{message}"):
        EnvProcesses(name, folder=FOLDER)


def test_a_variable_that_is_not_set_is_refused():
    with pytest.raises(EnvError, match=r"env\.variables names NO_SUCH_KEY"):
        EnvProcesses("talkers.py:Talker", folder=FOLDER, variables=["NO_SUCH_KEY"])
