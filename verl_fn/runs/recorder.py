"""Records what passes through the rollout engine and the reward while an algorithm draws experience.

An algorithm samples as it likes. So it gets workers that record each call. Experience that waits between sampling and
learning is a safetensors file for each step in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl_fn.algorithms import Experience, Workers
from verl_fn.backends.checkpoint import CheckpointError, disk_errors
from verl_fn.backends.protocol import Ref, Request, Sample, Through
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError
from verl_fn.state import Batch, Ragged, pack, unpack
from verl_fn.state.batch import CORE

from . import RunError

TOKEN, ROW, VALUES, OFFSETS = "token.", "row.", "ragged_values.", "ragged_offsets."
BATCH, SAMPLES, SCORED, DROPPED = "batch", "samples", "scored", "dropped"


@attrs.frozen(eq=False)
class Drawn:
    """The experience of one step, and what the engine and the reward gave while it was drawn.

    Attributes:
        experience: the result of ``sample``.
        problems: how many training problems ``sample`` took.
        asked: how many responses the engine was asked for.
        samples: what the engine gave, for each call in order; ``Workers.get`` fetches it.
        scored: what the reward gave, for each call in order.
        judged: the problems of each call of the reward, or of each call of the engine where no reward was called;
            empty for experience that waited in a checkpoint.
    """

    experience: Experience
    problems: int
    asked: int
    samples: tuple[Ref[list[Sample]], ...]
    scored: tuple[Batch, ...]
    judged: tuple[Sequence[Any], ...] = ()


@attrs.frozen(eq=False)
class Waiting:
    """Experience that a later step learns from, and that may still be drawn.

    Attributes:
        problems: how many training problems it takes.
        asked: how many responses the engine was asked for until ``sample`` first waited for some.
        drawn: the experience, for ``Workers.get``.
    """

    problems: int
    asked: int
    drawn: Ref[Drawn]


def ask(sample: Callable[[Workers], Experience], problems: Sequence[Problem], w: Workers, *, ahead: bool) -> Waiting:
    """Returns the experience that ``sample`` draws on these workers, with a record of it.

    Args:
        sample: the algorithm's ``sample``, with its state and its problems bound.
        problems: these problems; the ones that ``sample`` asks for with ``w.more`` are added.
        ahead: return as soon as ``sample`` waits for samples, instead of when it has ended.

    Raises:
        ArgumentError: where the result is fetched, if ``sample`` runs ahead and takes more problems after it has seen
            samples: later steps have theirs by then.
    """
    recorder = _Recorder(w, problems, ahead=ahead)
    drawn = w.processes.submit(lambda: recorder.draw(sample)) if ahead else recorder.draw(sample)
    return Waiting(*(recorder.first or (len(recorder.problems), recorder.asked)), drawn)


class _Recorder(Through):
    """The engine as ``sample`` sees it. It remembers what it gave; so do the reward and the source of problems."""

    def __init__(self, w: Workers, problems: Sequence[Problem], *, ahead: bool) -> None:
        super().__init__(w.rollout)
        self._w, self._ahead = w, ahead
        self.problems = [*problems]
        self.asked = 0
        # The problems and responses that were asked for until the first wait for samples; None unless ``ahead``.
        self.first: tuple[int, int] | None = None
        self._samples: list[Any] = []
        self._scored: list[Batch] = []
        self._judged: list[Sequence[Any]] = []

    def draw(self, sample: Callable[[Workers], Experience]) -> Drawn:
        w = attrs.evolve(self._w, rollout=self, reward=self._reward, more=self._more, get=self._get)
        experience = sample(w)
        judged = self._judged if self._scored else [self.problems] * len(self._samples)
        samples, scored = tuple(self._samples), tuple(self._scored)
        return Drawn(experience, len(self.problems), self.asked, samples, scored, tuple(judged))

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        self.asked += sum(request.sampling.n for request in requests)
        self._samples.append(super().generate(requests, version=version))
        return self._samples[-1]

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        self.asked += sum(request.sampling.n for request in requests)
        samples: list[Sample] = []
        self._samples.append(samples)
        for sample in super().stream(requests, version=version):
            samples.append(sample)
            yield sample

    def _get(self, value: Any) -> Any:
        if self._ahead and self.asked and self.first is None:
            self.first = len(self.problems), self.asked
        return self._w.get(value)

    def _reward(self, batch: Batch, problems: Sequence[Any]) -> Batch:
        self._scored.append(self._w.reward(batch, problems))
        self._judged.append(problems)
        return self._scored[-1]

    def _more(self, count: int) -> Sequence[Problem]:
        if self.first is not None:
            raise ArgumentError(
                "this algorithm takes more problems when it has seen samples (workers.more), and with driver.max_lag "
                "the next steps have theirs by then; set driver.max_lag=0"
            )
        problems = self._w.more(count)
        self.problems += problems
        return problems


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors of a batch by name, each with memory of its own.

    Example:
        >>> list(tensors_of(Batch.from_rows([[1]], per_row={"score": [0.5]})))
        ['tokens', 'positions', 'cu_seqlens', 'row.score']
    """
    tensors = {name: batch[name] for name in CORE}
    tensors |= {f"{TOKEN}{name}": t for name, t in batch.per_token.items()}
    tensors |= {f"{ROW}{name}": t for name, t in batch.per_row.items()}
    for name, field in batch.ragged.items():
        tensors |= {f"{VALUES}{name}": field.values, f"{OFFSETS}{name}": field.offsets}
    # A file takes no tensors that share memory, as fields of one batch may.
    return {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}


