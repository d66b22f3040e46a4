"""What the import contracts in pyproject.toml cannot say: light parts stay light, and imports are declared."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import verl_fn

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"ray", "vllm", "megatron", "peft"}
# Distributions whose modules have other names, and modules that come with torch.
MODULE_NAMES = {"pillow": "PIL", "pyyaml": "yaml", "megatron_bridge": "megatron", "megatron_core": "megatron"}
WITH_TORCH = {"triton"}
IMPORTED_EXTRAS = ("datasets", "lora", "math", "reasoning-gym", "verifiers", "vllm", "megatron", "smollm2")
# Loggers that a user installs, and the peer that a benchmark runs against: imported only where asked for.
BROUGHT_BY_USERS = {"verl_fn/runs/logs.py": {"wandb"}, "benchmarks/peer_verl.py": {"verl"}}


def sources() -> list[Path]:
    """Files of the package, each once: the folders that ``verl_fn`` links to are listed by themselves."""
    folders = ["state", "steps", "backends", "benchmarks"]
    own = [file for file in (ROOT / "verl_fn").rglob("*.py") if file.relative_to(ROOT).parts[1] not in folders]
    return sorted(own + [file for folder in folders for file in (ROOT / folder).rglob("*.py")])


def imported_modules(source: str) -> set[str]:
    """Returns the absolute names of the modules that a source imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


@functools.cache
def third_party(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(source)} - sys.stdlib_module_names - {"verl_fn"}


def declared_modules() -> set[str]:
    """Returns the top-level modules of the dependencies and of the extras that the library imports."""
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *(one for name in IMPORTED_EXTRAS for one in extras[name])]
    names = {re.split(r"[<>=;\[ ]", requirement)[0].lower().replace("-", "_") for requirement in requirements}
    return {MODULE_NAMES.get(name, name) for name in names} | WITH_TORCH


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_third_party_imports_are_declared(file):
    allowed = declared_modules() | BROUGHT_BY_USERS.get(str(file.relative_to(ROOT)), set())
    undeclared = third_party(file.read_text()) - allowed
    assert not undeclared, f"{file} imports {sorted(undeclared)}, which pyproject.toml does not declare"


def test_dependencies_are_imported():
    imported = set().union(*(third_party(file.read_text()) for file in sources()))
    needed = {re.split(r"[<>=;\[ ]", requirement)[0].replace("-", "_") for requirement in PROJECT["dependencies"]}
    unused = {MODULE_NAMES.get(name, name) for name in needed} - imported
    assert not unused, f"pyproject.toml declares {sorted(unused)}, which nothing imports"


def test_an_undeclared_import_is_seen_inside_a_function():
    assert third_party("def f():\n    import msgpack.ext\n    from os import path\n") == {"msgpack"}


@pytest.mark.parametrize("file", sorted((ROOT / "steps").rglob("*.py")), ids=lambda file: file.stem)
def test_steps_know_nothing_of_processes(file):
    assert "torch.distributed" not in file.read_text()


def script_of(code: str, names: set[str]) -> str:
    """Returns a script that runs ``code`` and prints those of ``names`` that are imported by then."""
    return f"import sys; {code}; print(*(name for name in {sorted(names)!r} if name in sys.modules))"


def loaded(code: str, names: set[str]) -> set[str]:
    """Returns those of ``names`` that a fresh interpreter holds after it has run ``code``."""
    command = [sys.executable, "-c", script_of(code, names)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


# Each line is a script that a fork runs; what it prints ends with a line of its own.
FORKS = """
import os, sys, torch
for line in sys.stdin:
    if not (pid := os.fork()):
        exec(eval(line), {})
        sys.stdout.flush()
        os._exit(0)
    print("failed" * (os.waitpid(pid, 0)[1] != 0), flush=True)
"""


@pytest.fixture(scope="module")
def with_torch() -> Iterator[Callable[[str, set[str]], set[str]]]:
    """Does the same as ``loaded`` in a fork of an interpreter that has imported torch alone, which takes seconds."""
    command, pipe = [sys.executable, "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:

        def run(code: str, names: set[str]) -> set[str]:
            assert process.stdin is not None and process.stdout is not None
            print(repr(script_of(code, names)), file=process.stdin, flush=True)
            printed = process.stdout.readline()
            assert printed.endswith("\n") and process.stdout.readline() == "\n", printed
            return set(printed.split())

        yield run


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import verl_fn.state, verl_fn.steps", {"transformers", "torch.distributed.fsdp", *HEAVY}),
        (
            "import verl_fn as vf; vf.ppo_clip, vf.Local, vf.check_loss; import verl_fn.testing, verl_fn.runs.loop",
            {"transformers", "torch._dynamo", *HEAVY},
        ),
        (
            "import verl_fn.build, verl_fn.driver.host",
            {"transformers", "torch._dynamo", "pyarrow", *(HEAVY - {"ray"})},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_importing_stays_light(with_torch, code, banned):
    assert not with_torch(code, banned)


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import verl_fn, verl_fn.config.load", {"torch", "transformers", "numpy", *HEAVY}),
        ("import verl_fn.cli.commands", {"torch", "transformers", *HEAVY}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_importing_needs_no_torch(code, banned):
    assert not loaded(code, banned)


def test_the_front_door_offers_each_name_lazily():
    """Names for type checkers, names that are offered and names that are found are the same."""
    tree = ast.parse(Path(verl_fn.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    for_checkers = {alias.name: node.module for node in block.body for alias in node.names}
    assert for_checkers == verl_fn._HOME_OF
    assert set(verl_fn.__all__) - {"user_files"} == for_checkers.keys() and verl_fn.__all__ == sorted(verl_fn.__all__)
    for name, home in for_checkers.items():
        assert getattr(verl_fn, name) is getattr(importlib.import_module(f"verl_fn.{home}"), name)
    assert set(verl_fn.__all__) <= set(dir(verl_fn))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = verl_fn.no_such_name


def test_packages_are_reached_from_the_front_door(with_torch):
    packages = ["state", "steps", "backends", "config", "data", "rewards", "environments", "algorithms", "testing"]
    code = "import verl_fn as vf; assert all(getattr(vf, name).__name__ == f'verl_fn.{name}' for name in %r)"
    assert with_torch(code % packages, {"verl_fn.steps"}) == {"verl_fn.steps"}


def test_a_heavy_import_is_seen(with_torch):
    assert loaded("import numpy", {"numpy", "torch"}) == {"numpy"}
    assert with_torch("import torch._dynamo", {"torch", "torch._dynamo", "peft"}) == {"torch", "torch._dynamo"}
