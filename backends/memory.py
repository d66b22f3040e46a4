"""Reports what did not fit into a device's memory: the micro-batch and the setting to lower, and the phase."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator

import torch

from verl_fn.errors import UserError
from verl_fn.state import Batch


class OutOfMemory(UserError, torch.OutOfMemoryError):
    """A micro-batch does not fit into the memory of its device."""


class PhaseOutOfMemory(OutOfMemory):
    """A phase of a step does not fit into the memory of a device.

    Attributes:
        phase: the phase, as in ``timing_s/*``.
    """

    def __init__(self, phase: str, reason: str) -> None:
        super().__init__(phase, reason)
        self.phase, self.reason = phase, reason

    def __str__(self) -> str:
        return f"out of memory in the phase {self.phase}: {self.reason}"


# How torch, vLLM, NCCL and CUDA itself say it; errors of the last three are plain RuntimeErrors.
_SIGNS = re.compile(
    r"cuda[^\n]*out of memory|out of memory[^\n]*cu(da|mem)|can't allocate memory|"
    r"no available memory for the cache blocks|free memory on device[^\n]*less than desired",
    re.IGNORECASE,
)


def lacks_memory(error: BaseException) -> bool:
    """Returns whether an error says that a device has too little memory.

    Example:
        >>> lacks_memory(RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62"))
        True
        >>> lacks_memory(RuntimeError("the row is out of range"))
        False
    """
    return isinstance(error, torch.OutOfMemoryError) or bool(_SIGNS.search(str(error)))


def reason_of(error: BaseException) -> str:
    """Returns what an error of another process says itself, without the traceback that Ray puts around it."""
    cause = getattr(error, "cause", None)
    lines = str(cause if isinstance(cause, BaseException) else error).strip().splitlines()
    said = [line for line in lines if _SIGNS.search(line)] or lines[-1:]
    return said[0].strip() if said else type(error).__name__


RUNNING: list[str] = []
"""The phases that the step of this process is in, the outermost first, to show its progress."""


@contextlib.contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Keeps the phase in ``RUNNING``, and names it in an error that says that memory lacks; other errors pass.

    ``RUNNING`` shows what the step waits for, so phases of other threads that sample for later steps are not kept.

    Args:
        phase: the phase, as in ``timing_s/*``.

    Raises:
        PhaseOutOfMemory: in place of an error for a lack of memory.

    Example:
        >>> with in_phase("update_actor"):
        ...     raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        Traceback (most recent call last):
        verl_fn.backends.memory.PhaseOutOfMemory: out of memory in the phase update_actor: CUDA out of memory. Tried
        to allocate 2.00 GiB.
    """
    running = RUNNING if threading.current_thread() is threading.main_thread() else []
    running.append(phase)
    try:
        yield
    except PhaseOutOfMemory:
        raise
    except Exception as error:
        if not lacks_memory(error):
            raise
        failure = PhaseOutOfMemory(phase, reason_of(error))
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error
    finally:
        running.remove(phase)


@contextlib.contextmanager
def fits(
    batch: Batch, number: int, count: int, max_tokens: int, *, sharers: int = 1, keeps: bool = False
) -> Iterator[None]:
    """Replaces torch's error for a lack of memory by one that names the micro-batch.

    Args:
        number: its number, from 0.
        count: how many micro-batches the call has.
        max_tokens: the token budget that they were cut by.
        sharers: how many ranks share that budget.
        keeps: whether activations are kept for a backward pass; checkpointing avoids this.

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
