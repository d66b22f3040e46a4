"""vLLM on prompts with images, on the CPU, beside the trainer and the embedded engine."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from ranks import Ranks

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.vllm import arguments
from verl_fn.backends.vllm.arguments import EngineArgumentError, engine_arguments

BESIDE = Path(os.environ.get("TORCHVISION", Path(__file__).parents[3] / ".torchvision"))
INSTALLED = importlib.util.find_spec("torchvision") is not None
runs = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or not (INSTALLED or (BESIDE / "torchvision").is_dir()),
    reason="vLLM or torchvision is not installed: make setup installs both for Python 3.12",
)


@pytest.fixture(scope="module", params=["smolvlm", "idefics3", "qwen3_vl", "qwen2_5_vl"])
def alone(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCH", request.param)
        patch.setenv("BESIDE", str(BESIDE))
        # Not from the warm Python, which has looked for torchvision already.
        process = Ranks(1, group=False, python=os.path.join(sys.prefix, "bin", "python"))
    yield lambda name: process.run(f"vllm_image_cases.{name}")[0]
    process.kill()


@runs
def test_log_probs_and_draws_after_publications(alone):
    assert alone("publications") <= 1e-4


@runs
def test_weights_in_flight_compute_images_again(alone):
    assert alone("in_flight") <= 1e-4


@runs
def test_another_prompt_than_the_trainers_is_an_error(alone):
    alone("another_prompt")


OPTIONS = {"device": "cpu", "dtype": "float32", "slots": 2, "max_length": 64, "tensor_parallel_size": 1,
           "gpu_memory_utilization": 0.5, "enforce_eager": True}  # fmt: skip


def test_what_does_not_run(tmp_path, monkeypatch):
    folder = new_model(tmp_path / "qwen", chars="ab", arch="qwen3_vl")
    with pytest.raises(EngineArgumentError, match="limit_mm_per_prompt cannot be set: a prompt has as many images"):
        engine_arguments(folder, engine_kwargs={"limit_mm_per_prompt": {"image": 1}}, **OPTIONS)
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"vLLM needs torchvision for models with images: .* torchvision=="):
        engine_arguments(folder, engine_kwargs={}, **OPTIONS)
