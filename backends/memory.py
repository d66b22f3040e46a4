"""Reports which micro-batch did not fit into a device's memory, and which setting to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from verl_fn.errors import UserError
from verl_fn.state import Batch


class OutOfMemory(UserError, torch.OutOfMemoryError):
    """A micro-batch does not fit into the memory of its device."""


@contextlib.contextmanager
def fits(
    batch: Batch, number: int, count: int, max_tokens: int, *, sharers: int = 1, keeps: bool = False
) -> Iterator[None]:
    """Replaces torch's error for a lack of memory by one that names the micro-batch.

    Args:
        batch: the micro-batch.
        number: its number, from 0.
        count: how many micro-batches the call has.
        max_tokens: the token budget that they were cut by.
        sharers: how many ranks share that budget.
        keeps: whether activations are kept for a backward pass, which checkpointing avoids.

    Raises:
        OutOfMemory: in place of torch's own error.

    Example:
        >>> try:
        ...     with fits(Batch.from_rows([[1, 2], [3]]), 0, 4, 8):
        ...         raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        ... except OutOfMemory as error:
        ...     print(str(error).partition(":")[0])
        micro-batch 1 of 4, with 2 rows and 3 tokens, does not fit into memory
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        budget = f"max_tokens = {max_tokens} here" + (f", for {sharers} ranks" if sharers > 1 else "")
        other = ", or turn on enable_gradient_checkpointing (checkpointing)" if keeps else ""
        raise OutOfMemory(
            f"micro-batch {number + 1} of {count}, with {len(batch)} rows and {batch.num_tokens} tokens, does not "
            f"fit into memory: lower ppo_max_token_len_per_gpu, {max_tokens // sharers} now ({budget}){other}. "
            f"{str(error).splitlines()[0]}"
        ) from error
