"""Reward functions of the user: called as verl calls them, apart from the trainer, and ended when they hang."""

import gc
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl_fn.reward_functions import RewardFunctions
from verl_fn.reward_worker import judged
from verl_fn.rewards import Answer, RewardError
from verl_fn.tasks import Problem

MINE = """
import asyncio
import os
import re
import time

from helper import same

event = None


def exact(data_source, solution_str, ground_truth, extra_info=None):
    print("exact was here")
    return same(solution_str, ground_truth)


def full(data_source, solution_str, ground_truth, extra_info=None):
    return {
        "score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str.upper(),
        "length": len(solution_str), "level": extra_info["level"], "from_src": data_source == "src", "note": "a text",
    }


async def meeting(data_source, solution_str, ground_truth, extra_info=None):
    global event
    event = event or asyncio.Event()
    # The first waits for the last: one after the other would never end.
    if solution_str == "last":
        event.set()
    await event.wait()
    return len(solution_str)


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(solution_strs) + len(text) for text in solution_strs]


def short_by_one(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0] * (len(solution_strs) - 1)


def process(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0, "pid": os.getpid()}


def takes_a_while(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.4)
    return 1


def sleeps(data_source, solution_str, ground_truth, extra_info=None):
    return time.sleep(1000) if solution_str == "bad" else 1


def backtracks(data_source, solution_str, ground_truth, extra_info=None):
    print("backtracks was here")
    return 1 if solution_str != "bad" else bool(re.match(r"(a+)+$", "a" * 60 + "b"))


async def waits(data_source, solution_str, ground_truth, extra_info=None):
    return await asyncio.sleep(1000) if solution_str == "bad" else 1


async def blocks(data_source, solution_str, ground_truth, extra_info=None):
    return time.sleep(1000) if solution_str == "bad" else 1


def batch_sleeps(data_sources, solution_strs, ground_truths, extra_infos):
    time.sleep(1000)


def raises(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        return int(same)  # the line that is named
    return 1


async def times_out_itself(data_source, solution_str, ground_truth, extra_info=None):
    raise TimeoutError("no answer from the judge")


def exits(data_source, solution_str, ground_truth, extra_info=None):
    return os._exit(3) if solution_str == "bad" else 1


def crashes(data_source, solution_str, ground_truth, extra_info=None):
    return os.kill(os.getpid(), 11) if solution_str == "bad" else 1


def quits(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(1)


def returns(data_source, solution_str, ground_truth, extra_info=None):
    return eval(ground_truth) if solution_str == "bad" else 1


def three(data_source, solution_str, ground_truth):
    return 1
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with the functions above in mine.py, and the helper that they import."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("def same(a, b):\n    return a == b\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answers(*texts, truth="good"):
    return [Answer(Problem("q", truth, 10 + i, "src", {"level": i}), text) for i, text in enumerate(texts)]


def failure(functions, *texts, truth="good"):
    with pytest.raises(RewardError) as error:
        functions(answers(*texts, truth=truth))
    return str(error.value)


def scores(functions, *texts):
    return [one["score"] for one in functions(answers(*texts))]


def test_a_number_is_the_score_and_the_text_the_prediction(here):
    found = RewardFunctions(["mine.py:exact"])(answers("good", " bad\n"))
    assert found == [{"score": 1.0, "acc": 1.0, "pred": "good"}, {"score": 0.0, "acc": 0.0, "pred": "bad"}]


def test_a_dict_gives_score_accuracy_prediction_and_metrics(here):
    found = RewardFunctions(["mine.py:full"])(answers("good", "no"))
    assert found == [
        {"score": 0.5, "acc": 1.0, "pred": "GOOD", "length": 4.0, "level": 0.0, "from_src": 1.0},
        {"score": 0.5, "acc": 0.0, "pred": "NO", "length": 2.0, "level": 1.0, "from_src": 1.0},
    ]


def test_a_module_is_found_in_the_current_folder(here):
    assert scores(RewardFunctions(["mine:exact"]), "good", "bad") == [1.0, 0.0]


def test_a_file_elsewhere_finds_its_neighbours(here, monkeypatch):
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert scores(RewardFunctions(["../mine.py:exact"]), "good", "bad") == [1.0, 0.0]
    assert scores(RewardFunctions([f"{here}/mine.py:exact"]), "good") == [1.0]


def test_files_in_the_folder_do_not_stand_in_for_the_workers_own_libraries(here):
    (here / "difflib.py").write_text("raise RuntimeError('not this one')\n")
    assert scores(RewardFunctions(["mine.py:exact"]), "good") == [1.0]


def test_what_functions_print_does_not_mix_with_results(here, capfd):
    assert scores(RewardFunctions(["mine.py:exact"]), "good") == [1.0]
    assert capfd.readouterr() == ("", "exact was here\n")


def test_rows_of_an_async_function_run_together(here):
    assert scores(RewardFunctions(["mine.py:meeting"]), "first", "", "last") == [5.0, 0.0, 4.0]


def test_a_batched_function_is_called_once_with_lists(here):
    assert scores(RewardFunctions(["mine.py:batched"], num_workers=2), "a", "bb", "ccc") == [4.0, 5.0, 6.0]


def test_rows_are_split_over_workers_that_stay_and_scores_keep_their_order(here):
    functions = RewardFunctions(["mine.py:process"], num_workers=2)
    first, second = ([one["pid"] for one in functions(answers(*"abcde"))] for _ in range(2))
    assert len(set(first)) == 2
    assert set(first) == set(second)
    assert os.getpid() not in first
    many = [f"{'x' * n}" for n in range(50)]
    assert scores(RewardFunctions(["mine.py:batched", "mine.py:full"], (1, 2), num_workers=2), *many) == [
        50 + n + 1 for n in range(50)
    ]


def test_the_total_is_weighted_and_each_function_has_its_metrics(here):
    found = RewardFunctions(["mine.py:exact", "mine.py:full"], (2.0, 0.1))(answers("good"))
    assert found == [
        {
            "score": pytest.approx(2.05), "acc": 1.0, "pred": "GOOD", "exact/score": 1.0, "full/score": 0.5,
            "full/length": 4.0, "full/level": 0.0, "full/from_src": 1.0,
        }
    ]  # fmt: skip


def test_accuracy_is_of_the_first_function_unless_one_gives_it(here):
    assert RewardFunctions(["mine.py:batched", "mine.py:exact"])(answers("x"))[0]["acc"] == 1.0
    assert RewardFunctions(["mine.py:batched", "mine.py:full"])(answers("x"))[0]["acc"] == 0.0


def test_functions_of_one_name_are_told_apart_by_their_files(here):
    (here / "other.py").write_text((here / "mine.py").read_text().replace("len(text)", "0"))
    found = RewardFunctions(["mine.py:batched", "other.py:batched"])(answers("abc"))[0]
    assert (found["mine.batched/score"], found["other.batched/score"]) == (4.0, 1.0)
    with pytest.raises(RewardError, match=r"has mine\.exact twice"):
        RewardFunctions(["mine.py:exact", "mine:exact"])


@pytest.mark.parametrize("name", ["sleeps", "backtracks", "waits", "blocks"])
def test_a_function_that_hangs_is_ended_and_named_with_its_row(here, name):
    functions = RewardFunctions([f"mine.py:{name}"], timeout=1.0)
    text = failure(functions, "good", "bad", "good")
    assert text.startswith(f"the reward function mine.py:{name} took longer than reward.timeout (1 s)")
    assert text.endswith("judging problem 11 of 'src', response 'bad'")
    assert ("let no other coroutine run" in text) == (name == "blocks")
    assert scores(functions, "good", "good") == [1.0, 1.0]


def test_a_batched_function_that_hangs_names_its_batch(here):
    text = failure(RewardFunctions(["mine.py:batch_sleeps"], timeout=0.5), "a", "b")
    assert "batch_sleeps took longer than reward.timeout (0.5 s), judging a batch of 2 with problem 10" in text


def test_the_limit_is_of_a_call_not_of_the_batch(here):
    # Together these take longer than the limit.
    assert scores(RewardFunctions(["mine.py:takes_a_while"], timeout=1.5), *"abcde") == [1.0] * 5


def test_what_a_function_raises_is_told_with_the_line_of_its_author(here):
    functions = RewardFunctions(["mine.py:raises"])
    line = 1 + MINE.splitlines().index("        return int(same)  # the line that is named")
    text = failure(functions, "good", "bad")
    assert "mine.py:raises raised TypeError: int() argument must be" in text
    assert f"(at {here}/mine.py:{line}), judging problem 11 of 'src', response 'bad'" in text
    assert scores(functions, "good") == [1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("times_out_itself", "raised TimeoutError: no answer from the judge"),
        ("exits", "ended its process with exit code 3"),
        ("crashes", "ended its process with SIGSEGV"),
        ("quits", "raised SystemExit: 1"),
        ("short_by_one", "returned 1 results for 2 responses"),
    ],
)
def test_other_failures_say_what_happened(here, name, message):
    functions = RewardFunctions([f"mine.py:{name}", "mine.py:exact"])
    for _ in range(2):  # the second meets a fresh process
        assert f"the reward function mine.py:{name} {message}" in failure(functions, "good", "bad")


@pytest.mark.parametrize("score", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_scores_may_be_any_kind_of_number(score):
    assert judged(score) == (0.5, None, None, {})
    assert judged({"score": score, "acc": np.bool_(True), "half": score}) == (0.5, 1.0, None, {"half": 0.5})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), 'returned nan; it must return a finite number, or a dict with "score"'),
        (-float("inf"), "returned -inf; it must"),
        (10**400, "returned 1000"),
        (None, "returned None; it must"),
        ("1.0", "returned '1.0'; it must"),
        ([1.0], "returned [1.0]; it must"),
        (1j, "returned 1j; it must"),
        ({"acc": 1}, "returned {'acc': 1}; it must"),
        ({"score": "1"}, "returned {'score': '1'}; it must"),
        ({"score": float("nan")}, 'returned nan as "score"; it must be finite'),
        ({"score": 1, "acc": "yes"}, "returned 'yes' as \"acc\"; it must be a number"),
        ({"score": 1, "length": float("inf")}, 'returned inf as "length"; it must be finite'),
    ],
)
def test_results_that_are_no_scores_are_refused(value, message):
    assert judged(value).startswith(message)


@pytest.mark.parametrize("value", ["float('nan')", "{'points': 1}"])
def test_a_refused_result_is_told_with_its_row(here, value):
    text = failure(RewardFunctions(["mine.py:returns"]), "good", "bad", truth=value)
    assert text.startswith("the reward function mine.py:returns returned ")
    assert text.endswith(
        "; it must return a finite number, or a dict with \"score\", judging problem 11 of 'src', response 'bad'"
    )


def test_a_long_response_is_shortened_in_errors(here):
    text = failure(RewardFunctions(["mine.py:quits"]), "begin" + "x" * 10_000 + "end")
    assert "response 'beginxx" in text and text.endswith("xxend'") and len(text) < 500


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py:exat", r"mine\.py has no function 'exat'; did you mean exact\?"),
        ("mine:exat", r"mine has no function 'exat'; did you mean exact\?"),
        ("mime.py:exact", r"there is no file /.*/mime\.py; did you mean mine\.py\?"),
        ("mime:exact", r"there is no module 'mime', seen from /.*; did you mean mine\?"),
        ("mine", r"'mine' is not of the form module:function or FILE\.py:function"),
        ("mine.py:three", r"mine\.py:three cannot be called with the keywords .*'extra_info'"),
        ("broken.py:f", r"importing broken\.py raised SyntaxError: .*\(broken\.py, line 2\)"),
        ("needy:f", r"importing needy raised ModuleNotFoundError: .*'nowhere' \(at /.*/needy\.py:3\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(here, spec, message):
    (here / "broken.py").write_text("\ndef f(:\n")
    (here / "needy.py").write_text("\n\nimport nowhere\n")
    with pytest.raises(RewardError, match=message):
        RewardFunctions([spec])


def test_a_worker_that_was_killed_between_batches_is_replaced(here):
    functions = RewardFunctions(["mine.py:process"])
    pid = int(functions(answers("a"))[0]["pid"])
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert functions(answers("a"))[0]["pid"] != pid


def test_workers_end_with_their_object(here):
    functions = RewardFunctions(["mine.py:process"])
    pid = int(functions(answers("a"))[0]["pid"])
    del functions
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_even_a_worker_that_hangs_ends_when_its_trainer_is_killed(here):
    (here / "trainer.py").write_text(
        "from verl_fn.reward_functions import RewardFunctions\n"
        "from verl_fn.rewards import Answer\n"
        "from verl_fn.tasks import Problem\n"
        "RewardFunctions(['mine.py:backtracks'], timeout=1000)([Answer(Problem('q', 'good'), 'bad')])\n"
    )
    trainer = subprocess.Popen([sys.executable, "trainer.py"], stderr=subprocess.PIPE, text=True)
    assert any(line == "backtracks was here\n" for line in trainer.stderr)
    trainer.kill()
    # The worker holds the other end of this pipe for as long as it lives.
    trainer.communicate(timeout=60)


def test_the_worker_does_not_import_torch():
    code = "import sys, verl_fn.reward_worker; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
