"""Tiny random models with images: the fields of their configs, the tokens of images, and the image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.processor import image_processor_class
from verl_fn.backends.hf.vision import FAMILIES, GRIDS, PIXEL_MASKS

# The tokens of images in real tokenizers, by the field of the config that has their ids.
QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
IDEFICS = {"image_token_id": "<image>", "": "<fake_token_around_image>", " ": "<global-img>"}
GEMMA = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
# CHAT_TEMPLATE of new_model for content that is a list of parts, too.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)
PATCH, MERGE = 8, 2  # patches of 8 x 8 pixels, of which 2 x 2 become one feature


def add_image_tokens(tokenizer: Any, arch: str) -> dict[str, int]:
    """Gives a tokenizer the tokens of images of an architecture, and returns their ids by the config's fields."""
    tokens = _tokens(arch)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items() if name.strip()}


def chat_template(arch: str) -> str:
    """Returns a minimal chat template for messages with images."""
    tokens = _tokens(arch)
    shown = tokens.get("boi_token_index") or tokens.get("image_token_id", "")
    if tokens is QWEN:
        shown = tokens["vision_start_token_id"] + shown + tokens["vision_end_token_id"]
    return TEMPLATE.replace("IMAGE", shown)


def _tokens(arch: str) -> dict[str, str]:
    family = FAMILIES[arch]
    return QWEN if GRIDS in family.fields else IDEFICS if PIXEL_MASKS in family.fields else GEMMA


def vision_fields(arch: str, text: Mapping[str, Any], ids: Mapping[str, int], image_size: int) -> dict[str, Any]:
    """Returns the fields of a config whose language model has these fields.

    Args:
        arch: a model type of ``FAMILIES``.
        text: the fields of the language model.
        ids: the tokens of images, from ``add_image_tokens``.
        image_size: the side of the largest image, in pixels.

    Raises:
        ModelError: the size is not a multiple of the patches that become a feature.
    """
    if image_size < PATCH * MERGE or image_size % (PATCH * MERGE):
        raise ModelError(f"image_size = {image_size} is not a multiple of {PATCH * MERGE} pixels")
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    vision = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "patch_size": PATCH}
    vision |= {name: text[name] for name in ("initializer_range",) if name in text}
    fields: dict[str, Any] = {"tie_word_embeddings": text.get("tie_word_embeddings", True), **ids}
    inner = dict(text)
    if GRIDS in FAMILIES[arch].fields:
        side = image_size // PATCH
        vision |= {"depth": 2, "num_heads": heads, "out_hidden_size": hidden, "spatial_merge_size": MERGE}
        if arch == "qwen3_vl":
            vision |= {"num_position_embeddings": side * side, "deepstack_visual_indexes": [0, 1]}
        else:
            vision |= {"window_size": PATCH * MERGE * 2, "fullatt_block_indexes": [1]}
        half = text["head_dim"] // 2
        share = half * 5 // 16
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * share, share, share]}
        inner.setdefault("rope_parameters", rope | ({"mrope_interleaved": True} if arch == "qwen3_vl" else {}))
    else:
        vision |= {"num_hidden_layers": 2, "num_attention_heads": heads, "image_size": image_size}
        if arch == "gemma3":
            vision["vision_use_head"] = False
            fields["mm_tokens_per_image"] = (image_size // PATCH // MERGE) ** 2
        else:
            inner["model_type"] = "llama"
            fields |= {"scale_factor": MERGE, "pad_token_id": text["pad_token_id"]}
    return fields | {"text_config": inner, "vision_config": vision}


def write_image_processor(folder: Path, arch: str, image_size: int) -> None:
    """Writes the settings of the image processor into a folder: images become at most this large, in pixels."""
    if GRIDS in FAMILIES[arch].fields:
        area = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": image_size**2}
        options = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": area}
    elif PIXEL_MASKS in FAMILIES[arch].fields:
        edge = {"longest_edge": image_size}
        options = {"size": edge, "max_image_size": edge, "do_image_splitting": False}
    else:
        options = {"size": {"height": image_size, "width": image_size}}
    processor = image_processor_class(arch)(**options)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor.to_dict(), indent=2, default=int) + "\n")
