"""vLLM on prompts with images, on the CPU, beside the trainer and the embedded engine."""

import importlib.util
import os
from pathlib import Path

import pytest
from ranks import Ranks
from warm_python import warm_python

from verl_fn.backends.hf.config import ModelError, read_config
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.vllm import arguments
from verl_fn.backends.vllm.arguments import EngineArgumentError, engine_arguments, reads_images

BESIDE = Path(os.environ.get("TORCHVISION", Path(__file__).parents[3] / ".torchvision"))
INSTALLED = importlib.util.find_spec("torchvision") is not None
runs = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or not (INSTALLED or (BESIDE / "torchvision").is_dir()),
    reason="vLLM or torchvision is not installed: make setup installs both for Python 3.12",
)


@pytest.fixture(scope="module")
def python():
    """A warm Python of its own with vLLM, since the one of all tests has looked for torchvision already."""
    with pytest.MonkeyPatch.context() as patch:
        if not INSTALLED:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(BESIDE), os.environ.get("PYTHONPATH")])))
        with warm_python(Path(__file__).parents[2] / "vllm_imports.py") as path:
            yield path


CLASSES = ["idefics3", "qwen3_vl", "qwen2_5_vl"]  # in vLLM; SmolVLM's is the first one, too
each_class = pytest.mark.parametrize("alone", CLASSES, indirect=True, scope="module")


@pytest.fixture(scope="module", params=["smolvlm", *CLASSES])
def alone(request, python):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCH", request.param)
        process = Ranks(1, group=False, python=python)
    yield lambda name: process.run(f"vllm_image_cases.{name}")[0]
    process.kill()


@runs
def test_log_probs_and_draws_after_publications(alone):
    assert alone("publications") <= 1e-4


@runs
@each_class
def test_weights_in_flight_compute_images_again(alone):
    assert alone("in_flight") <= 1e-4


@runs
@each_class
def test_a_frozen_tower_is_published_once(alone):
    sent, worst = alone("frozen_tower")
    assert sent == [True, False, False, True, True, False] and worst <= 1e-4


@runs
@each_class
def test_another_prompt_than_the_trainers_is_an_error(alone):
    alone("another_prompt")


@runs
def test_gemma_3_without_its_mask(python):
    """Everything but the mask, which vLLM has on GPUs only; ``test_vllm_cuda.py`` compares the mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCH", "gemma3")
        process = Ranks(1, group=False, python=python)
    try:
        assert process.run("vllm_image_cases.without_blocks")[0] <= 1e-4
    finally:
        process.kill()


OPTIONS = {"device": "cpu", "dtype": "float32", "slots": 2, "max_length": 64, "tensor_parallel_size": 1,
           "gpu_memory_utilization": 0.5, "enforce_eager": True}  # fmt: skip


def test_what_does_not_run(tmp_path, monkeypatch):
    folder = new_model(tmp_path / "qwen", chars="ab", arch="qwen3_vl")
    with pytest.raises(EngineArgumentError, match="limit_mm_per_prompt cannot be set: a prompt has as many images"):
        engine_arguments(folder, engine_kwargs={"limit_mm_per_prompt": {"image": 1}}, **OPTIONS)
    gemma = new_model(tmp_path / "gemma", chars="ab", arch="gemma3", sliding_window=3)
    with pytest.raises(ModelError, match="omits that for more than sliding_window = 3 tokens; an image has 4"):
        engine_arguments(gemma, engine_kwargs={}, **(OPTIONS | {"device": "cuda"}))
    # vLLM's attention on CPUs has no such mask, so there the engine reads text only.
    config = read_config(gemma)
    assert [reads_images(config, device) for device in ("cpu", "cuda", "cuda:1")] == [False, True, True]
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"vLLM needs torchvision for models with images: .* torchvision=="):
        engine_arguments(folder, engine_kwargs={}, **OPTIONS)
