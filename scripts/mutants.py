"""Breaks the project on purpose, one mistake at a time, and counts how many the tests notice.

``tests/mutants/*.toml`` hold the mistakes, each with the tests that should fail:

    [[mutant]]
    name = "ppo and grpo keep the KL controller of the step before"
    file = "verl_fn/algorithms/policy_optimization.py"
    old = '''text that occurs exactly once in the file'''
    new = '''text that breaks it'''
    tests = ["tests/algorithms/test_whole_steps.py::test_adaptive_kl"]

First all these tests run on the project as it is and must pass. Then each mutant is applied to a copy, and its tests
run in a process forked from a Python that has imported torch, transformers and pytest and nothing of verl_fn.
"""

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "tests" / "mutants"
REPORT = ROOT / "benchmarks" / "results" / "mutants.json"
PRELOADED = (
    "attrs", "cattrs", "hypothesis", "jaxtyping", "jinja2", "numpy", "pyarrow.parquet", "pytest", "rich.console",
    "safetensors.torch", "tokenizers", "torch", "torch.distributed", "transformers", "xdist",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3", "peft",
)  # fmt: skip
# Folders of the project that are large and that no test reads.
LEFT_OUT = {
    ".git",
    ".venv",
    ".uv",
    ".verifiers",
    ".torchvision",
    ".peers",
    ".hypothesis",
    "runs",
    "data",
    "site",
    "build",
}
# The exit statuses of pytest.
PASSED, FAILED = 0, 1
TIMED_OUT = "timed out"


def load(names=()):
    """Returns the mutants whose name or file has one of ``names`` in it, or all mutants without names."""
    mutants = []
    for file in sorted(FILES.glob("*.toml")):
        for mutant in tomllib.loads(file.read_text())["mutant"]:
            mutant["area"] = file.stem
            if not names or any(n in mutant["name"] or n in (file.stem, file.name, mutant["file"]) for n in names):
                mutants.append(mutant)
    return mutants


