"""Starts vLLM's engine, and says what its errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl_fn.backends.hf.config import ModelError

from .arguments import EngineArgumentError

# Text models that vLLM has as a part of a model of images only; see ``text_models``.
TEXT_MODELS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def started(arguments: Mapping[str, Any], device: str, model: str) -> Any:
    """Starts vLLM's engine.

    Args:
        arguments: of vLLM's ``EngineArgs``.
        device: ``cpu`` or ``cuda``.
        model: the name of transformers' class of the model.

    Raises:
        ModelError: vLLM does not know the model.
        EngineArgumentError: the GPU has less free memory than the engine may take.
    """
    # The compiler tries out kernels, but refuses to do so in that mode.
    torch.use_deterministic_algorithms(False)
    if device == "cpu":
        # Compiling takes longer than all that is computed on a CPU.
        torch._dynamo.config.disable = True
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if model in TEXT_MODELS:
        from .text_models import register

        register()
        arguments = {**arguments, "hf_overrides": {"architectures": [model]}}
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        if "not supported for now" in str(error) or "no vLLM implementation" in str(error):
            raise ModelError(
                f"{arguments['model']}: vLLM does not know this model ({error}); set rollout.name=sampler"
            ) from error
        if "gpu memory utilization" in str(error).lower():
            raise EngineArgumentError(f"rollout.gpu_memory_utilization does not fit this GPU: {error}") from error
        raise
