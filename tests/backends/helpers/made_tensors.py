"""Which tensors a function makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def made(run):
    """The elements and the dtype of each tensor with memory of its own that ``run()`` makes."""
    found = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                    found.append((t.numel(), t.dtype))
            return out

    with Spy():
        run()
    return found
