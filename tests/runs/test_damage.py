"""A full disk, a damaged checkpoint, a kill: what was saved before stays, and the error says what to do."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from run_configs import tiny_run

from verl_fn.backends import tensor_file
from verl_fn.runs import RunError
from verl_fn.runs import folder as runs
from verl_fn.runs.checkpoints import checkpoints, verify
from verl_fn.runs.loop import restored_state, train
from verl_fn.runs.prepare import workers

SILENT = lambda line: None  # noqa: E731
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of two steps, saved after each; tests copy it."""
    folder = tmp_path_factory.mktemp("run") / "a"
    train(tiny_run(tiny, folder, "algorithm.name=sft", "trainer.total_training_steps=2"), SILENT)
    return folder


def longer(tiny, folder, *more):
    return tiny_run(tiny, folder, "algorithm.name=sft", "trainer.total_training_steps=3", *more)


class Writes:
    """Counts every call that writes to the disk, and fails the one it is told to, and all after it."""

    def __init__(self, patch, fail_at=None):
        self.count, self.fail_at = 0, fail_at
        for owner, name in (
            (Path, "mkdir"), (Path, "write_text"), (Path, "write_bytes"), (Path, "rename"), (Path, "replace"),
            (Path, "symlink_to"),
            (tensor_file, "start"), (os, "pwrite"), (os, "fsync"),
        ):  # fmt: skip
            patch.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, fn):
        def call(*args, **kwargs):
            self.count += 1
            if self.fail_at is not None and self.count >= self.fail_at:
                raise FULL
            return fn(*args, **kwargs)

        return call


@pytest.mark.parametrize("later", ["false", "true"])
def test_a_disk_that_fills_at_any_write_of_a_save_costs_only_that_save(run, tiny, tmp_path, later):
    """Every write of a save fails in turn; the checkpoint before it loads, and the error names the disk."""
    cfg = longer(tiny, tmp_path / "a", f"trainer.async_save={later}")
    shutil.copytree(run, tmp_path / "a", symlinks=True)
    with workers(cfg) as w:
        state = restored_state(checkpoints(tmp_path / "a")[0], cfg, w)
        saver = runs.Run(cfg)
        with pytest.MonkeyPatch.context() as patch:
            writes = Writes(patch)
            shutil.rmtree(tmp_path / "a/checkpoints/step_2")
            saver.save(state, w)
            saver.saved(w)
        assert writes.count > 10
        for fail_at in range(1, writes.count + 1):
            shutil.rmtree(tmp_path / "a")
            shutil.copytree(run, tmp_path / "a", symlinks=True, ignore=shutil.ignore_patterns("step_2"))
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError) as error:
                Writes(patch, fail_at)
                saver.save(state, w)
                saver.saved(w)
            assert "No space left on device" in str(error.value), fail_at
            assert str(tmp_path / "a") in str(error.value) and "MiB are free" in str(error.value)
            newest = checkpoints(tmp_path / "a")[0]
            assert restored_state(newest, cfg, w).step == int(newest.name[5:])
            assert not list(tmp_path.glob("a/checkpoints/.writing_*"))


