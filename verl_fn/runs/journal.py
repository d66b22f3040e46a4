"""The journal of a run: digests of samples and state after each step, and the samples themselves if asked for.

Replay re-executes a step and compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from verl_fn import atomic
from verl_fn.algorithms.workers import Workers
from verl_fn.backends.checkpoint import disk_errors
from verl_fn.backends.protocol import Capabilities, Handle, Request, Sample, TrainBackend, WeightSource, whole_leaves
from verl_fn.config import Plan, flat
from verl_fn.state import Batch, pack, tree, unpack

from . import RunError
from .evaluate import answers_of
from .folder import Run
from .history import WRITER
from .recorder import Drawn, batches_in, by_call
from .state import RunState


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


class Recorded:
    """A rollout engine that gives the recorded samples of one step again, whatever the weights.

    For engines whose draws cannot be repeated.

    Args:
        calls: the samples that the engine gave for each call of the step, in order.
    """

    def __init__(self, calls: Sequence[Batch]) -> None:
        self.capabilities = Capabilities(routed_experts=any("routed_experts" in batch for batch in calls))
        self._calls = iter([unpack(batch) for batch in calls])
        self._number = len(calls)
        self.version: int | None = None

    def publish(self, version: int, weights: Handle[WeightSource]) -> None:
        self.version = version

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> list[Sample]:
        """Returns the recorded samples of the next call.

        Raises:
            RunError: other prompts were recorded, or no call is left.
        """
        prompts = {request.id: request.prompt for request in requests}
        samples = next(self._calls, None)
        if samples is None:
            raise RunError(
                f"the step asks for samples more often than when it was recorded ({self._number} times): the "
                "algorithm has changed, or the samples are damaged; replay without --recorded"
            )
        for i, sample in enumerate(samples):
            asked = prompts.get(sample.request)
            # Where an environment begins the conversation, the request has no prompt.
            if asked is None or (asked and tuple(sample.prompt.tolist()) != asked):
                raise RunError(
                    f"the recorded samples are of other prompts, row {i} first: the data or the tokenizer has "
                    "changed, or the samples are damaged; replay without --recorded"
                )
        return samples

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """The recorded samples of the next call, one by one; see ``generate``."""
        return iter(self.generate(requests, version=version))

    def sleep(self, level: int = 2) -> None:
        self.version = None

    def wake(self, tags: Sequence[str] = ()) -> None:
        pass


def entry(state: RunState, drawn: Drawn, w: Workers, plan: Plan) -> dict[str, Any]:
    """Returns the journal's line of the step that learned from ``drawn`` and led to ``state``."""
    line: dict[str, Any] = {"step": state.step, "samples": {}, "state": {}}
    for number, scored in enumerate(drawn.scored):
        names = digests(scored)
        line["samples"] |= {f"{name} of call {number + 1}" if number else name: d for name, d in names.items()}
    for name in plan.roles:
        line["state"][name] = w.get(w.trainers[name].map(state_digests, w.trainers[name], state.role(name)))
    line["state"]["rest"] = tree.flatten(state.without_roles(plan))[1]
    return line


def keep_samples(run: Run, step: int, drawn: Drawn, w: Workers) -> None:
    """Writes the samples of a step, as the engine gave them, into the run's folder.

    Raises:
        RunError: they cannot be written, or have fields that samples have no place for.
    """
    calls = [pack(w.get(samples)) for samples in drawn.samples]
    for batch in calls:
        if batch.ragged:
            raise RunError(
                f"the samples of step {step} have ragged fields ({', '.join(batch.ragged)}), which the journal "
                f"cannot keep; set trainer.journal=digests"
            )
    if not calls:
        return
    with run.written(f"the samples of step {step}"), disk_errors(run.folder):
        (run.folder / "samples").mkdir(exist_ok=True)
        atomic.write(_file(run.folder, step), save(by_call("", calls)))


def keep_responses(run: Run, file: Path, step: int, drawn: Drawn, w: Workers) -> None:
    """Writes the responses that a step was trained with as text, one a line, under verl's names.

    They have no score where no reward is called. Responses that waited in a checkpoint are left out, since it does
    not hold their ground truths.
    """
    # A reward may be called for other rows than an engine has given.
    matching = len(drawn.samples) == len(drawn.judged)
    lines = []
    for i, problems in enumerate(drawn.judged):
        samples = w.get(drawn.samples[i]) if matching else ()
        if not drawn.scored:
            # An algorithm of the user may ask for other things than answers to the step's problems.
            ids = {problem.id for problem in problems}
            samples = [sample for sample in samples if sample.request in ids]
            if not samples:
                continue
        batch = drawn.scored[i] if drawn.scored else pack(samples)
        for row in answers_of(batch, problems, w.tokenizer, w.end_tokens, samples):
            verl = {"step": step, "input": row.pop("input")}
            verl |= {name: row.pop(ours) for name, ours in (("output", "response"), ("gts", "answer"))}
            lines.append(json.dumps(verl | row) + "\n")
    if lines:
        with run.written(f"the responses of step {step}", file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            if not (writer := file.parent / WRITER).exists() or writer.read_text("utf-8") != f"{run.folder}\n":
                atomic.write(writer, f"{run.folder}\n")
            atomic.write(file, "".join(lines))


def read_samples(folder: Path, step: int) -> list[Batch]:
    """Returns the samples of a step that ``keep_samples`` wrote, for each call of the engine in order.

    Raises:
        RunError: they were not kept, or are damaged.
    """
    file = _file(folder, step)
    if not file.is_file():
        raise RunError(f"{folder} has no samples of step {step}: they are kept with trainer.journal=samples")
    try:
        calls = batches_in(load_file(file), "")
        for batch in calls:
            unpack(batch)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise RunError(f"{file} is damaged: {error}; replay without --recorded") from error
    return calls


def _file(folder: Path, step: int) -> Path:
    return folder / "samples" / f"step_{step}.safetensors"


def first_difference(recorded: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> str | None:
    """Returns the first value of ``samples`` or ``state`` that differs between two journal lines, or None."""
    before, after = (flat(line[kind]) for line in (recorded, now))
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            return f"{kind} {name.replace('..', '.')}: differs from the journal"
    return None
