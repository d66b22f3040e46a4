"""One process of a level: it runs a part, and writes what it found beside its log.

    python -m verl_fn.levels.worker OUT/request.json level_0

An error before Megatron-Bridge made a model says nothing about the provider, so it blocks the level.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from verl_fn.backends.megatron.importing import MegatronMissing
from verl_fn.benchmarks.first_step_layout import megatron_on_cpu
from verl_fn.data.rows import DataError
from verl_fn.driver.ranks import process_group
from verl_fn.errors import cause_of
from verl_fn.runs.loop import train

from . import levels, parity, provenance, training
from .subject import Request
from .verdict import Outcome, SaysNothing, trap_in

REACHED = "Megatron-Bridge makes the model"
REQUEST, RESULT = "request.json", "result.json"
NODES = "nodes"  # asks for what the nodes of a cluster import, in place of a part
ON_CPU = "_on_cpu"  # the end of the names of parts whose ranks are CPUs, whatever the request says


@attrs.define
class Progress:
    """Prints lines, and remembers how far a part came.

    Attributes:
        part: its name.
        provider: whether Megatron-Bridge was asked for a model.
    """

    part: str
    provider: bool = False

    def say(self, line: str) -> None:
        """Prints a line; once the provider was asked, errors are evidence about it."""
        self.provider |= _asks_provider(line)
        print(line, flush=True)


def _asks_provider(line: str) -> bool:
    """Returns whether a line of a log shows that all processes are there: a run then names its libraries."""
    return REACHED in line or ("megatron-bridge " in line and "megatron-core " in line)


Part = Callable[[Request, Path, Progress], Outcome]


def level_0_model(request: Request, folder: Path, progress: Progress) -> Outcome:
    """The model beside transformers'."""
    with process_group(training.plan_of(request.alone(), folder / "run"), size=1):
        progress.say(f"{progress.part}: {REACHED}")
        return Outcome(tuple(parity.parity(Path(request.folder), request.device)))


def level_0(request: Request, folder: Path, progress: Progress) -> Outcome:
    """PPO with adapters."""
    return Outcome(tuple(training.smoke(request, folder / "run", training.LORA, progress.say)))


def level_1(request: Request, folder: Path, progress: Progress) -> Outcome:
    """Two steps without a stop, and one step of a run that ``level_1_resumed`` continues."""
    training.straight(request, folder, progress.say)
    return Outcome()


def level_1_resumed(request: Request, folder: Path, progress: Progress) -> Outcome:
    """The rest of the run that was stopped, and what other libraries load of it."""
    return Outcome(tuple(training.resumed(request, folder, folder.with_name("level_1"), progress.say)))


def level_3(request: Request, folder: Path, progress: Progress) -> Outcome:
    """PPO of all parameters with Megatron-FSDP, and the first step of its layouts."""
    checks = training.smoke(request, folder / "run", training.FSDP, progress.say)
    sharded = folder / "first_step"
    sharded.mkdir()
    after = layouts(request, sharded, progress)
    return attrs.evolve(after, checks=(*checks, *after.checks))


def feature(request: Request, folder: Path, progress: Progress) -> Outcome:
    """A part of the architecture that the name of this process ends with."""
    name = progress.part.removeprefix("level_4").removeprefix("_")
    if name == "vlm":
        return levels.images(request, folder / "run", progress.say)
    if name != "moe" or not request.experts:
        return levels.blocked("" if name == "moe" else name)
    return levels.experts(request, folder / "run", progress.say)


def level_5_baseline(request: Request, folder: Path, progress: Progress) -> Outcome:
    """The run of ``local``, or of ``fsdp`` on several ranks, that the next process compares its own with."""
    strategy = "local" if request.gpus == 1 else "fsdp"
    training.warm_up(request, folder, progress.say)
    warm = training.after_warm_up(request, folder)
    train(training.plan_of_learning(warm, folder / "run", strategy), progress.say)
    return Outcome()


def level_5(request: Request, folder: Path, progress: Progress) -> Outcome:
    """The same run with Megatron."""
    baseline = folder.with_name("level_5_baseline")
    training.require_signal(baseline / "run", request)
    warm = training.after_warm_up(request, baseline)
    return Outcome(tuple(training.compare(warm, folder / "run", baseline / "run", progress.say)))


