"""Whole runs on questions about pictures: fine-tuning, GRPO with the embedded engine, replay, and what is refused."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_train import numbers

from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import ConfigError, load, make_plan, structure
from verl_fn.data.prepare import ALPHABET, prepare_squares
from verl_fn.errors import UserError
from verl_fn.from_verl import read_settings, translate
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


# Of verl's examples/grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh, for a smaller batch.
GEO3K = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.train_files=DATA/train.parquet data.val_files=DATA/train.parquet data.image_key=images data.train_batch_size=2
data.max_prompt_length=1024 data.max_response_length=4 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=MODEL actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=2
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.rollout.name=vllm
+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0 actor_rollout_ref.rollout.n=2
trainer.logger=console trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_training_steps=1"""
INSTRUCTION = (
    " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)


def geo3k_row(number, image):
    """A row as verl's examples/data_preprocess/geo3k.py writes it."""
    problem, answer = f"<image>Find x, number {number}.", "2 \\sqrt { 221 }"
    return {
        "data_source": "hiyouga/geometry3k", "prompt": [{"role": "user", "content": problem + INSTRUCTION}],
        "images": [{"bytes": image, "path": None}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": number, "answer": answer, "question": problem},
    }  # fmt: skip


def test_verls_script_for_geo3k_trains_a_step(tmp_path):
    rows = []
    for number, mode in enumerate(("RGB", "RGBA", "L", "P")):
        written = io.BytesIO()
        Image.new("L", (48 + 16 * number, 32), 200).convert(mode).save(written, "PNG")
        rows.append(geo3k_row(number, written.getvalue()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    chars = "".join(sorted({*"<image>Find x, number 0123456789.", *INSTRUCTION}))
    folder = new_model(tmp_path / "Qwen2.5-VL-tiny", chars=chars, arch="qwen2_5_vl", chat_template=True, **SIZES)
    words = GEO3K.replace("MODEL", str(folder)).replace("DATA", str(tmp_path)).split()
    translation = translate(read_settings(words))
    assert translation.complete, translation.report()
    # One process and the embedded engine in place of the script's GPU.
    one = {"driver": {"kind": "local", "device": "cpu", "num_threads": 1}, "ray": {}}
    rollout = {"name": "sampler", "n": 2, "dtype": "float32"}
    table = translation.table | one | {"rollout": rollout, "trainer": {"dir": str(tmp_path / "run")}}
    table["trainer"] |= {"total_training_steps": 1, "save_freq": 1}
    table["actor"] = {k: v for k, v in table["actor"].items() if k not in ("strategy", "fsdp_config")}
    train(make_plan(structure(table)), QUIET)
    row = next(row for row in numbers(tmp_path / "run") if row["step"] == 1)
    assert row["training/rollout_probs_diff_max"] < 1e-4 and row["actor/grad_norm"] >= 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["algorithm.name=ppo"],
            "a model with images has no value head in transformers; take another model, or an algorithm",
        ),
        (["trainer.journal=samples"], "trainer.journal = samples keeps no images"),
        (["model.layout=padded"], "padded rows have no images; set model.layout to auto"),
        (
            [
                "driver.kind=ray",
                "ray.ranks=2",
                "rollout.engines=2",
                "actor.strategy=fsdp",
                "actor.fsdp_config.ulysses_sequence_parallel_size=2",
            ],
            "ranks cannot share rows with images; set their number for a row to 1",
        ),
    ],
)
def test_runs_that_are_refused(data, model, tmp_path, more, says):
    with pytest.raises((ConfigError, UserError), match=says):
        check_run(plan(data, model, tmp_path / "run", "algorithm.name=grpo", *more))


def test_pictures_of_held_out_rows_alone_are_looked_for(data, model, tmp_path):
    text = {"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "red"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(text) + "\n")
    more = [f"data.train_files={tmp_path / 'train.jsonl'}", "data.train_batch_size=1", "model.layout=padded"]
    with pytest.raises(ConfigError, match="padded rows have no images"):
        check_run(plan(data, model, tmp_path / "run", "algorithm.name=sft", *more))
    # A run that samples shows them to its engine only.
    asked = {"data_source": "squares", "prompt": text["messages"][:1], "reward_model": {"ground_truth": "red"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(asked) + "\n")
    kept = [*more, "trainer.journal=samples"]
    check_run(plan(data, model, tmp_path / "run", "algorithm.name=grpo", *kept))


def test_a_model_of_text_is_refused(data, tmp_path):
    text = new_model(tmp_path / "text", chars=ALPHABET + "<>", chat_template=True, **SIZES)
    with pytest.raises(UserError, match=r"\.parquet, row 0: .*models of the type qwen3 read no images"):
        check_run(plan(data, text, tmp_path / "run", "algorithm.name=grpo"))
