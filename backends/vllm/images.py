"""Prompts with images for vLLM: the trainer's own tokens and pixels, which no processor of vLLM's makes again."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.vision import family_of, merge_size, tokens_of_tile
from verl_fn.backends.protocol import Request
from verl_fn.errors import install

# The families that were compared with the trainer, by transformers' model type.
SEEING = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
IN_PARTS = ("pixel_values", "pixel_attention_mask")  # an image has several rows of these tensors
TORCHVISION = "0.26.0"


def reads_images(config: Any) -> bool:
    """Returns whether prompts of a model may have images in vLLM."""
    return config.model_type in SEEING


def check_images(config: Any, folder: Path) -> None:
    """Raises an error for a model with images if vLLM lacks a package that it needs for them.

    Raises:
        ModelError: torchvision is not installed.
    """
    if reads_images(config) and importlib.util.find_spec("torchvision") is None:
        raise ModelError(
            f"{folder}: vLLM needs torchvision for models with images: "
            f"{install('--no-deps', f'torchvision=={TORCHVISION}')}, or set rollout.name=sampler"
        )


def image_arguments(config: Any) -> dict[str, Any]:
    """Returns arguments of vLLM's ``EngineArgs`` for a model with images; none for a model of text.

    vLLM reads its own processor, and so the tokenizer, but it processes nothing.
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

    An image is named by what it shows, so that requests with the same one share its features. If images are cut into
    tiles, each tile is an image for vLLM, since a row does not say which tiles are of one.

    Args:
        request: its prompt has a token for each feature of its images.
        config: of the model.
    """
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    family = family_of(config)
    assert request.images is not None and family is not None
    given = {argument: request.images.fields[name] for name, argument in family.fields.items()}
    if family.axes:
        parts = given["image_grid_thw"].prod(-1)
        sizes = parts // merge_size(config) ** 2
    else:
        parts = given["num_patches"] = torch.ones(len(given["pixel_values"]), dtype=torch.int64)
        sizes = parts * tokens_of_tile(config)
    fields = {
        name: MultiModalFieldConfig.flat_from_sizes("image", parts)
        if name in IN_PARTS
        else MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        for name in given
    }
    # What the model drew in earlier turns of a conversation is text.
    prompt = torch.tensor(request.prompt[: request.images.length])
    first = (prompt == config.image_token_id).nonzero()[:, 0][sizes.cumsum(0) - sizes]
    ranges = [
        PlaceholderRange(offset=at, length=size) for at, size in zip(first.tolist(), sizes.tolist(), strict=True)
    ]
    of_image = (t.split(parts.tolist()) if name in IN_PARTS else t.split(1) for name, t in given.items())
    return mm_input(
        list(request.prompt),
        MultiModalKwargsItems.from_hf_inputs(BatchFeature(given), fields),
        {"image": [_name(one) for one in zip(*of_image, strict=True)]},
        {"image": ranges},
    )


def _name(image: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for t in image:
        found.update(repr(t.shape).encode() + t.contiguous().numpy().data)
    return found.hexdigest()
