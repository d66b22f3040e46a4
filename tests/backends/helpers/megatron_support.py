"""What the tests of Megatron share: when they run, how ranks are called, and a model with experts."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from verl_fn.cli import main

INSTALLED = all(importlib.util.find_spec(name) for name in ("megatron", "megatron.bridge"))
MARKS = [
    pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these ranks compute on CPUs; see test_megatron_cuda.py"),
]
HELPERS, ROOT = Path(__file__).parent, Path(__file__).parents[3]
FP32 = 1e-5
EXPERTS = {
    "arch": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.1,
}  # fmt: skip


def read_lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def call(ranks, name, *args):
    return ranks.run(f"megatron_cases.{name}", *args)


def check_first_step(worst):
    assert worst["outputs"] <= 2e-6 and worst["loss"] <= 1e-6 and worst["grad_norm"] <= 1e-6, worst
    assert worst["gradient"] <= 1e-5 and worst["update"] <= 1e-4 and worst["copies"] == 0, worst


def check_run(ranks, folder, layout):
    """Two ranks that train with a layout report the losses of one process."""
    recipe = str(ROOT / "recipes/sft_reverse.toml")
    arguments = ["train", recipe, "driver.device=cpu", "trainer.total_training_steps=3", "data.train_batch_size=16"]
    layout = ["actor.strategy=megatron", *layout, f"trainer.dir={folder / 'two'}"]
    assert main([*arguments, f"trainer.dir={folder / 'one'}"]) == 0
    assert call(ranks, "run", [*arguments, *layout]) == [0, 0]
    losses = []
    for name in ("one", "two"):
        losses.append([line["train/loss"] for line in read_lines(folder / name) if "train/loss" in line])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], abs=1e-5)
