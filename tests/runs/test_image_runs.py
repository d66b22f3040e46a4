"""Whole runs on questions about pictures: fine-tuning, GRPO with the embedded engine, replay, and what is refused."""

import pyarrow.parquet as pq
import pytest
from test_train import numbers

from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.data.squares import ALPHABET, prepare_squares
from verl_fn.errors import UserError
from verl_fn.runs.check_run import check_run
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay

QUIET = lambda line: None  # noqa: E731
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares")
    prepare_squares(folder)
    for split, count in (("train", 24), ("test", 6)):
        pq.write_table(pq.read_table(folder / f"{split}.parquet").slice(0, count), folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "qwen"
    return new_model(folder, chars=ALPHABET, arch="qwen2_5_vl", chat_template=True, **SIZES)


def plan(data, model, folder, *more):
    settings = [
        f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}", "rollout.n=2",
        "data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=6", "driver.device=cpu",
        "algorithm.ppo_mini_batch_size=2", "actor.ppo_max_token_len_per_gpu=160", "actor.optim.lr=1e-3",
        "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=1", "driver.num_threads=1",
        f"model.path={model}", f"trainer.dir={folder}", "trainer.val_before_train=false",
    ]  # fmt: skip
    return make_plan(load(overrides=[*settings, *more]))


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_run_can_be_replayed_bitwise(data, model, tmp_path, name):
    """The journal has digests of pixels and positions; replay reads the pictures again."""
    more = ["actor.freeze_vision_tower=true", "algorithm.use_kl_loss=true"] if name == "grpo" else []
    train(plan(data, model, tmp_path / "run", f"algorithm.name={name}", "trainer.journal=digests", *more), QUIET)
    rows = [row for row in numbers(tmp_path / "run") if row["step"]]
    assert len(rows) == 2
    if name == "grpo":
        assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
        journal = (tmp_path / "run/journal.jsonl").read_text()
        assert "pixels" in journal and "position_ids" in journal
    found = replay(tmp_path / "run", 2, say=QUIET)
    assert found.difference is None and found.compared["state leaves"] > 20


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["algorithm.name=ppo"], "a model with images has no value head here; take algorithm"),
        (["trainer.journal=samples"], "trainer.journal = samples keeps no images"),
        (["model.layout=padded"], "padded rows have no images; set model.layout to auto"),
        (["rollout.name=vllm", "driver.kind=ray"], "models with images do not run in vLLM here"),
    ],
)
def test_runs_that_are_refused(data, model, tmp_path, more, says):
    with pytest.raises((ConfigError, UserError), match=says):
        check_run(plan(data, model, tmp_path / "run", "algorithm.name=grpo", *more))


def test_a_model_of_text_is_refused(data, tmp_path):
    text = new_model(tmp_path / "text", chars=ALPHABET + "<>", chat_template=True, **SIZES)
    with pytest.raises(UserError, match=r"train.parquet, row 0: the tokenizer's chat template failed on the prompt"):
        check_run(plan(data, text, tmp_path / "run", "algorithm.name=grpo"))
