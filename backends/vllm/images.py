"""Prompts with images for vLLM: the trainer's own tokens and pixels, which no processor of vLLM's makes again."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.vision import GRIDS, PIXELS, family_of, merge_size
from verl_fn.backends.protocol import Request
from verl_fn.errors import install

# The families that were compared with the trainer, by transformers' model type.
SEEING = ("qwen2_5_vl", "qwen3_vl")
TORCHVISION = "0.26.0"


def reads_images(config: Any) -> bool:
    """Returns whether prompts of a model may have images in vLLM."""
    return config.model_type in SEEING


def check_images(config: Any, folder: Path) -> None:
    """Raises an error for a model with images that vLLM does not run here.

    Raises:
        ModelError: its family was not compared with the trainer, or a package is missing.
    """
    if family_of(config) is None or config.model_type == "gemma3":
        return
    if not reads_images(config):
        raise ModelError(
            f"{folder}: vLLM runs {' and '.join(SEEING)} here, and no other models with images; set "
            "rollout.name=sampler"
        )
    if importlib.util.find_spec("torchvision") is None:
        raise ModelError(
            f"{folder}: vLLM needs torchvision for models with images: "
            f"{install('--no-deps', f'torchvision=={TORCHVISION}')}, or set rollout.name=sampler"
        )


def image_arguments(config: Any) -> dict[str, Any]:
    """Returns arguments of vLLM's ``EngineArgs`` for a model with images; none for a model of text.

    vLLM reads its own processor, which needs the tokenizer, but it processes nothing.
    """
    if not reads_images(config):
        return {}
    return {
        "skip_tokenizer_init": False,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"video": 0},
        # vLLM would compute the largest image that its processor allows, to see how much memory that takes.
        "skip_mm_profiling": True,
    }


def prompt_with_images(request: Request, config: Any) -> Any:
    """Returns vLLM's input for a request whose prompt has images.

    An image is named by what it shows, so that requests with the same one share its features.

    Args:
        request: its prompt has a token for each feature of its images.
        config: of the model.
    """
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    assert request.images is not None
    pixels, grids = request.images.fields[PIXELS], request.images.fields[GRIDS]
    patches = grids.prod(-1)
    data = BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", patches),
        "image_grid_thw": MultiModalFieldConfig.batched("image"),
    }
    # What the model drew in earlier turns of a conversation is text.
    prompt = torch.tensor(request.prompt[: request.images.length])
    places = (prompt == config.image_token_id).nonzero()[:, 0]
    ranges, first = [], 0
    for size in (patches // merge_size(config) ** 2).tolist():
        ranges.append(PlaceholderRange(offset=int(places[first]), length=size))
        first += size
    names = [_name(*image) for image in zip(pixels.split(patches.tolist()), grids, strict=True)]
    return mm_input(
        list(request.prompt),
        MultiModalKwargsItems.from_hf_inputs(data, fields),
        {"image": names},
        {"image": ranges},
    )


def _name(pixels: Tensor, grid: Tensor) -> str:
    found = hashlib.sha256(repr(grid.tolist()).encode())
    found.update(pixels.contiguous().numpy().data)
    return found.hexdigest()
