"""Checkpoints of a run: the first precedes the first update, damage is seen, and old ones never stop a run."""

import json
import random
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from run_configs import tiny_run
from safetensors.torch import load_file

from verl_fn import atomic
from verl_fn.atomic import BLOCK, crc_of
from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.backends.local import Local
from verl_fn.cli import main
from verl_fn.config import ConfigError
from verl_fn.errors import UserError
from verl_fn.runs import RunError, loop
from verl_fn.runs import checkpoints as files
from verl_fn.runs import folder as folder_module
from verl_fn.runs.checkpoints import (
    MANIFEST,
    check_model_folder,
    checkpoints,
    prune,
    read_manifest,
    verify,
)
from verl_fn.runs.checks import check_ranks
from verl_fn.runs.folder import Run
from verl_fn.runs.loop import train

SILENT = lambda line: None  # noqa: E731


def sft(tiny, folder, steps, *more):
    return tiny_run(tiny, folder, "algorithm.name=sft", f"trainer.total_training_steps={steps}", *more)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of two steps, saved before the first and after each; tests copy it."""
    folder = tmp_path_factory.mktemp("run") / "a"
    train(sft(tiny, folder, 2), SILENT)
    return folder


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "a", symlinks=True)


# The first save


@pytest.mark.parametrize("fork", [False, True])
def test_a_run_saves_before_its_first_update(run, tiny, tmp_path, monkeypatch, fork):
    done = []

    def noting(cls, name):
        method = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda self, *args, **kw: done.append(name) or method(self, *args, **kw))

    noting(Run, "save")
    noting(Local, "apply_update")
    more = [f"trainer.resume_from_path={run}/checkpoints/step_1"] if fork else []
    train(sft(tiny, tmp_path / "b", 3, "trainer.save_freq=-1", *more), SILENT)
    updates = ["apply_update"] * (2 if fork else 3)
    assert done == ["save", *updates, "save"]
    assert [p.name for p in checkpoints(tmp_path / "b")] == ["step_3", "step_1" if fork else "step_0"]
    assert (tmp_path / "b/model/config.json").exists()


def test_logs_are_on_the_disk_before_the_checkpoint_that_follows_them(tiny, tmp_path, monkeypatch):
    """A log that ends before its newest checkpoint would lose lines when the power fails."""
    synced = []

    def sync(path):
        synced.append((path.name, len(checkpoints(tmp_path))))

    monkeypatch.setattr(atomic, "sync", sync)
    train(tiny_run(tiny, tmp_path, "algorithm.name=sft", "trainer.total_training_steps=1"), SILENT)
    for name in ("metrics.jsonl", "logs.crc"):
        assert [count for synced_name, count in synced if synced_name == name] == [0, 1]


def test_a_folder_in_the_place_of_the_runs_link_is_refused_at_once(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "run/model")
    with pytest.raises(RunError, match=r"run/model is in the way.*choose another trainer\.dir"):
        train(sft(tmp_path / "run/model", tmp_path / "run", 1), SILENT)
    assert not checkpoints(tmp_path / "run")


def test_a_model_among_the_runs_own_checkpoints_is_refused(run, tmp_path):
    with pytest.raises(RunError, match="is one of the run's own checkpoints; they are removed"):
        train(sft(run / "model", run, 3), SILENT)


def test_a_model_folder_that_is_removed_during_a_run_is_not_missed(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")

    def remove(line):
        shutil.rmtree(model, ignore_errors=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "start", lambda self, *args, start=Run.start, **kw: (remove(""), start(self, *args, **kw)))
        train(sft(model, tmp_path / "run", 1), SILENT)
    assert not model.exists()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for file in tiny.glob("tokenizer*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_moments_in_bf16_are_continued_in_every_bit_and_only_in_bf16(tiny, tmp_path):
    narrow = "actor.optim.moments_dtype=bfloat16"
    train(sft(tiny, tmp_path / "whole", 3, narrow), SILENT)
    train(sft(tiny, tmp_path / "stopped", 1, narrow), SILENT)
    with pytest.raises(RunError, match=r"actor\.optim\.moments_dtype cannot change in a run that is continued"):
        train(sft(tiny, tmp_path / "stopped", 3), SILENT)
    train(sft(tiny, tmp_path / "stopped", 3, narrow), SILENT)
    whole, stopped = (
        tmp_path / name / "checkpoints/step_3/actor/train_state.safetensors" for name in ("whole", "stopped")
    )
    assert whole.read_bytes() == stopped.read_bytes()
    averages = {name: t.dtype for name, t in load_file(whole).items() if "exp_avg" in name}
    assert set(averages.values()) == {torch.bfloat16}


def test_moments_in_bf16_are_not_for_megatron(tiny, tmp_path):
    plan = sft(tiny, tmp_path / "run", 1, "actor.strategy=megatron", "actor.optim.moments_dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"actor\.strategy is megatron: states of Megatron have moments in fp32"):
        check_ranks(plan, installed=False)


# Damage


def test_every_flipped_bit_of_a_manifest_is_refused_or_means_the_same(run, tmp_path):
    folder = tmp_path / "step_2"
    folder.mkdir()
    whole, expected = (run / "checkpoints/step_2" / MANIFEST).read_bytes(), read_manifest(run / "checkpoints/step_2")
    same = 0
    with (folder / MANIFEST).open("wb", buffering=0) as file:
        for bit in range(8 * len(whole)):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.seek(0)
            file.write(flipped)
            try:
                assert read_manifest(folder) == expected, f"bit {bit} of {whole[bit // 8 - 20 : bit // 8 + 20]!r}"
                same += 1
            except CheckpointError:
                pass
    assert same < len(whole)  # of blanks and of the case of escapes alone


@pytest.mark.parametrize("change", [{"algorithm": "grpo"}, {"state": {".algorithm.step": 7}}, {"files": {}}], ids=str)
def test_an_edited_manifest_is_refused(copied, change):
    file = copied / "checkpoints/step_2" / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is not what was written"):
        verify(file.parent)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(copied):
    renamed = (copied / "checkpoints/step_2").rename(copied / "checkpoints/step_7")
    with pytest.raises(CheckpointError, match="holds the state of step 2"):
        verify(renamed)


def cut(path, others):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path, others):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(bytes(data))


def delete(path, others):
    path.unlink()


def lengthen(path, others):
    path.write_bytes(path.read_bytes() + b"x")


def empty(path, others):
    path.write_bytes(b"")


def swap(path, others):
    path.write_bytes(next(other.read_bytes() for other in others if other.read_bytes() != path.read_bytes()))


def replace_by_folder(path, others):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [cut, flip, delete, lengthen, empty, swap, replace_by_folder])
def test_every_harm_to_every_file_is_seen(run, tmp_path, harm):
    names = sorted(str(p.relative_to(run / "checkpoints/step_2")) for p in (run / "checkpoints/step_2").rglob("*.*"))
    assert {"actor/model.safetensors", "actor/tokenizer.json", "actor/train_state.json", MANIFEST} <= set(names)
    for name in names:
        folder = shutil.copytree(run / "checkpoints/step_2", tmp_path / "step_2")
        # The same file of another step, then the other files.
        others = [run / "checkpoints/step_1" / name, *(run / "checkpoints/step_2" / other for other in names)]
        harm(folder / name, others)
        with pytest.raises(CheckpointError):
            verify(folder)
        shutil.rmtree(folder)


def test_models_of_damaged_checkpoints_are_neither_used_nor_copied(copied, tiny, tmp_path, capsys):
    flip(copied / "checkpoints/step_2/actor/train_state.safetensors", [])
    check_model_folder(copied / "checkpoints/step_2/actor")
    flip(copied / "checkpoints/step_2/actor/model.safetensors", [])
    for args in (["export", copied, tmp_path / "out"], ["eval", copied], ["eval", copied / "checkpoints/step_2"]):
        assert main([str(arg) for arg in args]) == 1
        assert "actor/model.safetensors is not what was written" in capsys.readouterr().err
    with pytest.raises(UserError, match="not what was written"):
        train(sft(copied / "model", tmp_path / "b", 1), SILENT)
    with pytest.raises(UserError, match="not what was written"):
        train(tiny_run(tiny, tmp_path / "c", f"critic.path={copied}/model"), SILENT)
    assert not (tmp_path / "c/checkpoints").exists()


# Old checkpoints


def test_the_newest_checkpoint_has_most_steps_whatever_the_order_of_names(tmp_path):
    for step in (2, 100, 9, 10):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints/step_x").mkdir()
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step_100", "step_10", "step_9", "step_2"]
    assert prune(tmp_path, 2) == []
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step_100", "step_10"]


def test_a_link_to_an_old_checkpoint_is_removed_and_its_target_kept(copied, tiny, tmp_path):
    moved = (copied / "checkpoints/step_0").rename(tmp_path / "elsewhere")
    (copied / "checkpoints/step_0").symlink_to(moved)
    assert prune(copied, 2) == []
    assert [p.name for p in checkpoints(copied)] == ["step_2", "step_1"] and (moved / MANIFEST).exists()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_stop_the_run(copied, tiny, monkeypatch):
    remove = shutil.rmtree

    def busy(path, *args, **kwargs):
        if str(path).endswith("step_0") and not kwargs.get("ignore_errors"):
            raise OSError(16, "Device or resource busy")
        remove(path, *args, **kwargs)

    monkeypatch.setattr(files.shutil, "rmtree", busy)
    lines = []
    train(sft(tiny, copied, 4, "trainer.max_ckpt_to_keep=2"), lines.append)
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == 1 and "step_0 cannot be removed: Device or resource busy" in warnings[0]
    assert [p.name for p in checkpoints(copied)] == ["step_4", "step_3"]


@pytest.mark.parametrize("room", [True, False])
def test_the_first_checkpoint_is_written_during_the_first_step_if_memory_has_room(tiny, tmp_path, monkeypatch, room):
    events = []

    def noted(module, name):
        before = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **more: (events.append(name), before(*args, **more))[1])

    noted(folder_module, "seal")
    noted(loop, "advance")
    monkeypatch.setattr(loop, "can_be_held", lambda plan: room)
    train(sft(tiny, tmp_path / "run", 1), SILENT)
    assert events == (["advance", "seal", "seal"] if room else ["seal", "advance", "seal"])
    assert [verify(path)["algorithm"] for path in checkpoints(tmp_path / "run")] == ["sft", "sft"]


def test_a_copy_of_the_states_takes_at_most_a_quarter_of_the_free_memory(tiny, tmp_path, monkeypatch):
    plan = sft(tiny, tmp_path / "run", 1)
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for share, held in ((0.1, True), (0.5, False)):
        monkeypatch.setattr(files, "checkpoint_bytes", lambda plan, share=share: int(share * free))
        assert files.can_be_held(plan) is held
    monkeypatch.setattr(files, "checkpoint_bytes", lambda plan: 1)
    (tmp_path / "memory.current").write_text("1000\n")
    for most, held in (("max", True), ("1004", True), ("1003", False)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert files.can_be_held(plan) is held
    (tmp_path / "memory.max").unlink()
    assert not files.can_be_held(attrs.evolve(plan, ray=attrs.evolve(plan.ray, address="auto")))


def test_a_run_made_by_hand_prints_no_control_characters(tiny, tmp_path, monkeypatch, capsys):
    """As a folder's name may hold."""
    saver = Run(sft(tiny, tmp_path / "a", 2))
    monkeypatch.setattr(folder_module, "begin", lambda *args, **more: {})
    monkeypatch.setattr(folder_module, "seal", lambda *args, **more: None)
    monkeypatch.setattr(folder_module, "prune", lambda *args: ["the old checkpoint \x1b[31m cannot be removed"])
    saver.save(SimpleNamespace(step=1), None)
    assert capsys.readouterr().out == "warning: the old checkpoint \\x1b[31m cannot be removed\n"


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(copied, monkeypatch):
    class Killed(BaseException):
        pass

    def half(path, *args, **kwargs):
        (path / MANIFEST).unlink()
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(files.shutil, "rmtree", half)
        prune(copied, 2)
    assert [p.name for p in checkpoints(copied)] == ["step_2", "step_1"]
    assert prune(copied, 2) == []
    assert sorted(p.name for p in (copied / "checkpoints").iterdir()) == ["step_1", "step_2"]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_the_checksum_of_a_file(tmp_path, size):
    content = random.Random(0).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    assert crc_of(tmp_path / "file") == zlib.crc32(content)
