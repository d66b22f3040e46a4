"""Experience that waits between sampling and learning, in a checkpoint: a safetensors file for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from verl_fn.algorithms import Experience, Workers
from verl_fn.backends.checkpoint.state_folder import CheckpointError, disk_errors
from verl_fn.state import Batch, pack, unpack

from . import RunError
from .batch_file import batches_in, numbered, tensors_of
from .recorder import Drawn, Waiting

BATCH, SAMPLES, SCORED, DROPPED = "batch", "samples", "scored", "dropped"


def save_waiting(waiting: Sequence[Waiting], folder: Path, w: Workers) -> list[dict[str, Any]]:
    """Waits until experience has arrived, writes it into a checkpoint, and returns what its manifest holds of it.

    Raises:
        RunError: the experience of the algorithm is no ``Batch``.
    """
    records = []
    for number, one in enumerate(waiting):
        drawn = w.get(one.drawn)
        batch = drawn.experience.batch
        if not isinstance(batch, Batch):
            raise RunError(
                f"experience that waits is saved with the state, and a {type(batch).__name__} cannot be: let "
                "sample return an Experience whose batch is a Batch, or set driver.max_lag=0"
            )
        # Most often what the reward gave is the experience itself.
        same = [scored is drawn.experience.batch for scored in drawn.scored] == [True]
        scored = () if same else drawn.scored
        parts = {BATCH: [batch], SAMPLES: [pack(w.get(call)) for call in drawn.samples], SCORED: scored}
        parts |= {f"{DROPPED}/{reason}": [rest] for reason, rest in drawn.experience.dropped.items()}
        tensors = {
            numbered(kind, call) + name: t
            for kind, batches in parts.items()
            for call, batch in enumerate(batches)
            for name, t in tensors_of(batch).items()
        }
        file = f"waiting_{number}.safetensors"
        with disk_errors(folder):
            save_file(tensors, folder / file)
        report = {name: float(value) for name, value in drawn.experience.report.items()}
        counts = {"problems": drawn.problems, "answered": drawn.experience.problems, "asked": drawn.asked}
        reasons = list(drawn.experience.dropped)
        records.append({"file": file, **counts, "scored": len(drawn.scored), "dropped": reasons, "report": report})
    return records


def read_waiting(records: Sequence[Mapping[str, Any]], folder: Path) -> tuple[Waiting, ...]:
    """Reads the experience that ``save_waiting`` wrote.

    Raises:
        CheckpointError: a file is damaged.
    """
    return tuple(_read(record, folder / record["file"]) for record in records)


def _read(record: Mapping[str, Any], file: Path) -> Waiting:
    try:
        tensors = load_file(file)
        (batch,) = batches_in(tensors, BATCH)
        samples = tuple(unpack(call) for call in batches_in(tensors, SAMPLES))
        scored = tuple(batches_in(tensors, SCORED))
        dropped = {reason: batches_in(tensors, f"{DROPPED}/{reason}")[0] for reason in record.get("dropped", ())}
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if record["scored"] and not scored:
        scored = (batch,)
    experience = Experience(batch, record["answered"], report=dict(record["report"]), dropped=dropped)
    drawn = Drawn(experience, record["problems"], record["asked"], samples, scored)
    return Waiting(drawn.problems, drawn.asked, drawn)