def run_tests(copy, tests, seconds):
    """Runs tests in a copy, in a process of their own; returns pytest's exit status and the end of its output."""
    output = copy / "output.txt"
    if not (pid := os.fork()):
        os.setsid()
        os.chdir(copy)
        with open(output, "w") as file, open(os.devnull) as nothing:
            for number, stream in ((0, nothing), (1, file), (2, file)):
                os.dup2(stream.fileno(), number)
        sys.path[:0] = [str(copy / "tests"), str(copy)]
        os.environ["PYTHONPATH"] = str(copy)
        import pytest

        status = pytest.main(["-n0", "-x", "--tb=line", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        sys.stderr.flush()
        own = sys.modules.get("verl_fn")
        os._exit(status if own is None or own.__file__.startswith(str(copy)) else 99)
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else TIMED_OUT, output.read_text(errors="replace")[-4000:]


def start_worker(folders, seconds):
    """Gives a process of the pool its copy of the project."""
    global COPY, SECONDS
    COPY, SECONDS = Path(folders.get()), seconds


def pass_unchanged(tests):
    """Runs tests on the project as it is, to write the bytecode of what they import."""
    return run_tests(COPY, tests, SECONDS * 10)


def try_mutant(mutant):
    """Applies a mutant to the copy of this process; returns what became of it and the seconds that its tests took."""
    file = COPY / mutant["file"]
    text, stat = file.read_text(), file.stat()
    found = text.count(mutant["old"])
    if found != 1:
        return mutant, f"broken: its old text occurs {found} times", 0.0
    start = time.monotonic()
    try:
        file.write_text(text.replace(mutant["old"], mutant["new"]))
        # Bytecode is known by the second and the size of its source.
        os.utime(file, (stat.st_atime, stat.st_mtime + 60))
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        status, output = run_tests(COPY, mutant["tests"], SECONDS)
    finally:
        file.write_text(text)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if status in (FAILED, TIMED_OUT):
        became = "caught"
    elif status == PASSED:
        became = "survived" if " passed" in output else "broken: its tests are skipped here"
    else:
        became = f"broken: pytest ended with {status}\n{output}"
    return mutant, became, time.monotonic() - start


def warm_up():
    """Imports what tests need of other packages. A process with several threads cannot be forked."""
    # As tests/conftest.py sets them, but that is too late here.
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("OMP_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # Arrow's allocator would start one
    for name in PRELOADED:
        importlib.import_module(name)
    own = {name for name in sys.modules if name.split(".")[0] == "verl_fn"}
    assert not own, f"the copies could not have their own {own}"
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a process with several threads cannot be forked"
    gc.collect()
    gc.freeze()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names",
        nargs="*",
        help="which mutants: a part of their name, their file without .toml, or the file they break",
    )
    parser.add_argument("--workers", type=int, default=2, help="copies of the project that are tested side by side")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a mutant counts as caught")
    parser.add_argument("--json", help=f"where the result goes; {REPORT.relative_to(ROOT)} if no names are given")
    options = parser.parse_args()
    mutants = load(options.names)
    if not mutants:
        parser.error(f"no mutant, file of mutants or mutated file is called {options.names}")
    warm_up()
    names = list(dict.fromkeys(test for mutant in mutants for test in mutant["tests"]))
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder, contextlib.ExitStack() as closing:
        context = multiprocessing.get_context("fork")
        folders = context.SimpleQueue()
        for number in range(options.workers):
            copy = Path(folder, str(number))
            shutil.copytree(ROOT, copy, symlinks=True, ignore=lambda at, names: LEFT_OUT if Path(at) == ROOT else ())
            folders.put(str(copy))
        settings = {"initializer": start_worker, "initargs": (folders, options.timeout)}
        pool = closing.enter_context(ProcessPoolExecutor(options.workers, context, **settings))
        # Tests of one file run in one process, so they are collected and their fixtures made once.
        files = {}
        for name in names:
            files.setdefault(name.partition("::")[0], []).append(name)
        shares = [list(files.values())[i :: options.workers] for i in range(options.workers)]
        parts = [[name for names in share for name in names] for share in shares]
        print(f"{len(mutants)} mutants; their {len(names)} tests run on the project as it is", flush=True)
        for status, output in pool.map(pass_unchanged, filter(None, parts)):
            if status != PASSED:
                sys.exit(f"tests of mutants do not pass on the project as it is ({status}):\n{output}")
        results = []
        for trial in as_completed([pool.submit(try_mutant, mutant) for mutant in mutants]):
            mutant, became, seconds = trial.result()
            about = {"area": mutant["area"], "name": mutant["name"]}
            results.append({**about, "became": became, "seconds": round(seconds, 1)})
            print(f"{became.partition(':')[0]:9} {seconds:6.1f} s  {': '.join(about.values())}", flush=True)
    sys.exit(summarize(mutants, results, options))


def summarize(mutants, results, options):
    """Prints what was not caught, writes the report, and returns the exit status."""
    order = {(mutant["area"], mutant["name"]): i for i, mutant in enumerate(mutants)}
    results.sort(key=lambda result: order[result["area"], result["name"]])
    for result in results:
        if result["became"] != "caught":
            print(f"\n{result['area']}: {result['name']}: {result['became']}")
    counts = Counter(result["became"].partition(":")[0] for result in results)
    print(f"\n{counts['caught']} of {len(results)} caught, {counts['survived']} survived, {counts['broken']} broken")
    path = options.json or (None if options.names else REPORT)
    if path:
        sys.path.insert(0, str(ROOT))
        from verl_fn.benchmarks.measure import machine

        head = {"command": "make mutants" if not options.names else " ".join(["scripts/mutants.py", *options.names])}
        report = {**head, "machine": machine("cpu"), "counts": dict(counts), "mutants": results}
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    return int(counts["caught"] < len(results))


if __name__ == "__main__":
    main()
