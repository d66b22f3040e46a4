"""Training with megatron-core through Megatron-Bridge: tensor, pipeline, context, expert and data parallelism."""

from .backend import Megatron

__all__ = ["Megatron"]
