"""Training in one process: the reference that other backends are compared with."""

from .backend import Local

__all__ = ["Local"]
