"""Imports go one way, and the light parts stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"ray", "vllm", "megatron", "peft"}
ALLOWED = {
    "state": {"torch", "attrs", "numpy", "jaxtyping", "verl_fn.errors", "verl_fn.state"},
    "steps": {"torch", "attrs", "jaxtyping", "verl_fn.state", "verl_fn.steps"},
    "backends": {
        "torch", "attrs", "jaxtyping", "numpy", "tokenizers", "transformers", "safetensors", "peft", "triton",
        "verl_fn.errors", "verl_fn.state", "verl_fn.steps", "verl_fn.backends",
    },
}  # fmt: skip
FILES = [(package, file) for package in ALLOWED for file in sorted((ROOT / package).glob("**/*.py"))]


def imported(file, package):
    """Absolute names of what a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"verl_fn.{package}" if node.level else node.module
            yield from (f"{base}.{alias.name}" for alias in node.names) if base == "verl_fn" else (base,)


@pytest.mark.parametrize(("package", "file"), FILES, ids=lambda x: x if isinstance(x, str) else x.stem)
def test_packages_import_only_what_lies_below_them(package, file):
    for name in imported(file, package):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top == "__future__":
            continue
        assert any(name == a or name.startswith(a + ".") for a in ALLOWED[package]), f"{file.name} imports {name}"


@pytest.mark.parametrize("file", sorted((ROOT / "steps").glob("*.py")), ids=lambda f: f.stem)
def test_steps_know_nothing_of_processes(file):
    assert "torch.distributed" not in file.read_text()


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import verl_fn", {"torch", "transformers", *HEAVY}),
        ("import verl_fn.config.loading", {"torch", "transformers", *HEAVY}),
        ("import verl_fn.cli", {"torch", "transformers", *HEAVY}),
        ("import verl_fn.state, verl_fn.steps", {"transformers", "torch.distributed.fsdp", *HEAVY}),
        ("import verl_fn.backends, verl_fn.testing", {"transformers", *HEAVY}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_importing_stays_light(code, banned):
    script = f"import sys; {code}; print([m for m in {sorted(banned)!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"
