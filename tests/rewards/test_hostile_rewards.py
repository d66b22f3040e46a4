"""Hostile reward functions: each ends in a score or in one line of error, and leaves nothing behind."""

import os
import re
import select
import shutil
import sys
from pathlib import Path

import pytest

from verl_fn.data.tasks import Problem
from verl_fn.pool.pool import Worker, environment
from verl_fn.rewards.functions import RewardFunctions
from verl_fn.rewards.reward import Answer, RewardError

TIMEOUT = 1.0

# What stays inside the call: a score, or what the error says.
CALLS = {
    "text": "returned a Text, '1.0'; it must return a number",
    "number": 0.5,
    "text_as_key": 1.0,
    "text_as_pred": 1.0,
    "command": "returned a Command, <.*; it must return a number",
    "command_as_metric": 'returned a Command, <.* as "mine"; it must be a number',
    "command_in_a_list": 1.0,
    "pair": r"returned \(1.0, 2.0\); it must return a number",
    "octets": "returned b'1'; it must return a number",
    "key_of_tuple": r"returned a dict with the key \(1, 2\); keys must be strings",
    "key_of_none": "returned a dict with the key None; keys must be strings",
    "metric_of_bytes": "returned b'1' as \"mine\"; it must be a number",
    "shapeless": "raised ZeroDivisionError: no number",
    "unspeakable": "raised ValueError: no text",
    "liar": "raised OSError: no class",
    "broken_mapping": "raised MemoryError: no key",
    "huge": r"returned 1e\+300; it must return a number between",
    "huge_whole": "raised ValueError: Exceeds the limit",
    "long_pred": 1.0,
    "many_metrics": 1.0,
    "generator": "returned <generator .*; it must return a number",
    "a_class": "returned <class .*; it must return a number",
    "unique": "raised Unique: mine",
    "silent": r"raised Silent: \(it has no message, since __str__ raised SystemExit\)",
    "interrupt": "raised KeyboardInterrupt",
    "closes": "raised GeneratorExit",
    "sys_exit": "raised SystemExit: so long",
    "long_message": "raised ValueError: x x x .* x x",
    "allocates": "raised MemoryError",
    "recurses": "raised RecursionError",
    "coroutine": "raised CancelledError",
    "changes_its_input": 1.0,
    "prints_megabytes": 1.0,
    "redirects_stdout": 1.0,
    "changes_folder": 1.0,
    "is_the_first_to_end_without_memory": 1.0,
    "exits_in_a_thread": 1.0,
    "leaves_a_thread": 1.0,
    "registers_an_exit": 1.0,
    "forks": 1.0,
    "forks_many": 1.0,
    "forks_and_raises_in_the_copy": 1.0,
    "drops_stdout": 1.0,
    "replaces_json": 1.0,
}