def layouts(request: Request, folder: Path, progress: Progress) -> Outcome:
    """The first step of the layouts of level 2, or of level 3, that run on the device of this process."""
    device = "cpu" if progress.part.endswith(ON_CPU) else request.device
    texts = parity.SHARDED if progress.part.startswith("level_3") else parity.stress_layouts(request)
    within = parity.layouts_within(texts, request, device)
    return parity.compare_layouts(request, within, device, folder, progress.say)


PARTS: dict[str, Part] = {
    "level_0_model": level_0_model,
    "level_0": level_0,
    "level_1": level_1,
    "level_1_resumed": level_1_resumed,
    "level_2": layouts,
    f"level_2{ON_CPU}": layouts,
    "level_3": level_3,
    f"level_3{ON_CPU}": layouts,
    **{f"level_4{name}": feature for name in ("", "_moe", "_vlm", "_mtp", "_qat")},
    "level_5_baseline": level_5_baseline,
    "level_5": level_5,
}


def run_part(request: Request, name: str, folder: Path) -> Outcome:
    """Runs a part of ``PARTS`` in this process; it writes into ``folder``."""
    progress = Progress(name)
    found: dict[str, str] = {}
    try:
        if request.device == "cpu" or name.endswith(ON_CPU):
            megatron_on_cpu()
        found = provenance.files()
        for module, file in found.items():
            print(f"{module} {file}", flush=True)
        outcome = PARTS[name](request, folder, progress)
    except Exception as error:
        traceback.print_exc()
        return attrs.evolve(outcome_of(error, progress), imports=found)
    return attrs.evolve(outcome, imports={**found, **outcome.imports})


def outcome_of(error: Exception, progress: Progress) -> Outcome:
    """Returns whether an error fails the level or blocks it."""
    if isinstance(error, SaysNothing):
        return Outcome(blocked=str(error))
    text = "".join(traceback.format_exception(error))
    cause = cause_of(error)
    line = f"{type(cause).__name__}: {' '.join(str(cause).split())[:600]}"
    if trap := trap_in(text):
        return Outcome(blocked=f"{trap} ({line})")
    if isinstance(error, MegatronMissing) or not progress.provider:
        return Outcome(blocked=f"{progress.part} ended before Megatron-Bridge made the model: {line}")
    if isinstance(error, DataError):
        return Outcome(blocked=f"the questions do not suit the model's tokenizer: {error}")
    return Outcome(failed=line)


def probe_nodes(request: Request) -> int:
    """Prints what the workers of a Ray cluster import, and for each that cannot be used a line BLOCKED and why."""
    from verl_fn.driver.ray import on_nodes

    with tempfile.TemporaryDirectory() as folder:
        plan = training.plan_of(request, Path(folder))
    reasons: list[str] = []
    for node, probed in on_nodes(plan.ray, provenance.imported).items():
        print(node, probed.get("files") or probed.get("error"), flush=True)
        reasons += filter(None, [provenance.why_not(probed, request.bridge, f"a worker of {node}")])
    for reason in reasons:
        print(f"BLOCKED {reason}", flush=True)
    return int(bool(reasons))


def main(argv: Sequence[str]) -> int:
    """Runs a part and writes its result, or probes the nodes."""
    file, name = Path(argv[0]), argv[1]
    if name == NODES:
        return probe_nodes(Request.read(file))
    folder = file.parent / name
    folder.mkdir(exist_ok=True)
    outcome = run_part(Request.read(file), name, folder)
    for check in outcome.checks:
        print(f"{'held  ' if check.held else 'MISSED'} {check.name}: {check.found}", flush=True)
    (folder / RESULT).write_text(json.dumps(attrs.asdict(outcome), indent=1))
    return 0


def read_outcome(folder: Path, status: int) -> Outcome:
    """Returns what a process found; a process that wrote nothing was ended from outside, or by a signal."""
    file = folder / RESULT
    if file.is_file():
        return Outcome.of(json.loads(file.read_text()))
    log = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").is_file() else ""
    if trap := trap_in(log):
        return Outcome(blocked=trap)
    lines = log.splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
    reason = f"the process ended with status {status}; its last line: {last[:300]}"
    return Outcome(failed=reason) if any(map(_asks_provider, lines)) else Outcome(blocked=reason)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Threads of a process group may still run, and nothing is left for them to do.
    os._exit(status)
