"""The embedded rollout engine: batched decoding in this process."""

from verl_fn.backends.serving import NotFiniteError

from .engine import Sampler

__all__ = ["NotFiniteError", "Sampler"]