FILLED = """
import ctypes, os, shutil, subprocess, sys
from pathlib import Path
disk, source, out = map(Path, sys.argv[1:4])
user, group, namespaces = os.getuid(), os.getgid(), 0x10000000 | 0x00020000  # of users and of mounts
if ctypes.CDLL(None).unshare(namespaces) != 0:
    sys.exit(77)
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    Path("/proc/self", name).write_text(text)
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]).returncode != 0:
    sys.exit(77)
sys.path.insert(0, sys.argv[4])
from run_configs import tiny_run
from verl_fn.runs.checkpoints import checkpoints, verify
from verl_fn.runs import RunError
from verl_fn.runs.folder import Run
from verl_fn.runs.loop import restored_state
from verl_fn.runs.prepare import workers
cfg = tiny_run(sys.argv[5], disk / "a", "algorithm.name=sft")
shutil.copytree(source, disk / "a", symlinks=True)
shutil.rmtree(disk / "a/checkpoints/step_2")
size = sum(p.stat().st_size for p in (source / "checkpoints/step_2").rglob("*") if p.is_file())
failed = 0
with workers(cfg) as w:
    state = restored_state(source / "checkpoints/step_2", cfg, w)
    for room in range(0, size + 65536, max(4096, size // 12)):
        (disk / "filler").write_bytes(b"")
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(b"x" * max(free - room, 0))
        try:
            Run(cfg).save(state, w)
        except RunError as error:
            failed += 1
            assert "No space left on device" in str(error) and str(disk) in str(error), error
            assert [p.name for p in checkpoints(disk / "a")] == ["step_1", "step_0"]
        else:
            verify(disk / "a/checkpoints/step_2")
            shutil.rmtree(disk / "a/checkpoints/step_2")
        assert restored_state(disk / "a/checkpoints/step_1", cfg, w).step == 1
out.write_text(str(failed))
"""


def test_a_really_full_disk(run, tiny, tmp_path, warm):
    """The same on a file system of 8 MB with more and more room left."""
    (tmp_path / "disk").mkdir()
    here = str(Path(__file__).parents[1])
    inside = [warm, "-c", FILLED, tmp_path / "disk", run, tmp_path / "failed", here, tiny]
    found = subprocess.run(list(map(str, inside)), capture_output=True, text=True)
    if found.returncode == 77:
        pytest.skip("this machine lets nobody mount a small file system")
    assert found.returncode == 0, found.stderr
    assert int((tmp_path / "failed").read_text()) >= 8


@pytest.mark.parametrize("how", [pytest.param((), marks=pytest.mark.slow), ("--async-save",)])
def test_kills_at_random_moments_cost_nothing(warm, tmp_path, how):
    """The benchmark with few kills: every resume ends with the bytes of the run that nobody disturbed."""
    command = [warm, "-m", "verl_fn.cli", "bench", "crash", "--kills", "3", *how, "--json", tmp_path / "f.json"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads((tmp_path / "f.json").read_text())["kills"] == 3


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("file", "harm", "says"),
    [
        ("actor/model.safetensors", cut, "bytes of"),
        ("actor/model.safetensors", flip, "not what was written"),
        ("actor/train_state.safetensors", flip, "not what was written"),
        ("actor/tokenizer.json", Path.unlink, "is missing"),
        ("checkpoint.json", cut, "cannot be read"),
        ("checkpoint.json", Path.unlink, "has no checkpoint.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_last_good_one_offered(run, tiny, tmp_path, file, harm, says):
    shutil.copytree(run, tmp_path / "a", symlinks=True)
    harm(tmp_path / "a/checkpoints/step_2" / file)
    with pytest.raises(RunError) as error:
        train(longer(tiny, tmp_path / "a"), SILENT)
    assert says in str(error.value)
    assert f"{tmp_path}/a/checkpoints/step_1 is whole: remove the damaged one" in str(error.value)
    shutil.rmtree(tmp_path / "a/checkpoints/step_2")
    lines = []
    train(longer(tiny, tmp_path / "a"), lines.append)
    assert "after step 1" in "".join(lines)


def test_a_checkpoint_of_another_model_is_refused(run, tiny, tmp_path):
    from verl_fn.backends.hf.new_model import new_model

    other = new_model(tmp_path / "other", chars="abcdefgh>", hidden_size=16)
    cfg = tiny_run(other, tmp_path / "b", "algorithm.name=sft", f"trainer.resume_from_path={run}/checkpoints/step_2")
    with pytest.raises(ValueError, match="holds another model than the one this backend was made for"):
        train(cfg, SILENT)


def test_a_whole_checkpoint_verifies(run):
    about = verify(checkpoints(run)[0])
    assert about["algorithm"] == "sft" and about["state"][".algorithm.step"] == 2
    assert {"actor/model.safetensors", "actor/config.json", "actor/train_state.json"} <= set(about["files"])
