"""Whole runs on a tiny model: exact resume, what a run leaves behind, and Ray against one process."""

import json
import random
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import load, make_plan
from verl_fn.data.tasks import TASKS
from verl_fn.runs import RunError
from verl_fn.runs.folder import Run
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import workers
from verl_fn.runs.state import initial_state
from verl_fn.state import tree

SMALL = [
    "data.train_batch_size=8", "data.val_size=16", "algorithm.ppo_mini_batch_size=4", "algorithm.ppo_epochs=2",
    "algorithm.shuffle=true", "rollout.n=2", "actor.optim.lr=1e-3", "critic.optim.lr=1e-3", "driver.num_threads=1",
    "actor.ppo_max_token_len_per_gpu=120", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=99",
    "trainer.test_freq=2",
]  # fmt: skip
ALGORITHMS = {
    "ppo": ["algorithm.name=ppo", "algorithm.critic_warmup=1", "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive", "actor.optim.lr_scheduler_type=cosine"],
    "grpo": ["algorithm.name=grpo", "algorithm.use_kl_loss=true", "algorithm.entropy_coeff=0.01"],
    "sft": ["algorithm.name=sft"],
}  # fmt: skip

AUX = ("val-aux/reverse/reward/mean@1", "val-aux/reverse/response_length/clip_ratio")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars=TASKS["reverse"].alphabet, hidden_size=32)


def config(model, folder, algorithm, *more):
    overrides = [*SMALL, *ALGORITHMS[algorithm], f"model.path={model}", f"trainer.dir={folder}", *more]
    return make_plan(load(overrides=overrides))


