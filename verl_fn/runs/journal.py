"""The journal of a run: digests of samples and state after each step, and the samples themselves if asked for.

Replay re-executes a step and compares. What is recorded is seen from outside the algorithm: the recorder wraps
the rollout engine and the reward, and passes everything through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from verl_fn.algorithms.workers import Workers
from verl_fn.backends.checkpoint.state_folder import disk_errors
from verl_fn.backends.protocol import (
    Capabilities,
    Handle,
    Ref,
    Request,
    RolloutBackend,
    Sample,
    TrainBackend,
    WeightSource,
    whole_leaves,
)
from verl_fn.config import Plan, flat
from verl_fn.runs.errors import RunError
from verl_fn.runs.folder import Run
from verl_fn.runs.state import RunState
from verl_fn.state import Batch, pack, serial, tree, unpack
from verl_fn.state.batch import CORE


def digests(value: Any) -> dict[str, str]:
    """Returns a short hash of every leaf of a value, by path.

    Example:
        >>> import torch
        >>> digests({"w": torch.zeros(2)}) == digests({"w": torch.zeros(2)})
        True
    """
    return {path: tree.digest(leaf)[:16] for path, leaf in tree.paths(value).items()}


def state_digests(backend: TrainBackend, state: Any) -> dict[str, str]:
    """Returns a short hash of every leaf of a training state, by path, the same for every layout."""
    return {path: tree.digest(leaf)[:16] for path, leaf in whole_leaves(backend, state)}


class Recorder:
    """A rollout engine and a reward that remember what passed through them in the current step.

    Attributes:
        samples: what the engine gave.
        scored: what the reward gave.
        workers: the same workers with this engine and this reward.
    """

    def __init__(self, w: Workers) -> None:
        self._w = w
        self.samples: Any = None
        self.scored: Any = None
        self.workers = attrs.evolve(w, rollout=_Listening(w.rollout, self), reward=self._reward)

    def _reward(self, batch: Any, problems: Sequence[Any]) -> Any:
        self.scored = self._w.reward(batch, problems)
        return self.scored


class _Listening:
    """A rollout backend that keeps the last samples it passed on."""

    def __init__(self, inner: RolloutBackend, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    @property
    def version(self) -> int | None:
        return self._inner.version

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        return self._inner.publish(version, weights)

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        self._recorder.samples = self._inner.generate(requests, version=version)
        return self._recorder.samples

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Ref[Sample]]:
        self._recorder.samples = []
        for sample in self._inner.stream(requests, version=version):
            self._recorder.samples.append(sample)
            yield sample

    def sleep(self, level: int = 2) -> Ref[None]:
        return self._inner.sleep(level)

    def wake(self, tags: Sequence[str] = ()) -> Ref[None]:
        return self._inner.wake(tags)


class Recorded:
    """A rollout engine that gives the recorded samples of one step again, whatever the weights.

    For engines whose draws cannot be repeated.
    """

    capabilities = Capabilities()

    def __init__(self, batch: Batch) -> None:
        self._samples = unpack(batch)
        self.version: int | None = None

    def publish(self, version: int, weights: Handle[WeightSource]) -> None:
        self.version = version

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> list[Sample]:
        """Returns the recorded samples.

        Raises:
            RunError: the prompts are not those that were recorded.
        """
        prompts = {request.id: request.prompt for request in requests}
        for i, sample in enumerate(self._samples):
            if tuple(sample.prompt.tolist()) != prompts.get(sample.request):
                raise RunError(
                    f"the recorded samples are of other prompts, row {i} first: the data or the tokenizer has "
                    "changed, or the samples are damaged; replay without --recorded"
                )
        return self._samples

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """The recorded samples, one by one; see ``generate``."""
        return iter(self.generate(requests, version=version))

    def sleep(self, level: int = 2) -> None:
        self.version = None

    def wake(self, tags: Sequence[str] = ()) -> None:
        pass


def entry(state: RunState, seen: Recorder, w: Workers, plan: Plan) -> dict[str, Any]:
    """Returns the journal's line of the step that led to ``state``."""
    line: dict[str, Any] = {"step": state.step, "samples": {}, "state": {}}
    if seen.scored is not None:
        line["samples"] = w.get(w.call(digests, seen.scored))
    for name in plan.roles:
        line["state"][name] = w.get(w.trainers[name].map(state_digests, w.trainers[name], state.role(name)))
    line["state"]["rest"] = serial.flatten(state.without_roles(plan))[1]
    return line


def keep_samples(run: Run, step: int, seen: Recorder, w: Workers) -> None:
    """Writes the samples of a step, as the engine gave them, into the run's folder.

    Raises:
        RunError: they cannot be written, or have fields that the file has no place for.
    """
    if seen.samples is None:
        return
    batch = pack(w.get(seen.samples))
    if batch.ragged:
        raise RunError(
            f"the samples of step {step} have ragged fields ({', '.join(batch.ragged)}), which the journal cannot "
            f"keep; set trainer.journal=digests"
        )
    tensors = {name: batch[name] for name in CORE}
    tensors |= {f"token.{name}": t for name, t in batch.per_token.items()}
    tensors |= {f"row.{name}": t for name, t in batch.per_row.items()}
    with run.written(f"the samples of step {step}"), disk_errors(run.folder):
        (run.folder / "samples").mkdir(exist_ok=True)
        _file(run.folder, step).unlink(missing_ok=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, _file(run.folder, step))


def read_samples(folder: Path, step: int) -> Batch:
    """Returns the samples of a step that ``keep_samples`` wrote.

    Raises:
        RunError: they were not kept, or are damaged.
    """
    file = _file(folder, step)
    if not file.is_file():
        raise RunError(f"{folder} has no samples of step {step}: they are kept with trainer.journal=samples")
    try:
        # Copies: what a file gave may lie where kernels round otherwise.
        tensors = {name: t.clone() for name, t in load_file(file).items()}
        fields = {
            kind: {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}
            for kind in ("token.", "row.")
        }
        tokens, positions, cu_seqlens = (tensors[name] for name in CORE)
        batch = Batch(tokens, positions, cu_seqlens, fields["token."], fields["row."])
        unpack(batch)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise RunError(f"{file} is damaged: {error}; replay without --recorded") from error
    return batch


def _file(folder: Path, step: int) -> Path:
    return folder / "samples" / f"step_{step}.safetensors"


def first_difference(recorded: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> str | None:
    """Returns the first value of ``samples`` or ``state`` that differs between two journal lines, or None."""
    before, after = (flat(line[kind]) for line in (recorded, now))
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            return f"{kind} {name.replace('..', '.')}: another value than in the journal"
    return None
