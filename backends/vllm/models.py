"""Models that vLLM has in another form than trainers use.

Qwen3.5's checkpoints hold a tower for images. A trainer of text makes ``Qwen3_5ForCausalLM`` from their text config;
vLLM 0.24.0 has that class as a part of ``Qwen3_5ForConditionalGeneration`` only; it lacks the methods about the cache
of linear attention. They are added here.

vLLM asks transformers' processor how many tokens an image of Idefics3 or SmolVLM has at most, and that processor
needs packages for videos. Here each tile is an image of its own, whose number of tokens the config tells.

The module stands apart since the imports of vLLM's need torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.model_executor.models import config, idefics3, qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.multimodal import MULTIMODAL_REGISTRY

from verl_fn.backends.hf.vision import tokens_of_tile


class _Text(IsHybrid):
    """What the model of images does for its text model."""

    supports_mrope = True
    get_mamba_state_dtype_from_config = qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_dtype_from_config
    get_mamba_state_shape_from_config = qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config
    get_mamba_state_copy_func = qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_copy_func

    def get_mrope_input_positions(self, input_tokens: Sequence[int], mm_features: Any) -> tuple[Tensor, int]:
        """Returns positions of text: all three axes count tokens."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0


class Qwen3_5ForCausalLM(qwen3_5.Qwen3_5ForCausalLM, _Text):
    """The text model of Qwen3.5."""


class Qwen3_5MoeForCausalLM(qwen3_5.Qwen3_5MoeForCausalLM, _Text):
    """The text model of Qwen3.5 with experts."""


class _Tiles(idefics3.Idefics3ProcessingInfo):
    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": tokens_of_tile(self.get_hf_config())}


@MULTIMODAL_REGISTRY.register_processor(
    idefics3.Idefics3MultiModalProcessor, info=_Tiles, dummy_inputs=idefics3.Idefics3DummyInputsBuilder
)
class Idefics3OfTiles(idefics3.Idefics3ForConditionalGeneration):
    """Idefics3, or SmolVLM, whose images are single tiles."""


def register() -> None:
    """Makes vLLM know these models in this process."""
    for text in (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM):
        config.MODELS_CONFIG_MAP[text.__name__] = config.Qwen3_5ForConditionalGenerationConfig
    for model in (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Idefics3OfTiles):
        ModelRegistry.register_model(model.__name__, model)
