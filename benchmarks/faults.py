"""Faults at random moments of runs over Ray; every run must end with the bytes of a run without faults.

A fault hits an engine that draws (``kill``, ``stop``, ``stuck``, ``memory``), the buckets of a publication (``drop``,
``repeat``, ``delay``), a whole publication (``twice``), or the run itself (``run``: ``kill -9``, then the same
command). Equal bytes mean: the rows that were asked for, each once, every token from the weights of its version. Each
run must end by itself in a limited time, so a hang fails it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from verl_fn import build
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.protocol import BUCKET_BYTES, Chunk
from verl_fn.config import Plan, load, make_plan
from verl_fn.data.tasks import TASKS
from verl_fn.driver.remote import RemoteRollout
from verl_fn.runs import loop as training
from verl_fn.runs.logs import read_metrics

from . import measure
from .crash import end_after, numbers

# Of a run; a fault hits one of these versions.
STEPS = 12
ENGINE = ("kill", "stop", "stuck", "memory")
BUCKET = ("drop", "repeat", "delay")
KINDS = (*ENGINE, *BUCKET, "twice", "run")
# The most seconds of a run without faults, and of each fault beside it.
RUN_SECONDS, FAULT_SECONDS = 900, 300
# A small bucket, of which a tiny model has many.
BUCKET_LIMIT = 4096


@attrs.frozen
class Fault:
    """A fault of one run.

    Attributes:
        kind: what happens.
        at: the version of the weights that are drawn from or published; for ``run`` the step that was logged last.
        after: the decoding step of the call, or the bucket of the publication; for ``run`` hundredths of a second.
    """

    kind: str
    at: int
    after: int

    @property
    def name(self) -> str:
        """The name of the file that stands for a fault that has not happened yet."""
        return f"{self.kind}-{self.at}-{self.after}"


def draw(count: int, seed: int) -> list[Fault]:
    """Draws faults: each kind about as often as the others.

    Example:
        >>> faults = draw(18, seed=0)
        >>> faults == draw(18, seed=0), sorted({fault.kind for fault in faults}) == sorted(KINDS)
        (True, True)
    """
    rng = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    rng.shuffle(kinds)
    limit = {"run": 300} | dict.fromkeys(ENGINE, 6)
    return [Fault(kind, rng.randrange(1, STEPS), rng.randrange(limit.get(kind, 4))) for kind in kinds]


def happens(folder: Path, kinds: Sequence[str], at: int | None, after: int) -> str | None:
    """Returns the kind of a fault whose moment has come; no process takes it a second time."""
    for kind in kinds:
        with_file = folder / f"{kind}-{at}-{after}"
        if with_file.exists():
            try:
                with_file.rename(folder / f"done-{with_file.name}")
            except FileNotFoundError:
                continue
            return kind
    return None


def faulty_engine(folder: Path, inner: Callable[..., Any], *args: Any) -> Any:
    """Makes a rollout engine that fails while it draws."""
    engine = inner(*args)
    go_on, begun = engine._continue, Counter[int]()

    def step(call: int) -> int:
        version: int = go_on(call)
        kind = happens(folder, ENGINE, engine.version, begun[call])
        begun[call] += 1
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stuck":
            time.sleep(3600)
        if kind == "memory":
            raise torch.OutOfMemoryError("out of memory, on purpose")
        return version

    engine._continue = step
    return engine


@attrs.frozen(eq=False)
class FaultySource:
    """Weights some of whose buckets are lost, repeated or late, a ``WeightSource``.

    Attributes:
        inner: the weights.
        folder: the faults.
        number: of the publication.
    """

    inner: Any
    folder: Path
    number: int

    @property
    def specs(self) -> Any:
        """The specifications of the weights."""
        return self.inner.specs

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields the buckets; see ``WeightSource``."""
        for i, bucket in enumerate(self.inner.buckets(min(max_bytes, BUCKET_LIMIT), checked=checked)):
            kind = happens(self.folder, BUCKET, self.number, i)
            if kind == "delay":
                time.sleep(2.0)
            yield from [bucket] * {"drop": 0, "repeat": 2}.get(kind or "", 1)