def batch_of(tensors: Mapping[str, Tensor]) -> Batch:
    """Returns the batch whose tensors ``tensors_of`` gave.

    Raises:
        KeyError: one is missing.

    Example:
        >>> batch_of(tensors_of(Batch.from_rows([[1, 2]], per_row={"score": [0.5]})))["score"].tolist()
        [0.5]
    """
    # Cloned: memory-mapped tensors may be misaligned, and kernels round differently on them.
    tensors = {name: t.clone() for name, t in tensors.items()}

    def fields(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}

    offsets = fields(OFFSETS)
    ragged = {name: Ragged(values, offsets[name]) for name, values in fields(VALUES).items()}
    tokens, positions, cu_seqlens = (tensors[name] for name in CORE)
    return Batch(tokens, positions, cu_seqlens, fields(TOKEN), fields(ROW), ragged)


def numbered(kind: str, number: int) -> str:
    """Returns the prefix of the tensors of one of several batches in a file; the first needs no number.

    Example:
        >>> numbered("", 0), numbered("", 1), numbered("scored", 1)
        ('', 'call_1/', 'scored/call_1/')
    """
    return "".join(f"{part}/" for part in (kind, f"call_{number}" * (number > 0)) if part)


def by_call(kind: str, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Returns the tensors of several batches, with the prefixes of ``numbered``."""
    tensors = enumerate(map(tensors_of, batches))
    return {numbered(kind, call) + name: t for call, named in tensors for name, t in named.items()}


def batches_in(tensors: Mapping[str, Tensor], kind: str) -> list[Batch]:
    """Returns the batches whose tensors ``by_call`` gave, in order.

    Raises:
        KeyError: a tensor of one is missing.

    Example:
        >>> tensors = by_call("", [Batch.from_rows([[1]]), Batch.from_rows([[2], [3]])])
        >>> [len(batch) for batch in batches_in(tensors, "")]
        [1, 2]
    """
    batches: list[Batch] = []
    while True:
        prefix = numbered(kind, len(batches))
        names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
        of_call = {name: tensors[prefix + name] for name in names if not name.startswith("call_")}
        if not of_call:
            return batches
        batches.append(batch_of(of_call))


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
        tensors = {name: t for kind, batches in parts.items() for name, t in by_call(kind, batches).items()}
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