# What may end the process, damage the connection to it, or never end.
LATE = r"took longer than reward.timeout \(1 s\)"
SENT = r"sent .* in place of a result \(has it written to files that it had not opened\?\)"
PROCESSES = {
    "exits": "ended its process with exit code 0",
    "aborts": "ended its process with SIGABRT",
    "reads_null": "ended its process with SIGSEGV",
    "kills_its_group": "ended its process with SIGKILL",
    "kills_its_keeper": "ended its process with SIGKILL",
    "stops_itself": LATE,
    "sleeps": LATE,
    "endless_mapping": LATE,
    "ignores_signals": LATE,
    "closes_descriptors": "closed the connection of its process",
    "closes_the_rest": "closed the connection of its process",
    "writes_garbage": SENT,
    "writes_lines": SENT,
    "writes_without_end": LATE,
    "writes_slowly": LATE,
    "writes_from_a_thread": SENT,
    "raises_later": f"raised Unique: later|{SENT}",
    "replaces_builtins": "ended its process with exit code|raised TypeError",
    "forgets_modules": 1.0,
    "limits_files": 1.0,
    "starts_a_session": LATE,
    "starts_a_session_and_returns": 1.0,
    "starts_a_session_and_exits": "ended its process with exit code 1",
    "forks_twice": LATE,
    "leaves_its_group": "ended its process|took longer",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copy(Path(__file__).with_name("hostile_rewards.py"), folder)
    return folder


def row(name):
    return {"data_source": "src", "solution_str": name, "ground_truth": "", "extra_info": {"seen": []}}


def test_there_are_sixty():
    assert len(CALLS) + len(PROCESSES) >= 60


def test_calls_end_in_a_score_or_a_line(folder, capfd):
    process = Worker("verl_fn.pool.scoring", str(folder), environment(), sys.executable)
    try:
        process.send([str(folder), ["hostile_rewards.py:run"], TIMEOUT, {}], TIMEOUT)
        assert process.receive(60) == [["plain"]]
        process.send([0, [[row(name), 0] for name in CALLS]], TIMEOUT)
        outcomes = {}
        while len(outcomes) < len(CALLS):
            outcomes |= {name: outcome for name, outcome in process.receive(60) if outcome is not None}
    finally:
        process.stop()
    for (name, expected), outcome in zip(CALLS.items(), outcomes.values(), strict=True):
        if isinstance(expected, float):
            assert isinstance(outcome, list) and outcome[0] == expected, (name, outcome)
        else:
            assert isinstance(outcome, str) and re.match(expected, outcome), (name, outcome)
            assert len(outcome) < 1000 and "\n" not in outcome
    assert "Traceback" not in capfd.readouterr().err
    assert not list(folder.glob("**/stolen")) and not Path("stolen").exists()


@pytest.fixture(scope="module")
def functions(folder):
    return RewardFunctions(["hostile_rewards.py:run"], timeout=TIMEOUT, folder=folder)


def assert_nothing_holds(pipe):
    """Waits until no process has the other end of a pipe open."""
    while True:
        try:
            assert os.read(pipe, 1) == b""
            return os.close(pipe)
        except BlockingIOError:
            assert select.select([pipe], [], [], 30)[0]


@pytest.mark.parametrize("name", PROCESSES)
def test_processes_end_in_a_score_or_a_line(functions, folder, capfd, name):
    (folder / "held").unlink(missing_ok=True)
    os.mkfifo(folder / "held")
    pipe = os.open(folder / "held", os.O_RDONLY | os.O_NONBLOCK)
    answers = [Answer(Problem("q", "", 7, "src", {"seen": []}), text) for text in (name, "number")]
    try:
        scores, message = [one["score"] for one in functions(answers)], ""
    except RewardError as error:
        scores, message = [], str(error)
    expected = PROCESSES[name]
    if isinstance(expected, float):
        assert scores == [expected, 0.5], message
        functions._pool.stop()
    else:
        assert re.match(f"the reward function hostile_rewards.py:run ({expected})", message), (scores, message)
        assert "problem 7 of 'src'" in message and "\n" not in message and len(message) < 1000
    assert_nothing_holds(pipe)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("os._exit(3)", "ended its process with exit code 3"),
        ("os.closerange(3, 256)", "closed the connection of its process"),
        ("hostile_rewards.writes_garbage(None)", SENT),
        ("os.fork()", None),
    ],
)
def test_modules_that_do_harm_when_they_are_imported(folder, capfd, line, expected):
    (folder / "harm.py").write_text(f"import os, hostile_rewards\nrun = hostile_rewards.run\n{line}\n")
    message = ""
    try:
        functions = RewardFunctions(["harm.py:run"], timeout=TIMEOUT, folder=folder)
        assert functions([Answer(Problem("q", "", 7, "src"), "number")])[0]["score"] == 0.5
    except RewardError as error:
        message = str(error)
    assert re.match(f"importing reward.functions {expected}" if expected else "$", message), message
    assert "\n" not in message and "Traceback" not in capfd.readouterr().err
