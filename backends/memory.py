"""A device that runs out of memory: which micro-batch it was, and what to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from verl_fn.errors import UserError
from verl_fn.state import Batch


class OutOfMemory(UserError, torch.OutOfMemoryError):
    """A micro-batch that does not fit into the memory of its device."""


@contextlib.contextmanager
def fits(
    batch: Batch, number: int, count: int, max_tokens: int, *, sharers: int = 1, keeps: bool = False
) -> Iterator[None]:
    """Say which micro-batch was computed on when memory ran out.

    Args:
        number: of the micro-batch, from 0.
        count: of all.
        max_tokens: the budget that made it.
        sharers: as many ranks have that budget together.
        keeps: whether activations are kept for a backward pass, which checkpointing would not.

    Raises:
        OutOfMemory: in place of torch's own error.

    >>> with fits(Batch.from_rows([[1, 2], [3]]), 0, 4, 8):
    ...     raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    Traceback (most recent call last):
    verl_fn.backends.memory.OutOfMemory: micro-batch 1 of 4, with 2 rows and 3 tokens, does not fit into memory: lower ...
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        budget = f"max_tokens = {max_tokens} here" + (f", for {sharers} ranks" if sharers > 1 else "")
        other = ", or turn on enable_gradient_checkpointing (checkpointing)" if keeps else ""
        raise OutOfMemory(
            f"micro-batch {number + 1} of {count}, with {len(batch)} rows and {batch.num_tokens} tokens, does not fit "
            f"into memory: lower ppo_max_token_len_per_gpu, {max_tokens // sharers} now ({budget}){other}. "
            f"{str(error).splitlines()[0]}"
        ) from error
