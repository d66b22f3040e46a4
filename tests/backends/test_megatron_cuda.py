"""The Megatron backend on GPUs, a rank each, with transformer-engine where it is installed."""

import importlib.util

import pytest
import torch
from ranks import Ranks

from verl_fn.backends.hf.new_model import new_model

GPUS = torch.cuda.device_count()
INSTALLED = all(importlib.util.find_spec(name) for name in ("megatron", "megatron.bridge"))
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed"),
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def ranks():
    """Starts the ranks of each size once."""
    started = {}

    def of(size):
        if size > GPUS:
            pytest.skip(f"needs {size} CUDA devices")
        if size not in started:
            started[size] = Ranks(size, "cuda")
        return started[size]

    yield of
    for one in started.values():
        one.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads of 16 numbers, which fused attention takes."""
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=64)


LAYOUTS = [
    (1, {}),
    (1, {"checkpointing": True}),
    (1, {"head": "value"}),
    (2, {}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "sp": True}),
    (2, {"pp": 2}),
    (2, {"cp": 2}),
]


@pytest.mark.parametrize(("size", "options"), LAYOUTS, ids=str)
def test_the_first_steps_in_fp32(ranks, folder, size, options):
    worst = ranks(size).run("megatron_cases.first_step", folder, options, 9)[0]
    assert worst["outputs"] <= 1e-5 and worst["loss"] <= 1e-5 and worst["grad_norm"] <= 1e-5, worst
    assert worst["gradient"] <= 1e-4 and worst["update"] <= 1e-3 and worst["copies"] == 0, worst


@pytest.mark.parametrize(("size", "options"), LAYOUTS, ids=str)
def test_the_first_steps_in_bf16(ranks, folder, size, options):
    worst = ranks(size).run("megatron_cases.first_step", folder, options | {"compute_dtype": "bfloat16"}, 9)[0]
    assert worst["loss"] <= 1e-3 and worst["grad_norm"] <= 5e-3 and worst["gradient"] <= 0.1, worst


def test_laws_in_bf16(ranks, folder):
    ranks(1).run("megatron_cases.laws", folder, {"compute_dtype": "bfloat16"}, 0.05)
