"""vLLM on GPUs: log-probs after real updates, sleep, and a model split over two GPUs."""

import importlib.util

import pytest
import torch
from ranks import Ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def _run(name, *args):
    one = Ranks(1, group=False)
    try:
        return one.run(f"vllm_cuda_cases.{name}", *args)[0]
    finally:
        one.kill()


def test_log_probs_in_bf16_after_real_updates():
    gaps, moved = _run("after_real_updates", "0.5b")
    print("gaps", gaps, "moved", moved)
    assert moved > 0.1
    assert max(gaps) < 0.015


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", "gpt_oss", "gemma3_text", "granitemoehybrid", "nemotron_h", "glm4_moe", "deepseek_v3"]
)
def test_families(name):
    found = _run("family", name)
    print(name, found)
    assert found["outcome"] == "right"


@pytest.mark.parametrize("arch", ["gemma3", "smolvlm", "qwen3_vl"])
def test_images(arch, monkeypatch):
    """In fp32 without TF32; the tokens of an image of Gemma 3 attend to each other."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    gaps, hidden = _run("images", arch)
    print(arch, "gaps", gaps, "with later image tokens hidden", hidden)
    assert max(gaps) < 0.01
    assert arch != "gemma3" or hidden > 0.05


@pytest.mark.parametrize("eager", [False, True])
def test_weights_in_flight(eager):
    gaps = _run("in_flight", "0.5b", eager)
    print("gaps", gaps)
    assert max(gaps) < 0.015


def test_sleep_frees_memory_and_keeps_promises():
    awake, first, second, partly, again = _run("sleeping", "0.5b")
    print("GiB", awake, first, second, partly, again)
    assert first < awake - 10 and second <= first + 0.1
    assert partly < again - 10
    assert abs(again - awake) < 2


def test_recorded_experts_are_those_of_the_embedded_engine():
    assert _run("recorded_experts") > 0.9


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_two_gpus():
    gaps = _run("tensor_parallel", "0.5b")
    print("gaps", gaps)
    assert max(gaps) < 0.02
