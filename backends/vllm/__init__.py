"""vLLM as a rollout engine: generation at speed, with the draws of the embedded engine."""

from .engine import Vllm

__all__ = ["Vllm"]
