"""vLLM as a rollout engine: generation at speed, with the draws of the embedded engine."""

from .arguments import EngineArgumentError, EngineError, UntestedVersion
from .engine import AsleepError, Vllm

__all__ = ["AsleepError", "EngineArgumentError", "EngineError", "UntestedVersion", "Vllm"]
