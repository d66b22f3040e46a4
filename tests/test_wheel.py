"""The package works from a built wheel and from the bare tree, without this environment's own installation."""

import ensurepip
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("state", "steps", "backends", "benchmarks")
DATA = ("verl_fn/py.typed", "verl_fn/report/report.css")
MODULES = ("verl_fn", "verl_fn.state", "verl_fn.cli", "verl_fn.backends.hf", "verl_fn.report")
SITE_PACKAGES = sysconfig.get_path("purelib")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Returns what a command prints, with no way to the tree but the one that ``variables`` give it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    process = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def locations(modules: tuple[str, ...]) -> str:
    """Returns a script that imports modules and prints the file of each."""
    return f"import importlib\nfor name in {modules!r}: print(importlib.import_module(name).__file__)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, so that no build leaves anything in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("verl_fn", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", cwd=source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An empty environment with the wheel alone; its dependencies come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    # Python's own copy of pip runs as it is packed.
    (pip,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    options = ("--isolated", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
    run(python, pip / "pip", *options, wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A path file adds a folder without reading the path files in it, such as that of an editable installation.
    (site / "dependencies.pth").write_text(SITE_PACKAGES)
    return folder


def test_a_wheel_brings_one_name(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"verl_fn"}


def test_a_wheel_holds_every_module(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("verl_fn/")}
    own = {file.relative_to(ROOT).as_posix() for file in (ROOT / "verl_fn").rglob("*.py")}
    linked = {
        f"verl_fn/{file.relative_to(ROOT).as_posix()}" for name in LINKED for file in (ROOT / name).rglob("*.py")
    }
    assert packed == own | linked | set(DATA)


def test_a_wheel_imports_in_an_empty_environment(installed, tmp_path):
    files = run(installed / "bin" / "python", "-c", locations(MODULES), cwd=tmp_path).split()
    assert len(files) == len(MODULES)
    assert all(Path(file).is_relative_to(installed) for file in files), files


def test_the_command_of_a_wheel_runs(installed, tmp_path):
    assert "train" in run(installed / "bin" / "verl-fn", "--help", cwd=tmp_path)


def test_the_bare_tree_runs(tmp_path):
    # Without `site`, path files are not read: an editable installation of another tree has no effect.
    python, path = (sys.executable, "-S", "-P"), os.pathsep.join([str(ROOT), SITE_PACKAGES])
    files = run(*python, "-c", locations(MODULES), cwd=tmp_path, PYTHONPATH=path).split()
    assert files == [str(ROOT / name.replace(".", "/") / "__init__.py") for name in MODULES]
    assert "train" in run(*python, "-m", "verl_fn.cli", "--help", cwd=tmp_path, PYTHONPATH=path)