def numbers(folder):
    """All logged metrics but those of time."""
    timed = ("timing_s/", "perf/time_per_step", "perf/throughput")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_metrics(folder)]


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_is_the_uninterrupted_run(algorithm, model, tmp_path):
    """Stopped after a random step and continued: every checkpoint file and every metric is bitwise the same."""
    say = lambda line: None  # noqa: E731
    steps = 5
    train(config(model, tmp_path / "whole", algorithm, f"trainer.total_training_steps={steps}"), say)
    whole = numbers(tmp_path / "whole")
    assert len(whole) == steps + 1
    stop = random.Random(algorithm).randint(1, steps - 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed", symlinks=True)
    for step in range(stop + 1, steps + 1):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{step}")
    lines = []
    train(config(model, tmp_path / "resumed", algorithm, f"trainer.total_training_steps={steps}"), lines.append)
    assert f"after step {stop}, from" in lines[1]
    assert numbers(tmp_path / "resumed") == whole
    ours, theirs = (files(tmp_path / name / "checkpoints" / f"step_{steps}") for name in ("resumed", "whole"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_every_role_starts_from_a_key_of_its_own(model, tmp_path):
    cfg = config(model, tmp_path, "ppo", "algorithm.use_kl_in_reward=true")
    with workers(cfg) as w:
        state = initial_state(cfg, w)
    keys = [tree.digest(state.role(name).rng) for name in cfg.roles]
    assert len(keys) == len(set(keys)) == 3


def test_what_a_run_leaves_behind(model, tmp_path):
    settings = ["trainer.total_training_steps=2", "trainer.max_ckpt_to_keep=1", "data.date=2026-11-25"]
    cfg = config(model, tmp_path, "ppo", *settings)
    evaluation = train(cfg, lambda line: None)
    assert set(evaluation) == {"val-core/reverse/acc/mean@1", *AUX}
    assert make_plan(load(tmp_path / "config.toml")) == cfg
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
    kept = {file.name: pq.read_table(file) for file in (tmp_path / "answers").iterdir()}
    assert {name: table.num_rows for name, table in kept.items()} == {"step_0.parquet": 16, "step_2.parquet": 16}
    accuracy = sum(kept["step_2.parquet"]["acc"].to_pylist()) / 16
    assert accuracy == pytest.approx(evaluation["val-core/reverse/acc/mean@1"])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([4, 5]) == "ab"
    row = read_metrics(tmp_path)[-1]
    for name in (
        "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "actor/grad_norm", "actor/lr",
        "actor/reward_kl_penalty", "critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm",
        "critic/score/mean", "critic/rewards/mean", "critic/advantages/mean", "critic/returns/max",
        "critic/values/min", "response_length/mean", "prompt_length/max", "training/rollout_probs_diff_max",
        "training/rollout_actor_probs_pearson_corr", "perf/throughput", "timing_s/gen", "timing_s/update_actor",
        "val-core/reverse/acc/mean@1",
    ):  # fmt: skip
        assert name in row, name
    assert row["training/rollout_probs_diff_max"] < 1e-4
    assert abs(row["rollout_corr/kl"]) < 1e-5 and row["rollout_corr/rollout_is_eff_sample_size"] > 0.9999


def test_a_half_written_checkpoint_is_passed_over(model, tmp_path):
    cfg = config(model, tmp_path, "sft", "trainer.total_training_steps=2")
    train(cfg, lambda line: None)
    (tmp_path / "checkpoints" / ".writing_step_9").mkdir()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tra')
    assert Run(cfg).latest().name == "step_2"
    lines = []
    train(config(model, tmp_path, "sft", "trainer.total_training_steps=3"), lines.append)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_other_minibatches_of_tokens_give_the_same_run(model, tmp_path):
    """The token budget splits the work and changes no number beyond rounding."""
    for name, budget in (("a", 60), ("b", 1000)):
        more = ["trainer.total_training_steps=2", f"actor.ppo_max_token_len_per_gpu={budget}"]
        train(
            config(model, tmp_path / name, "ppo", *more, f"critic.ppo_max_token_len_per_gpu={budget}"),
            lambda line: None,
        )
    for one, other in zip(numbers(tmp_path / "a"), numbers(tmp_path / "b"), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-3, abs=1e-5), key


def test_the_reference_policy_is_the_first_actor(model, tmp_path):
    cfg = config(model, tmp_path, "grpo", "trainer.total_training_steps=2")
    train(cfg, lambda line: None)
    with workers(cfg) as w:
        held = w.trainers["reference"].restore(tmp_path / "checkpoints" / "step_2" / "reference")
        fresh = w.trainers["reference"].load_pretrained(model)
    assert tree.equal(held.params, fresh.params)
    assert not torch.equal(held.params["model.norm.weight"], torch.zeros(32))


def test_stop_at_ends_the_run(model, tmp_path):
    more = ["trainer.total_training_steps=50", "trainer.stop_at=0.0", "trainer.val_before_train=false"]
    train(config(model, tmp_path, "sft", *more), lambda line: None)
    rows = read_metrics(tmp_path)
    assert rows[-1]["step"] == 2
    assert json.loads((tmp_path / "checkpoints/step_2/checkpoint.json").read_text())["state"][".algorithm.step"] == 2


def test_a_folder_of_another_run_is_not_written_over(model, tmp_path):
    """Not by a new run, nor by another algorithm; the config that made its checkpoints stays."""
    train(config(model, tmp_path, "sft", "trainer.total_training_steps=1"), lambda line: None)
    before = (tmp_path / "config.toml").read_text()
    for more, message in (
        (["trainer.resume_mode=disable"], "checkpoints of another run"),
        ([], "was trained with sft, and the config asks for grpo"),
    ):
        with pytest.raises(RunError, match=message):
            train(config(model, tmp_path, "grpo", "trainer.total_training_steps=2", *more), lambda line: None)
    assert (tmp_path / "config.toml").read_text() == before
    assert (tmp_path / "model" / "config.json").exists()


def test_a_run_that_reached_its_goal_stays_there(model, tmp_path):
    more = ["trainer.total_training_steps=50", "trainer.stop_at=0.0"]
    for _ in range(2):
        train(config(model, tmp_path, "sft", *more), lambda line: None)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_another_new_model_is_made_anew(tmp_path):
    for size in (16, 32):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        more = [f"model.new.hidden_size={size}", "trainer.total_training_steps=1", "trainer.resume_mode=disable"]
        train(config("", tmp_path, "sft", *more), lambda line: None)
        assert json.loads((tmp_path / "model/config.json").read_text())["hidden_size"] == size
