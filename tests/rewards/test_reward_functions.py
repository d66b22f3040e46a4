"""Reward functions of the user: called as verl calls them, apart from the trainer, and ended when they hang."""

import datetime
import gc
import os
import select
import shutil
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_fn.config import ConfigError
from verl_fn.config.schema import RewardConfig
from verl_fn.data.tasks import Problem
from verl_fn.pool.scoring import outcome_of
from verl_fn.pool.worker import Failed
from verl_fn.rewards.functions import RewardFunctions
from verl_fn.rewards.reward import Answer, RewardError

MINE = Path(__file__).with_name("user_rewards.py")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with the functions of user_rewards.py in mine.py, and the helper that they import."""
    shutil.copy(MINE, tmp_path / "mine.py")
    (tmp_path / "helper.py").write_text("def same(a, b):\n    return a == b\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answers(*texts, truth="good"):
    return [Answer(Problem("q", truth, 10 + i, "src", {"level": i}), text) for i, text in enumerate(texts)]


def failure(functions, *texts, truth="good"):
    with pytest.raises(RewardError) as error:
        functions(answers(*texts, truth=truth))
    return str(error.value)


@pytest.fixture
def held(here):
    """Tells whether all processes that opened the pipe ``held`` have ended, waiting for it."""
    os.mkfifo(here / "held")
    ours = os.open(here / "held", os.O_RDONLY | os.O_NONBLOCK)
    yield lambda: bool(select.select([ours], [], [], 30)[0]) and os.read(ours, 1) == b""
    os.close(ours)


def scores(functions, *texts):
    return [one["score"] for one in functions(answers(*texts))]


def test_a_number_is_the_score_and_the_text_the_prediction(here):
    found = RewardFunctions(["mine.py:exact"])(answers("good", " bad\n"))
    assert found == [{"score": 1.0, "pred": "good"}, {"score": 0.0, "pred": "bad"}]


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


def test_rows_of_one_problem_share_nothing(here):
    (here / "grows.py").write_text(
        "def grows(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    extra_info['seen'].append(solution_str)\n"
        "    return len(extra_info['seen'])\n"
    )
    problem = Problem("q", "good", 10, "src", {"seen": []})
    rows = [Answer(problem, text) for text in "abc"]
    assert [one["score"] for one in RewardFunctions(["grows.py:grows"])(rows)] == [1.0, 1.0, 1.0]


def test_extra_info_that_cannot_be_json_is_named(here):
    rows = [Answer(Problem("q", "good", 10, "src", {"set": {1}}), "bad")]
    with pytest.raises(RewardError, match=r"extra_info cannot be JSON .*set.*, judging problem 10 of 'src'"):
        RewardFunctions(["mine.py:exact"])(rows)


def test_workers_get_no_keys_but_those_that_are_named(here, monkeypatch):
    (here / "env.py").write_text(
        "import os\n"
        "def env(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1, **{name: 1 for name in os.environ if 'KEY' in name or name in ('HOME', 'PATH')}}\n"
    )
    for name in ("WANDB_API_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    usual = {"HOME", "PATH"}
    for names in ((), ("JUDGE_KEY",)):
        found = RewardFunctions(["env.py:env"], env=names)(answers("a"))[0]
        assert found.keys() - {"score", "acc", "pred"} == usual | set(names)
    with pytest.raises(RewardError, match=r"reward\.env names NO_SUCH_KEY, which is not set in the environment"):
        RewardFunctions(["env.py:env"], env=("NO_SUCH_KEY",))


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


def test_the_final_answer_is_of_the_first_function_that_gives_it(here):
    signature = "(data_source, solution_str, ground_truth, extra_info): return "
    given = {"none": "1.0", **{name: f"{{'score': 1.0, 'pred': '{name}'}}" for name in ("one", "other")}}
    given["empty"] = "{'score': 1.0, 'pred': ''}"
    (here / "preds.py").write_text("".join(f"def {name}{signature}{value}\n" for name, value in given.items()))
    wanted = {("none", "one", "other"): "one", ("other", "one"): "other", ("none",): "x", ("empty", "one"): ""}
    for names, pred in wanted.items():
        functions = RewardFunctions([f"preds.py:{name}" for name in names])
        assert functions(answers(" x "))[0]["pred"] == pred


def test_accuracy_is_of_the_first_function_that_gives_it(here):
    assert "acc" not in RewardFunctions(["mine.py:batched", "mine.py:exact"])(answers("x"))[0]
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


def test_a_coroutine_that_ignores_its_end_is_named_though_others_end_after_it(here):
    text = failure(RewardFunctions(["mine.py:ignores_its_end"], timeout=1.0), "good", "bad", "good", "last")
    assert text == (
        "the reward function mine.py:ignores_its_end took longer than reward.timeout (1 s), "
        "judging problem 11 of 'src', response 'bad'"
    )


def test_a_coroutine_that_blocks_is_looked_for_among_those_not_answered(here):
    functions = RewardFunctions(["mine.py:blocks_after_a_while"], timeout=1.0)
    text = failure(functions, "good", "waits", "bad", "good")
    assert "reward.timeout (1 s) and let no other coroutine run, judging problem 11 of 'src'" in text
    assert text.endswith("response 'waits' (or one of 1 others that had begun)")


def test_processes_that_a_function_runs_end_with_its_time(here, held):
    functions = RewardFunctions(["mine.py:runs"], timeout=1.0)
    assert "runs took longer than reward.timeout (1 s), judging problem 11" in failure(functions, "good", "bad")
    assert held()


def test_processes_that_a_function_left_end_after_its_own(here, held):
    functions = RewardFunctions(["mine.py:leaves_a_process_and_exits"])
    assert "ended its process with exit code 3" in failure(functions, "bad")
    assert held()


def test_processes_that_a_function_left_end_with_an_idle_worker(here, held):
    (here / "leaves.py").write_text(
        "import subprocess\n"
        "def leaves(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    with open('held', 'w') as held:\n"
        "        subprocess.Popen(['sleep', '1000'], stdout=held)\n"
        "    return 1\n"
    )
    functions = RewardFunctions(["leaves.py:leaves"])
    assert scores(functions, "good") == [1.0]
    del functions
    gc.collect()
    assert held()


def test_the_limit_is_of_a_call_not_of_the_batch(here):
    # Together these take longer than the limit.
    assert scores(RewardFunctions(["mine.py:takes_a_while"], timeout=1.5), *"abcde") == [1.0] * 5


def test_what_a_function_raises_is_told_with_the_line_of_its_author(here):
    functions = RewardFunctions(["mine.py:raises"])
    line = 1 + MINE.read_text().splitlines().index("        return int(same)  # the line that is named")
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
        ("keyed", "returned {0: 1.0, 1: 1.0} for 2 responses; it must be a list of results"),
        ("disconnects_and_exits", "ended its process with exit code 3"),
        ("disconnects", "closed the connection of its process"),
        ("ends_its_task", "raised SystemExit: 2"),
    ],
)
def test_other_failures_say_what_happened(here, name, message):
    functions = RewardFunctions([f"mine.py:{name}", "mine.py:exact"])
    for _ in range(2):  # the second meets a fresh process
        assert f"the reward function mine.py:{name} {message}" in failure(functions, "good", "bad")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs_code", "raised ZeroDivisionError: division by zero (at "),
        ("raises_unspeakable", "raised Unspeakable: (it has no message, since __str__ raised ValueError) (at "),
        ("unspeakable", "raised ValueError: no text (at "),
        ("unspeakable_async", "raised ValueError: no text (at "),
        ("unspeakable_batched", "raised ValueError: no text (at "),
    ],
)
def test_what_cannot_be_shown_is_still_told_with_its_row(here, name, message):
    functions = RewardFunctions([f"mine.py:{name}"])
    text = failure(functions, "good", "bad")
    assert text.startswith(f"the reward function mine.py:{name} {message}{here}/mine.py:")
    assert text.endswith("problem 11 of 'src', response 'bad'")


@pytest.mark.parametrize("name", ["draws", "draws_async"])
def test_random_scores_are_repeated_in_any_order_on_any_number_of_workers(here, name):
    # Each differs from every other one in its problem, its source or its text only.
    rows = [Answer(Problem("q", str(i % 3), i // 4, f"src {i // 2 % 2}"), f"text {i % 2}") for i in range(8)]
    first = RewardFunctions([f"mine.py:{name}"])
    found = first(rows)
    assert len({one["score"] for one in found}) == len(rows)
    assert first(rows) == found
    assert RewardFunctions([f"mine.py:{name}"])(rows[::-1]) == found[::-1]
    assert RewardFunctions([f"mine.py:{name}"], num_workers=3)(rows) == found


def test_random_scores_of_batches_and_imports_are_repeated(here):
    specs = ["mine.py:draws_batched", "mine.py:drawn_at_import"]
    first, second = (RewardFunctions(specs)(answers("a", "b")) for _ in range(2))
    assert first == second
    assert first[0]["draws_batched/score"] != first[1]["draws_batched/score"]


def test_an_async_function_is_not_begun_for_all_of_many_rows_at_once(here):
    assert max(scores(RewardFunctions(["mine.py:counts"]), *["x"] * 600)) == 256


@pytest.mark.parametrize(
    "score",
    [
        0.5,
        np.float32(0.5),
        np.float16(0.5),
        torch.tensor(0.5).bfloat16(),
        np.array(0.5),
        torch.tensor(0.5),
        Fraction(1, 2),
        Decimal("0.5"),
    ],
)
def test_scores_may_be_any_kind_of_number(score):
    assert outcome_of(score) == (0.5, None, None, {})
    assert outcome_of({"score": score, "acc": np.bool_(True), "half": score}) == (0.5, 1.0, None, {"half": 0.5})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), 'returned nan; it must return a number between -1e+30 and 1e+30, or a dict with "score"'),
        (-float("inf"), "returned -inf; it must"),
        (10**400, "returned 1000"),
        (1e31, "returned 1e+31; it must"),
        (Decimal("nan"), "returned a Decimal, Decimal('NaN'); it must"),
        (np.complex64(1), "returned a complex64, "),
        (np.bytes_(b"1"), "returned a bytes_, "),
        (np.str_("1"), "returned a str_, "),
        (torch.tensor(1j), "returned a Tensor, "),
        (None, "returned None; it must"),
        ("1.0", "returned '1.0'; it must"),
        ([1.0], "returned [1.0]; it must"),
        (1j, "returned 1j; it must"),
        ({"acc": 1}, "returned {'acc': 1}; it must"),
        ({"score": "1"}, "returned {'score': '1'}; it must"),
        ({"score": float("nan")}, 'returned nan as "score"; it must be finite and smaller than 1e+30'),
        ({"score": 1, 7: 2}, "returned a dict with the key 7; keys must be strings"),
        ({"score": 1, "words": {"a"}}, "returned {'a'} as \"words\"; it must be a number, or else a string, list"),
        ({"score": 1, "acc": "yes"}, "returned 'yes' as \"acc\"; it must be a number"),
        ({"score": 1, "acc": 2.0}, 'returned 2.0 as "acc"; it must be a number from 0 to 1'),
        ({"score": 1, "acc": -0.5}, 'returned -0.5 as "acc"; it must be a number from 0 to 1'),
        ({"score": 1, "length": float("inf")}, 'returned inf as "length"; it must be finite'),
    ],
)
def test_results_that_are_no_scores_are_refused(value, message):
    with pytest.raises(Failed) as error:
        outcome_of(value)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("value", ["float('nan')", "{'points': 1}"])
def test_a_refused_result_is_told_with_its_row(here, value):
    text = failure(RewardFunctions(["mine.py:returns"]), "good", "bad", truth=value)
    assert text.startswith("the reward function mine.py:returns returned ")
    assert text.endswith("1e+30, or a dict with \"score\", judging problem 11 of 'src', response 'bad'")


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
        ("broken.py:f", r"importing broken\.py raised SyntaxError: .* \(at /.*/broken\.py:2\)"),
        ("broken:f", r"importing broken raised SyntaxError: .* \(at /.*/broken\.py:2\)"),
        ("leans.py:f", r"importing leans\.py raised SyntaxError: .* \(at /.*/broken\.py:2\)"),
        ("needy:f", r"importing needy raised ModuleNotFoundError: .*'nowhere' \(at /.*/needy\.py:3\)"),
        ("asks.py:f", r"raised KeyError: 'MY_KEY', as reward\.env .* names the variables .* \(at /.*/asks\.py:1\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(here, spec, message):
    (here / "broken.py").write_text("\ndef f(:\n")
    (here / "leans.py").write_text("from .broken import f\n")
    (here / "needy.py").write_text("\n\nimport nowhere\n")
    (here / "asks.py").write_text("import os; os.environ['MY_KEY']\n")
    with pytest.raises(RewardError, match=message):
        RewardFunctions([spec])


def test_a_worker_that_was_killed_between_batches_is_replaced(here):
    functions = RewardFunctions(["mine.py:process"])
    pid = int(functions(answers("a"))[0]["pid"])
    os.kill(pid, 9)
    while functions._pool.process(0).is_ready():
        time.sleep(0.01)
    assert functions(answers("a"))[0]["pid"] != pid


def test_workers_end_with_their_object(here):
    functions = RewardFunctions(["mine.py:process"])
    pid = int(functions(answers("a"))[0]["pid"])
    del functions
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("name", ["backtracks", "runs"])
def test_even_a_worker_that_hangs_ends_when_its_trainer_is_killed(warm, here, name):
    (here / "trainer.py").write_text(
        "from verl_fn.rewards.functions import RewardFunctions\n"
        "from verl_fn.rewards.reward import Answer\n"
        "from verl_fn.data.tasks import Problem\n"
        f"RewardFunctions(['mine.py:{name}'], timeout=1000)([Answer(Problem('q', 'good'), 'bad')])\n"
    )
    trainer = subprocess.Popen([warm, "trainer.py"], stderr=subprocess.PIPE, text=True)
    assert any(line == f"{name} was here\n" for line in trainer.stderr)
    trainer.kill()
    # The worker and what it runs hold the other end of this pipe for as long as they live.
    trainer.communicate(timeout=60)


def test_the_worker_does_not_import_torch():
    code = "import sys, verl_fn.pool.scoring; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


TAKES = """
def both(data_source, solution_str, ground_truth, extra_info=None, *, alpha, beta=1.0):
    return alpha * beta

