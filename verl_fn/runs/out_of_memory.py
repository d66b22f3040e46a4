"""The error of a run that ends out of memory: the phase, the bytes of each part, and the settings to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verl_fn.backends.memory import PhaseOutOfMemory, lacks_memory, reason_of
from verl_fn.config import Plan
from verl_fn.driver import ranks
from verl_fn.errors import UserError

from .memory import GIB, advice, largest, phases


class RunOutOfMemory(UserError, RuntimeError):
    """A run ended because a device had too little memory."""


@contextlib.contextmanager
def explained(plan: Plan, gpu: int | None) -> Iterator[None]:
    """Replaces an error for a lack of memory by one that says what the plan holds in that phase.

    Args:
        plan: the plan of the run.
        gpu: bytes of the GPU of a training rank; None where ranks compute on the CPU.

    Raises:
        RunOutOfMemory: in place of an error for a lack of memory; it keeps the notes of that error, which name the
            process.
    """
    try:
        yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        name = error.phase if isinstance(error, PhaseOutOfMemory) else ""
        reason = error.reason if isinstance(error, PhaseOutOfMemory) else reason_of(error)
        explanation = RunOutOfMemory(explain(plan, gpu, name, reason))
        for note in getattr(error, "__notes__", ()):
            explanation.add_note(note)
        raise explanation from error


def explain(plan: Plan, gpu: int | None, name: str, reason: str) -> str:
    """Describes a lack of memory.

    Args:
        plan: the plan of the run.
        gpu: bytes of the GPU; None where ranks compute on the CPU.
        name: the phase, as in ``timing_s/*``; empty or unknown where the algorithm does not tell.
        reason: what the error says.
    """
    counted = phases(plan, ranks.training_ranks(plan), gpu)
    phase = next((phase for phase in counted if phase.name == name), None)
    where = f"in {name} ({phase.title})" if phase is not None else f"in {name}" if name else "outside of a phase"
    shown = phase or largest(counted)
    which = "there" if phase is not None else f"in its largest phase, the {shown.title}"
    size = f" of {gpu / GIB:.2f} GiB" if gpu is not None else ""
    return (
        f"out of memory {where}: {reason}\nBy the plan, a GPU{size} holds {which}: {shown.describe()}\n"
        f"What takes less: {advice(shown, gpu)}. The same command continues from the last checkpoint"
    )
