"""``verl-fn levels``: Bridge's own tests, then each level in processes of its own, and a report of all."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.atomic import check_empty
from verl_fn.backends.hf.config import ModelError
from verl_fn.errors import UsageError, say

from . import provenance, report
from .levels import LEVELS, ranks_of
from .report import CHECKS, LOG
from .subject import Request, model_folder
from .verdict import STATUS, Deliverable, Outcome, Verdict, of_level, preflight, trap_in
from .worker import NODES, ON_CPU, REQUEST, read_outcome

BRIDGE_TESTS = (
    "tests/unit_tests/models/test_model_provider_mixin.py",
    "tests/unit_tests/models/test_param_mapping.py",
    "tests/unit_tests/training/test_integration.py",
)
NOT_REACHED = "the command ended before it"
IMPORT, CAPTURE = "Local Bridge import in verl_fn", "Log capture"


def run(args: argparse.Namespace) -> int:
    """Runs the levels that are asked for, writes the report, and returns the exit status.

    Raises:
        UsageError: an argument cannot be used.
    """
    out = Path(args.out).resolve()
    check_empty(out)
    if args.steps < 2 or args.gpus < 1:
        raise UsageError("--steps must be at least 2, and --gpus at least 1")
    provenance.search_path(args.bridge)
    out.mkdir(parents=True, exist_ok=True)
    levels = tuple(sorted(set(args.levels or [0])))
    request, blocked = _request(args, levels, out)
    request.write(out / REQUEST)
    env = provenance.environment(args.bridge, args.device)
    blocked += preflight(out, args.device, max(ranks_of(request, level) for level in levels), env)
    probed: dict[str, Any] = {}
    if not blocked:
        probed = provenance.probe(env)
        blocked += filter(None, [provenance.why_not(probed, args.bridge, "a process of this machine")])
        if request.ray and not blocked:
            blocked += _of_workers(request, env)
    deliverables = [_bridge_tests(args, out, env, blocked), _imported(args.bridge, probed, blocked)]
    command, sources = shlex.join(["verl-fn", *args.argv]), _repositories(args.bridge, probed)

    def reported(last: int) -> report.LevelsReport:
        to_come = [_level(level, request, out, env, [NOT_REACHED]) for level in LEVELS if level > last]
        whole = [*deliverables, *to_come, _capture(out, deliverables)]
        made = report.LevelsReport.of(request, whole, command, sources, probed)
        made.write(out)
        return made

    for level in LEVELS:
        deliverables.append(_level(level, request, out, env, blocked))
        if level in levels:
            # Already now, so that a command that a time limit ends leaves what it found.
            reported(level)
            say(f"{deliverables[-1].name}: {deliverables[-1].verdict} - {deliverables[-1].reason}")
            _drop_weights(out, deliverables[-1])
    written = reported(max(LEVELS))
    say()
    say(written.text())
    return STATUS[written.result]


def _request(args: argparse.Namespace, levels: tuple[int, ...], out: Path) -> tuple[Request, list[str]]:
    """Returns the request, with its model folder, and why no model can be made."""
    blocked: list[str] = []
    folder, dummy = "", False
    engine = args.engine or ("vllm" if args.device == "cuda" else "sampler")
    try:
        made, dummy = model_folder(args.model, out, tiny=args.tiny, device=args.device, engine=engine)
        folder = str(made)
    except ModelError as error:
        blocked.append(f"there is no model to test: {error}")
    # vLLM, and several ranks, run in processes that Ray starts.
    ray = args.ray or ("local" if engine == "vllm" or (args.device == "cuda" and args.gpus > 1) else "")
    data, rewards, bridge = (
        str(Path(name).resolve()) if name else "" for name in (args.data, args.reward_model, args.bridge)
    )
    return Request(
        levels=levels, model=args.model, folder=folder, dummy=dummy, device=args.device, out=str(out),
        gpus=args.gpus, features=tuple(args.features), bridge=bridge, engine=engine, ray=ray, data=data,
        reward_model=rewards, steps=args.steps, margin=args.margin, seed=args.seed,
    ), blocked  # fmt: skip


def _of_workers(request: Request, env: Mapping[str, str]) -> list[str]:
    """Returns why workers of the Ray cluster cannot be used."""
    command = [sys.executable, "-m", "verl_fn.levels.worker", str(Path(request.out) / REQUEST), NODES]
    done = subprocess.run(command, env=dict(env), cwd=provenance.ROOT, capture_output=True, text=True, check=False)
    (Path(request.out) / "ray.log").write_text(done.stdout + done.stderr)
    reasons = [line.removeprefix("BLOCKED ") for line in done.stdout.splitlines() if line.startswith("BLOCKED ")]
    if done.returncode and not reasons:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        reasons = [trap_in(done.stderr) or f"Ray: {last}"]
    return reasons


def _bridge_tests(args: argparse.Namespace, out: Path, env: Mapping[str, str], blocked: Sequence[str]) -> Deliverable:
    """Runs the focused tests of the checkout, and the ones that the user names."""
    if blocked:
        return Deliverable(CHECKS, Verdict.SKIPPED, "nothing was run, since the environment is blocked")
    if not args.bridge:
        return Deliverable(CHECKS, Verdict.SKIPPED, "no checkout was named with --bridge")
    if args.skip_bridge_tests:
        return Deliverable(CHECKS, Verdict.SKIPPED, args.skip_bridge_tests)
    checkout = Path(args.bridge).resolve()
    files = [name for name in BRIDGE_TESTS if (checkout / name).exists()] + args.bridge_tests
    absent = [name for name in args.bridge_tests if not (checkout / name.partition("::")[0]).exists()]
    if absent or not files:
        what = f"{absent[0]} of --bridge-tests" if absent else BRIDGE_TESTS[0]
        return Deliverable(CHECKS, Verdict.BLOCKED, f"{checkout} has no {what}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    words, log = shlex.join(["python", *command[1:]]), out / "bridge_tests.log"
    say(f"{CHECKS}: {words}")
    status = run_logged(command, log, {**env, "PYTHONSAFEPATH": ""}, checkout)
    content = log.read_text(errors="replace")
    last = (content.strip().splitlines() or [""])[-1].strip("= ")
    if status == 0:
        return Deliverable(CHECKS, Verdict.PASS, f"{words}: {last}")
    missing = re.findall(r"^E\s+ModuleNotFoundError: (No module named .*)$", content, re.MULTILINE)
    if missing and not re.search(r"\d+ failed", last):
        return Deliverable(CHECKS, Verdict.BLOCKED, f"{trap_in(missing[0]) or words} ({missing[0]}); see {log}")
    return Deliverable(CHECKS, Verdict.FAIL, f"{words}: {last}; see {log}")


def run_logged(command: Sequence[str], log: Path, env: Mapping[str, str], folder: Path) -> int:
    """Runs a command to its end with its output in a file; an interruption ends it too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        done = subprocess.run(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    return done.returncode


def _imported(bridge: str, probed: Mapping[str, Any], blocked: Sequence[str]) -> Deliverable:
    if not probed or "error" in probed:
        return Deliverable(IMPORT, Verdict.BLOCKED, blocked[0] if blocked else "nothing was imported")
    file = probed["files"]["megatron.bridge"]
    if not bridge:
        return Deliverable(IMPORT, Verdict.SKIPPED, f"no --bridge; the installed one was tested: {file}")
    if reason := provenance.misplaced(probed["files"], bridge):
        return Deliverable(IMPORT, Verdict.BLOCKED, reason)
    return Deliverable(IMPORT, Verdict.PASS, file)


def _level(level: int, request: Request, out: Path, env: Mapping[str, str], blocked: Sequence[str]) -> Deliverable:
    """Runs the processes of a level, one after the other, and returns its verdict."""
    about = LEVELS[level]
    name = f"Level {level}: {about.title}"
    if level not in request.levels:
        return Deliverable(name, Verdict.NOT_REQUESTED, about.proves)
    if blocked:
        return Deliverable(name, Verdict.BLOCKED, blocked[0])
    outcomes: dict[str, Outcome] = {}
    for part in about.parts(request):
        say(f"{name}: {part}, log {out / part / LOG}")
        command = [sys.executable, "-m", "verl_fn.levels.worker", str(out / REQUEST), part]
        on = provenance.environment(request.bridge, "cpu") if part.endswith(ON_CPU) else env
        status = run_logged(command, out / part / LOG, on, provenance.ROOT)
        outcome = read_outcome(out / part, status)
        if not outcome.blocked and (reason := _elsewhere(outcome.imports, request.bridge)):
            outcome = attrs.evolve(outcome, blocked=reason, checks=())
        outcomes[part] = outcome
    return of_level(name, about.required(request), outcomes)


def _drop_weights(out: Path, level: Deliverable) -> None:
    """Removes the weights that a level which passed has written, many times the size of the model."""
    if level.verdict == Verdict.PASS:
        for part in level.outcomes:
            for file in (out / part).rglob("*.safetensors"):
                file.unlink()


def _elsewhere(imports: Mapping[str, str], bridge: str) -> str:
    """Returns why the imports of a level's processes are no evidence about the checkout."""
    if not bridge or not imports:
        return ""
    ranks = {key.rpartition(" ")[0] for key in imports}
    for rank in sorted(ranks):
        files = {key.rpartition(" ")[2]: file for key, file in imports.items() if key.rpartition(" ")[0] == rank}
        if reason := provenance.misplaced(files, bridge):
            return f"{rank}: {reason}".removeprefix(": ")
    return ""


def _capture(out: Path, deliverables: Sequence[Deliverable]) -> Deliverable:
    """Returns whether every process has left a log."""
    parts = [part for one in deliverables for part in one.outcomes]
    empty = [part for part in parts if not (out / part / LOG).is_file() or not (out / part / LOG).stat().st_size]
    if empty:
        return Deliverable(CAPTURE, Verdict.FAIL, f"{', '.join(empty)} left no log in {out}")
    if not parts:
        return Deliverable(CAPTURE, Verdict.SKIPPED, "no process was started")
    return Deliverable(CAPTURE, Verdict.PASS, ", ".join(str(out / part / LOG) for part in parts))


def _repositories(bridge: str, probed: Mapping[str, Any]) -> dict[str, str]:
    """Returns the states of the source trees under test, by name."""
    folders = {module: Path(file).parent for module, file in probed.get("files", {}).items()}
    found = {}
    if bridge:
        found["Megatron-Bridge"] = provenance.repository(Path(bridge).resolve())
    elif folders:
        found["Megatron-Bridge"] = f"no checkout, {folders['megatron.bridge']}"
    if folders:
        found["Megatron-LM"] = provenance.repository(folders["megatron.core"])
    return found | {"verl_fn": provenance.repository(provenance.ROOT)}
