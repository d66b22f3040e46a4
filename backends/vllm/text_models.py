"""Text models that vLLM has only inside a model of images, registered under the names that trainers use.

Qwen3.5's checkpoints hold a tower for images. A trainer of text makes ``Qwen3_5ForCausalLM`` from their text config;
vLLM 0.24.0 has that class as a part of ``Qwen3_5ForConditionalGeneration`` only; it lacks the methods about the cache
of linear attention. They are added here, in a module of its own, since the import of vLLM's needs torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.model_executor.models import config, qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid


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


def register() -> None:
    """Makes vLLM know these models in this process."""
    for model in (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM):
        name = model.__name__
        ModelRegistry.register_model(name, model)
        config.MODELS_CONFIG_MAP[name] = config.Qwen3_5ForConditionalGenerationConfig
