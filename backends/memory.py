"""A device that runs out of memory: which micro-batch it was, and what to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from verl_fn.state import Batch


class OutOfMemory(torch.OutOfMemoryError):
    """A micro-batch that does not fit into the memory of its device."""


@contextlib.contextmanager
def fits(batch: Batch, number: int, count: int, max_tokens: int) -> Iterator[None]:
    """Say which micro-batch was computed on when memory ran out.

    Args:
        number: of the micro-batch, from 0.
        count: of all.
        max_tokens: the budget that made it.

    Raises:
        OutOfMemory: in place of torch's own error.

    >>> with fits(Batch.from_rows([[1, 2], [3]]), 0, 4, 8):
    ...     raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    Traceback (most recent call last):
    verl_fn.backends.memory.OutOfMemory: micro-batch 1 of 4, with 2 rows and 3 tokens, does not fit into memory: ...
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"micro-batch {number + 1} of {count}, with {len(batch)} rows and {batch.num_tokens} tokens, does not fit "
            f"into memory: lower ppo_max_token_len_per_gpu (max_tokens, {max_tokens} now), or turn on "
            f"enable_gradient_checkpointing (checkpointing). {str(error).splitlines()[0]}"
        ) from error