async def one(data_source, solution_str, ground_truth, extra_info, beta):
    return beta

def many(data_sources, solution_strs, ground_truths, extra_infos, **others):
    return [sorted(others.items()) == [("alpha", 0.5), ("beta", [2, {"a": None}])] for _ in solution_strs]
"""


def test_functions_get_the_arguments_that_they_have_parameters_for(here):
    (here / "takes.py").write_text(TAKES)
    functions = RewardFunctions(["takes.py:both", "takes.py:one"], arguments={"alpha": 0.5, "beta": 3})
    assert [one["both/score"] for one in functions(answers("x"))] == [1.5] and scores(functions, "x") == [4.5]
    batched = RewardFunctions(["takes.py:many"], arguments={"alpha": 0.5, "beta": [2, {"a": None}]})
    assert scores(batched, "x", "y") == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"no function has a parameter for reward\.arguments\.gamma; add it"):
        RewardFunctions(["takes.py:both"], arguments={"alpha": 1, "gamma": 2})
    with pytest.raises(RewardError, match=r"cannot be called.*'alpha'"):
        RewardFunctions(["takes.py:both"], arguments={"beta": 1})


def test_arguments_of_functions_are_values_of_json_that_no_response_brings():
    for settings, said in (
        ({"extra_info": 1}, "reward.arguments.extra_info is given by the run"),
        ({"solution_strs": "x"}, "reward.arguments.solution_strs is given by the run"),
        ({"when": datetime.date(2026, 1, 5)}, "reward.arguments must have values of JSON"),
    ):
        with pytest.raises(ConfigError, match=said):
            RewardConfig(functions=("m.py:f",), arguments=settings)


KEYS = """
def missing(data_source, solution_str, ground_truth, extra_info):
    one = {"score": 1, "length": len(solution_str), "acc": 1.0, "said": "x"}
    return {"good": one, "bad": {"score": 0, "length": None}, "empty": {"score": 0}}[solution_str]

