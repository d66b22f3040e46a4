"""Conversations with an environment over Ray."""

from pathlib import Path

import pytest
import torch

from verl_fn.algorithms.experience import sample_and_score
from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import load, make_plan
from verl_fn.data.tasks import TASKS
from verl_fn.driver.ranks import local_workers
from verl_fn.driver.ray import ray_workers
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.state import Key

ENV = f"env.name={Path(__file__).parents[1]}/environments/talkers.py:Patient"
SETTINGS = [
    ENV, "algorithm.name=grpo", "rollout.n=2", "data.max_prompt_length=16", "data.max_response_length=50",
    "env.max_turn_length=16", "driver.device=cpu", "driver.num_threads=1",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* conversations have failed", "ignore:.* no token that the model drew")
def test_conversations_are_the_same_as_in_one_process(ray_cluster, tmp_path):
    """Two engines share them, each with an environment of its own."""
    model = new_model(tmp_path, chars="abcdefgh>0123456789", hidden_size=32, num_hidden_layers=1, chat_template=True)
    problems, batches = TASKS["reverse"].train(Key.from_seed(0), 0, 8), []
    over_ray = ["driver.kind=ray", "rollout.engines=2", "rollout.placement=apart"]
    for more, workers in (([], local_workers), (over_ray, ray_workers)):
        plan = make_plan(load(overrides=[*SETTINGS, f"model.path={model}", f"trainer.dir={tmp_path}", *more]))
        with workers(plan) as w:
            state = w.trainers["actor"].load_pretrained(model, Key.from_seed(0))
            batches.append(w.get(sample_and_score(state, problems, w, Key.from_seed(1), 0).batch))
    one, two = batches
    assert len(one) == len(two) > 8
    for name in ("tokens", "response_mask", "versions", "group", "env_turns", "env_end", "score"):
        assert torch.equal(one[name], two[name]), name
    torch.testing.assert_close(one["rollout_log_probs"], two["rollout_log_probs"], atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.* conversations have failed", "ignore:.* no token that the model drew")
def test_conversations_run_ahead_of_learning(ray_cluster, tmp_path):
    """The weights of both turns are one step older, and the ledger closes."""
    model = new_model(tmp_path, chars="abcdefgh>0123456789", hidden_size=32, num_hidden_layers=1, chat_template=True)
    ahead = ["driver.kind=ray", "rollout.placement=apart", "driver.max_lag=1", "trainer.total_training_steps=3"]
    sizes = ["data.train_batch_size=4", "algorithm.ppo_mini_batch_size=4", "data.val_size=2"]
    run = [f"model.path={model}", f"trainer.dir={tmp_path / 'run'}"]
    train(make_plan(load(overrides=[*SETTINGS, *ahead, *sizes, *run])), lambda line: None)
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["training/rollout_lag/max"] for row in rows] == [0.0, 1.0, 1.0]
    for row in rows:
        dropped = [value for name, value in row.items() if name.startswith("rollout/rows_dropped/")]
        assert row["rollout/rows_asked"] + row["rollout/rows_split"] == row["rollout/rows_learned"] + sum(dropped)
