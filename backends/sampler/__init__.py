"""The embedded rollout engine: batched decoding in this process."""

from .engine import NotFiniteError, Sampler

__all__ = ["NotFiniteError", "Sampler"]
