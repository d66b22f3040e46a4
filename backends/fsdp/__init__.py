"""Training over the ranks of a process group, on PyTorch's ``fully_shard``."""

from .backend import Fsdp

__all__ = ["Fsdp"]