def faulty_trainer(folder: Path, inner: Callable[..., Any], *args: Any) -> Any:
    """Makes a training backend whose weights are published with faults."""
    backend = inner(*args)
    weights = backend.weights
    published: list[Any] = []

    def faulty(params: Any) -> FaultySource:
        published.append(None)
        return FaultySource(weights(params), folder, len(published) - 1)

    backend.weights = faulty
    return backend


@contextlib.contextmanager
def injected(folder: Path) -> Iterator[None]:
    """Makes engines, trainers and publications of this process's runs fail as files in a folder say.

    Args:
        folder: has a file named ``Fault.name`` for each fault; it is renamed when the fault happens.
    """
    engine, trainer, publish = build.conversing, build.trainer, RemoteRollout.publish

    def twice(self: RemoteRollout, version: int, weights: Any) -> Any:
        for i in range(4):
            if happens(folder, ["twice"], version, i):
                publish(self, version, weights)
        return publish(self, version, weights)

    build.conversing = functools.partial(faulty_engine, folder, engine)
    build.trainer = functools.partial(faulty_trainer, folder, trainer)
    RemoteRollout.publish = twice  # type: ignore[method-assign]
    try:
        yield
    finally:
        build.conversing, build.trainer = engine, trainer
        RemoteRollout.publish = publish  # type: ignore[method-assign]


