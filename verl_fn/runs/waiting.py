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

from .batch_file import batch_of, tensors_of
from .errors import RunError
from .recorder import Drawn

BATCH, SAMPLES, SCORED = "batch/", "samples/", "scored/"


def save_waiting(waiting: Sequence[Drawn], folder: Path, w: Workers) -> list[dict[str, Any]]:
    """Waits until experience has arrived, writes it into a checkpoint, and returns what its manifest holds of it.

    Raises:
        RunError: the experience of the algorithm is no ``Batch``.
    """
    records = []
    for number, drawn in enumerate(waiting):
        parts = {BATCH: w.get(drawn.experience.batch)}
        if not isinstance(parts[BATCH], Batch):
            raise RunError(
                f"experience that waits is saved with the state, and a {type(parts[BATCH]).__name__} cannot be: let "
                "sample return an Experience whose batch is a Batch, or set driver.max_lag=0"
            )
        if drawn.samples is not None:
            parts[SAMPLES] = pack(w.get(drawn.samples))
        if drawn.scored is not None and drawn.scored is not drawn.experience.batch:
            parts[SCORED] = w.get(drawn.scored)
        tensors = {prefix + name: t for prefix, batch in parts.items() for name, t in tensors_of(batch).items()}
        file = f"waiting_{number}.safetensors"
        with disk_errors(folder):
            save_file(tensors, folder / file)
        report = {name: float(value) for name, value in drawn.experience.report.items()}
        counts = {"problems": drawn.problems, "answered": drawn.experience.problems, "asked": drawn.asked}
        records.append({"file": file, **counts, "scored": drawn.scored is not None, "report": report})
    return records


def read_waiting(records: Sequence[Mapping[str, Any]], folder: Path) -> tuple[Drawn, ...]:
    """Reads the experience that ``save_waiting`` wrote.

    Raises:
        CheckpointError: a file is damaged.
    """
    return tuple(_read(record, folder / record["file"]) for record in records)


def _read(record: Mapping[str, Any], file: Path) -> Drawn:
    try:
        tensors = load_file(file)
        parts = {
            prefix: batch_of({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
            for prefix in (BATCH, SAMPLES, SCORED)
            if any(name.startswith(prefix) for name in tensors)
        }
        batch = parts[BATCH]
        samples = unpack(parts[SAMPLES]) if SAMPLES in parts else None
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    scored = parts.get(SCORED, batch) if record["scored"] else None
    experience = Experience(batch, record["answered"], report=dict(record["report"]))
    return Drawn(experience, record["problems"], record["asked"], samples, scored)
