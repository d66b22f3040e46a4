"""Data and rewards that are allowed but hardly meant: one sentence each, once."""

import json

import pytest
from run_configs import TINY, tiny_run

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.cli import main
from verl_fn.data.files import FileData
from verl_fn.data.tasks import TASKS, Problem
from verl_fn.runs.loop import train
from verl_fn.runs.notices import data_notices, without_signal

TOKENIZER = char_tokenizer("abcdefgh>")
END = TOKENIZER.eos_token
GOOD = tuple(Problem(f"{a}b>", "ba", data_source="mine") for a in "abcdefgh")
HELD_OUT = (Problem("aa>", "aa", data_source="mine"),)


def notices(training=GOOD, held_out=HELD_OUT, *more):
    source = FileData(training, held_out, shuffle=False)
    return data_notices(tiny_run("m", "run", "data.train_files=x.jsonl", *more), source, TOKENIZER)


def test_good_data_and_generated_data_need_no_words():
    assert notices() == []
    assert data_notices(tiny_run("m", "run"), TASKS["reverse"], TOKENIZER) == []


@pytest.mark.parametrize(
    ("training", "held_out", "more", "said"),
    [
        (GOOD[:3], HELD_OUT, [], "data.train_batch_size = 8 is more than the 3 rows of data.train_files"),
        ((*GOOD, GOOD[0], GOOD[0]), HELD_OUT, [], "data.train_files: 2 of 10 rows repeat the prompt of an earlier"),
        (GOOD, (*HELD_OUT, GOOD[3]), [], "data.val_files: 1 of 2 rows have a prompt that is trained on as well"),
        (
            GOOD,
            (*HELD_OUT, Problem("ac>", "", data_source="other")),
            ["data.val_size=1"],
            "data.val_size = 1 leaves out all held-out rows of other",
        ),
        (
            (*GOOD, Problem("ah>", "")),
            HELD_OUT,
            ["algorithm.name=sft"],
            "data.train_files: 1 of 9 rows have an empty answer",
        ),
        (
            (*GOOD, Problem(f"a{END}>", "")),
            HELD_OUT,
            [],
            "1 of 10 rows hold the name of a special token, such as",
        ),
        (
            (*GOOD, Problem("ah>", f"a{END}")),
            HELD_OUT,
            ["algorithm.name=sft"],
            "1 of 10 rows hold the name of a special token",
        ),
    ],
)
def test_what_is_hardly_meant_is_said_once(training, held_out, more, said):
    found = notices(training, held_out, *more)
    assert len(found) == 1 and said in found[0]


def test_rewards_that_teach_nothing():
    def report(low, high, advantages):
        names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
        return dict(zip(names, (low, high, -advantages, advantages), strict=True))

    assert without_signal(1, report(0.0, 1.0, 1.0)) == "" and without_signal(1, {"train/loss": 1.0}) == ""
    assert without_signal(4, report(0.5, 0.5, 0.3)) == "all rewards of step 4 are 0.5"
    assert "the policy learns nothing from it" in without_signal(4, report(0.5, 0.5, 0.0))
    assert "their differences are rounded away" in without_signal(4, report(1e20, 2e20, 0.0))


def test_a_run_says_each_of_them_once(tiny, tmp_path, capsys):
    rows = [{"data_source": "mine", "prompt": "ab>", "reward_model": {"ground_truth": "ba"}}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def same(data_source, solution_str, ground_truth, extra_info): return 1\n")
    more = [f"data.train_files={tmp_path}/a.jsonl", f"reward.functions={tmp_path}/mine.py:same"]
    more += ["algorithm.name=grpo", "rollout.n=2", f"trainer.dir={tmp_path}/run"]
    lines = []
    train(tiny_run(tiny, tmp_path / "run", *more), lines.append)
    notes = [line for line in lines if line.startswith("note: ")]
    assert [line.split()[1] for line in notes] == ["data.train_batch_size", "data.train_files:", "all"]
    assert "all rewards of step 1 are 1, and all advantages are 0" in notes[2]
    (tmp_path / "empty.toml").write_text("")
    args = [*TINY, *more, f"model.path={tiny}", f"trainer.dir={tmp_path}/other"]
    assert main(["train", str(tmp_path / "empty.toml"), *args, "--check"]) == 0
    assert "note: data.train_files: 1 of 2 rows repeat the prompt" in capsys.readouterr().out