def disagree(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1, "length": 3 if solution_str == "good" else "n/a"}

def by_key(data_source, solution_str, ground_truth, extra_info):
    return ground_truth["answer"]

async def waits(data_source, solution_str, ground_truth, extra_info):
    return ground_truth["answer"]

def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [truth["answer"] for truth in ground_truths]
"""


def test_numbers_may_be_missing_and_other_values_in_their_place_are_refused(here):
    (here / "keys.py").write_text(KEYS)
    found = RewardFunctions(["keys.py:missing"])(answers("good", "bad", "empty"))
    assert found[0] == {"score": 1.0, "pred": "good", "acc": 1.0, "length": 4.0}
    assert found[1] == {"score": 0.0, "pred": "bad"} and found[2] == {"score": 0.0, "pred": "empty"}
    text = failure(RewardFunctions(["keys.py:disagree"]), "good", "bad")
    assert "the reward function keys.py:disagree returned 'length' as a number, judging problem 10 of 'src'" in text
    assert "and as a str, judging problem 11 of 'src', response 'bad'; return numbers, and None or no key" in text


@pytest.mark.parametrize("name", ["by_key", "waits", "batched"])
def test_an_error_about_a_ground_truth_that_was_an_object_says_that_it_is_text(name, here):
    (here / "keys.py").write_text(KEYS)
    functions = RewardFunctions([f"keys.py:{name}"])
    text = failure(functions, "a", truth='{"answer": 5}')
    assert (
        "raised TypeError: string indices" in text and "the ground truth is JSON text, as objects and lists" in text
    )
    assert "JSON text" not in failure(functions, "a", truth="five")
