"""Runs whose policy talks to an environment: metrics, resume and replay."""

import itertools
import sys
from pathlib import Path

import pytest
from run_configs import TINY

from verl_fn.config import ConfigError, load, make_plan
from verl_fn.environments.processes import EnvError
from verl_fn.runs.journal import read_samples
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay

ENV = f"env.name={Path(__file__).parent}/talkers.py:"
SETTINGS = [
    *TINY, f"{ENV}Patient", "algorithm.name=grpo", "rollout.n=2", "data.max_prompt_length=16",
    "data.max_response_length=50", "env.max_turn_length=16", "trainer.journal=samples",
]  # fmt: skip


def silent(line):
    pass


def plan_of(model, folder, *more):
    return make_plan(load(overrides=[*SETTINGS, f"model.path={model}", f"trainer.dir={folder}", *more]))


def numbers(folder):
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(folder)]


@pytest.mark.filterwarnings("ignore:.* conversations have failed", "ignore:.* no token that the model drew")
@pytest.mark.parametrize("name", ["Patient", "Compared"])
def test_a_run_ends_resumes_and_replays_bitwise(name, chatty, tmp_path):
    env = (f"{ENV}{name}", "env.num_workers=2")
    train(plan_of(chatty, tmp_path / "whole", *env), silent)
    rows = numbers(tmp_path / "whole")
    train(plan_of(chatty, tmp_path / "parts", *env, "trainer.total_training_steps=2"), silent)
    train(plan_of(chatty, tmp_path / "parts", *env), silent)
    assert numbers(tmp_path / "parts")[-1] == rows[-1]
    assert replay(tmp_path / "whole", 3, say=silent).difference is None
    assert replay(tmp_path / "whole", 3, recorded=True, say=silent).difference is None
    steps = [row for row in rows if row["step"]]
    for row in steps:
        dropped = [value for name, value in row.items() if name.startswith("rollout/rows_dropped/")]
        assert row["rollout/rows_asked"] + row["rollout/rows_split"] == row["rollout/rows_learned"] + sum(dropped)
        assert sum(value for name, value in row.items() if name.startswith("env/ended/")) == pytest.approx(1.0)
    assert any(row["env/turns/mean"] > 1 for row in steps) and any(row["env/ended/done"] for row in steps)
    assert any(row["rollout/rows_dropped/env_crashed"] for row in steps)
    assert "val-core/reverse/acc/mean@1" in rows[0]
    masks = [mask.tolist() for batch in read_samples(tmp_path / "whole", 1) for mask in batch.rows("response_mask")]
    replies = [len(list(tokens)) for mask in masks for drawn, tokens in itertools.groupby(mask) if drawn]
    assert max(replies) == 16, "env.max_turn_length"
    assert (max(row["critic/score/max"] for row in steps) > 10) == (name == "Compared"), "its group has scored"


def test_settings_that_cannot_be_used_are_errors(tiny, chatty, tmp_path):
    with pytest.raises(ConfigError, match=r"env\.name is 'talk'; it must be a class as FILE\.py:NAME or MODULE:NAME"):
        load(overrides=["env.name=talk"])
    with pytest.raises(EnvError, match="the tokenizer has no chat template"):
        train(plan_of(tiny, tmp_path / "tiny"), silent)
    with pytest.raises(ConfigError, match="a row may have 266 tokens"):
        train(plan_of(chatty, tmp_path / "long", "data.max_response_length=250"), silent)


def test_the_interpreter_is_seen_from_the_runs_folder_and_links_are_kept(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "run.toml").write_text('[env]\nname = "a.py:B"\npython = "python"\narguments = { size = 2 }\n')
    env = make_plan(load(tmp_path / "run.toml", ["model.path=m"]), tmp_path).env
    assert (env.python, dict(env.arguments)) == (f"{tmp_path}/python", {"size": 2})