def disturbed(plan: Plan, faults: Sequence[Fault], say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Trains with these faults, none of them ``run``, and returns the kinds of the faults that happened."""
    folder = Path(plan.trainer.dir).with_suffix(".faults").absolute()
    folder.mkdir(exist_ok=True)
    for fault in faults:
        (folder / fault.name).touch()
    with injected(folder):
        training.train(plan, say)
    return [file.name.split("-")[1] for file in folder.glob("done-*")]


def plan_of(folder: Path, model: Path, max_lag: int, *more: str) -> Plan:
    """Returns the plan of a GRPO run with two engines apart from the trainer; it saves after each step."""
    settings = [
        f"trainer.dir={folder}", f"model.path={model}", f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1", "trainer.test_freq=2", "trainer.journal=samples", "algorithm.name=grpo", "rollout.n=2",
        "data.train_batch_size=8", "algorithm.ppo_mini_batch_size=4", "data.val_size=8", "actor.optim.lr=1e-3",
        "driver.kind=ray", "driver.num_threads=1", "driver.device=cpu", f"driver.max_lag={max_lag}",
        "rollout.placement=apart", "rollout.engines=2", "rollout.max_restarts=20",
    ]  # fmt: skip
    return make_plan(load(None, [*settings, *more]))


def open_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the steps whose ledger of rows does not close."""
    names = ("rows_learned", "rows_dropped/engine", "rows_dropped/algorithm")
    rows = [row for row in read_metrics(folder) if "rollout/rows_asked" in row]
    return [row for row in rows if row["rollout/rows_asked"] != sum(row[f"rollout/{name}"] for name in names)]


def run(plan: Plan, faults: Sequence[Fault]) -> tuple[bool, list[str]]:
    """Trains in a process of its own; it is killed at the moment of a fault ``run``, and then begins again.

    Returns:
        Whether the run ended by itself and well, and the kinds of faults that happened.
    """
    others = [fault for fault in faults if fault.kind != "run"]
    kills = sorted((fault for fault in faults if fault.kind == "run"), key=lambda fault: fault.at)
    deadline = time.monotonic() + RUN_SECONDS + FAULT_SECONDS * (len(faults) + len(kills))
    killed = []
    for kill in [*kills, None]:
        child = os.fork()
        if child == 0:
            end_after(lambda: _train(plan, others), Path(plan.trainer.dir).with_suffix(".log"))
        while kill is not None and _runs(child) and len(read_metrics(Path(plan.trainer.dir))) <= kill.at:
            time.sleep(0.02)
        if kill is not None:
            time.sleep(kill.after / 100)
            if _runs(child):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                killed.append("run")
                continue
        while _runs(child):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return False, killed
            time.sleep(0.1)
    done = Path(plan.trainer.dir).with_suffix(".faults").glob("done-*")
    ended = (Path(plan.trainer.dir) / "model").exists()
    return ended, [*killed, *(file.name.split("-")[1] for file in done)]


def _train(plan: Plan, faults: Sequence[Fault]) -> None:
    """Trains with the faults that have not happened before the run was killed."""
    folder = Path(plan.trainer.dir).with_suffix(".faults")
    disturbed(plan, [fault for fault in faults if not (folder / f"done-{fault.name}").exists()], print)


def _runs(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def trials(folder: Path, count: int, seed: int, per_run: int, timeout: float) -> dict[str, Any]:
    """Trains again and again with some faults each time, and compares every run with one without faults."""
    # Before anything computes: a process with threads must not be forked.
    torch.set_num_threads(1)
    model = new_model(folder / "model", chars=TASKS["reverse"].alphabet, hidden_size=32)
    wanted = {}
    for lag in (0, 1):
        ended, _ = run(plan := plan_of(folder / f"whole_{lag}", model, lag), [])
        if not ended:
            raise RuntimeError(Path(plan.trainer.dir).with_suffix(".log").read_text())
        wanted[lag] = numbers(folder / f"whole_{lag}")
    result: dict[str, Any] = {"faults": 0, "kinds": Counter(), "did_not_happen": 0, "runs": 0, "failures": []}
    drawn = draw(count, seed)
    while drawn:
        faults, drawn = drawn[:per_run], drawn[per_run:]
        lag = result["runs"] % 2
        plan = plan_of(folder / "run", model, lag, f"ray.timeout={timeout}")
        began = time.perf_counter()
        ended, happened = run(plan, faults)
        log = folder / "run.log"
        why = ""
        if not ended:
            why = "did not end: " + (log.read_text() if log.exists() else "no output")[-3000:]
        elif different := [k for k, v in numbers(folder / "run").items() if wanted[lag].get(k) != v]:
            why = f"{different[:3]} differ"
        elif rows := open_rows(folder / "run"):
            why = f"the ledger of step {rows[0]['step']} does not close"
        if why:
            result["failures"].append({"faults": [fault.name for fault in faults], "max_lag": lag, "why": why})
        result["runs"] += 1
        result["faults"] += len(happened)
        result["did_not_happen"] += len(faults) - len(happened)
        result["kinds"].update(happened)
        print(f"{[f.name for f in faults]}: {why or 'same'}, {time.perf_counter() - began:.0f} s", flush=True)
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.rmtree(folder / "run.faults", ignore_errors=True)
        log.unlink(missing_ok=True)
        if not drawn and result["faults"] < count and not result["failures"]:
            seed += 1
            drawn = draw(count - result["faults"], seed)
    return result


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench faults``: exit status 1 where a run failed or gave other bytes."""
    parser = measure.parser("faults", __doc__)
    parser.add_argument("--count", type=measure.count, default=50, help="faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-run", type=measure.count, default=25, help="faults of one run")
    parser.add_argument("--timeout", type=float, default=60.0, help="ray.timeout, after which an engine hangs")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = trials(Path(folder), args.count, args.seed, args.per_run, args.timeout)
    measure.write(args.json, "faults", "cpu", result)
    print(f"{result['faults']} faults in {result['runs']} runs: {dict(sorted(result['kinds'].items()))}")
    for failure in result["failures"]:
        print(f"{failure['faults']}, max_lag={failure['max_lag']}: {failure['why']}")
    print(f"{len(result['failures'])} failures: {'held' if not result['failures'] else 'MISSED'}")
    return 1 if result["failures"] else 0
