"""A run's folder keeps what its steps were made with, knows its own checkpoints, and notices what others changed."""

import importlib
import json
import shutil
from pathlib import Path

import attrs
import pytest
import torch
from run_configs import tiny_run

from verl_fn import atomic
from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.cli import main
from verl_fn.runs import RunError, evaluate
from verl_fn.runs import folder as folder_module
from verl_fn.runs.checkpoints import IDENTITY, MANIFEST, checkpoints, identity_at, verify
from verl_fn.runs.continuing import run_date
from verl_fn.runs.folder import Run
from verl_fn.runs.history import changed_inputs, fingerprints, record, recorded_inputs, run_config
from verl_fn.runs.logs import altered, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import fork_plan, replay

SILENT = lambda line: None  # noqa: E731
loop = importlib.import_module("verl_fn.runs.loop")
CODE_AT = []
CODE = """from helper import LIMIT


def score(data_source, solution_str, ground_truth, extra_info):
    return LIMIT
"""


def plan(tiny, folder, *more, steps=2):
    options = ["algorithm.name=sft", "trainer.journal=digests", "reward.functions=" + "".join(CODE_AT)]
    return tiny_run(tiny, folder, *options, f"trainer.total_training_steps={steps}", *more)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of two steps, rewarded by code of the user's that imports a file beside it."""
    parent = tmp_path_factory.mktemp("run")
    (parent / "code").mkdir()
    (parent / "code/rewards.py").write_text(CODE)
    (parent / "code/helper.py").write_text("LIMIT = 1.0\n")
    CODE_AT[:] = [f"{parent}/code/rewards.py:score"]
    train(plan(tiny, parent / "a"), SILENT)
    return parent / "a"


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run in another place, with the code where it was."""
    return shutil.copytree(run, tmp_path / "a", symlinks=True)


def dies(*args):
    raise MemoryError("out of memory")


def stops_at(name, write):
    return lambda path, *args: dies() if path.name == name else write(path, *args)


# Configs and inputs


def settings(folder, step, plan_):
    """Starts a continuation after ``step``: what a run does to the record before its first step."""
    for later in checkpoints(folder):
        if int(later.name[5:]) > step:
            later.rmdir()
    record(folder, step, plan_.table, {"file": f"CRC {plan_.roles['actor'].optim.lr}", "torch": "version 1"})


def test_a_run_has_the_same_identity_wherever_its_files_lie(tiny, tmp_path):
    """A file of another name is another one."""
    table, found = tiny_run(tiny, tmp_path, "algorithm.name=sft").table, []
    for path in ("/a/model", "/b/c/model", "/a/another"):
        (folder := tmp_path / str(len(found))).mkdir()
        record(folder, None, table | {"model": {"path": path}}, {path: "CRC 1"})
        found.append(identity_at(folder, 1))
    assert found[0] == found[1] != found[2]


def test_only_what_decides_on_its_numbers_is_part_of_a_runs_identity(tiny, tmp_path):
    def identity(*more):
        record(tmp_path, None, tiny_run(tiny, tmp_path, "algorithm.name=sft", *more).table, {})
        return identity_at(tmp_path, 1)

    plain = identity()
    for same in ("trainer.save_freq=5", "driver.num_threads=2", "ray.ranks=2", "data.date=2026-01-02"):
        assert identity(same) == plain, same
    for other in ("trainer.seed=1", "data.val_size=3", "actor.optim.lr=0.5", "rollout.temperature=0.5"):
        assert identity(other) != plain, other


@pytest.mark.parametrize("killed_in", [None, "config.toml", "inputs.json", "until_step_4.toml", "run.json"])
def test_each_step_keeps_the_config_and_the_inputs_that_made_it(tiny, tmp_path, monkeypatch, killed_in):
    """Continuations from several steps, that die before they save, go back, or are killed in the midst of a write."""
    plans = {
        lr: tiny_run(tiny, tmp_path, "algorithm.name=sft", f"actor.optim.lr={lr}") for lr in (0.1, 0.2, 0.3, 0.4)
    }

    def made_with(last=7):
        rates = [run_config(tmp_path, step)[0].actor.optim.lr for step in range(1, last + 1)]
        assert [recorded_inputs(tmp_path, at + 1)["file"] for at in range(last)] == [f"CRC {lr}" for lr in rates]
        return rates

    def saved(*steps):
        for step in steps:
            (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)

    record(tmp_path, None, plans[0.1].table, {"file": "CRC 0.1"})
    assert run_config(tmp_path, 1)[1] is None
    saved(2)
    settings(tmp_path, 2, plans[0.2])  # dies before it saves
    settings(tmp_path, 2, plans[0.1])  # and is corrected
    assert made_with() == [0.1] * 7 and not list(tmp_path.glob("configs/*"))
    settings(tmp_path, 2, plans[0.2])
    settings(tmp_path, 2, plans[0.3])
    assert made_with() == [0.1, 0.1, *[0.3] * 5] and run_config(tmp_path, 3)[1] == 2
    saved(4, 6)
    if killed_in is not None:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(atomic, "write", stops_at(killed_in, atomic.write))
            settings(tmp_path, 4, plans[0.4])
        assert made_with(4) == [0.1, 0.1, 0.3, 0.3]
    settings(tmp_path, 4, plans[0.4])
    assert made_with() == [0.1, 0.1, 0.3, 0.3, *[0.4] * 3]
    saved(6)
    settings(tmp_path, 3, plans[0.3])  # the checkpoints after step 3 are gone
    assert made_with() == [0.1, 0.1, *[0.3] * 5]


def test_every_file_of_data_is_an_input(tiny, tmp_path):
    files = {part: [tmp_path / f"{part}{i}.jsonl" for i in (0, 1)] for part in ("train", "val")}
    for file in (*files["train"], *files["val"]):
        file.write_text("a\n")
    given = [f"data.{part}_files={json.dumps([str(file) for file in files[part]])}" for part in files]
    made = tiny_run(tiny, tmp_path / "run", *given)
    for file in (*files["train"], *files["val"]):
        before = fingerprints(made)
        file.write_text("b\n")
        assert changed_inputs(before, fingerprints(made)) == [f"another content of {file}"]


def test_files_that_make_tokens_of_text_are_inputs(tiny, tmp_path):
    names = {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
        "added_tokens.json", "generation_config.json",
    }  # fmt: skip
    model = shutil.copytree(tiny, tmp_path / "model")
    for name in names:
        (model / name).touch()
    assert names <= {Path(name).name for name in fingerprints(tiny_run(model, tmp_path / "run"))}


@pytest.mark.parametrize("library", ["verl_fn", "python", "torch", "transformers"])
def test_a_continuation_names_a_library_of_another_version(tiny, tmp_path, library):
    now = fingerprints(tiny_run(tiny, tmp_path / "run"))
    (said,) = changed_inputs(now | {library: "version 0.1"}, now)
    assert said.startswith(f"another version of {library} (0.1 -> ")


def test_a_continuation_names_another_number_of_threads(tiny, tmp_path, monkeypatch):
    """They round differently. On a GPU the CPU decides nothing."""
    plan = tiny_run(tiny, tmp_path / "run", "driver.num_threads=2")
    now = fingerprints(plan)
    (said,) = changed_inputs(now | {"CPU": "version AVX2, threads 1"}, now)
    kernels = torch.backends.cpu.get_cpu_capability()
    assert said == f"another set-up of the CPU (AVX2, threads 1 -> {kernels}, threads 2)"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    free = attrs.evolve(plan, driver=attrs.evolve(plan.driver, num_threads=0))
    assert fingerprints(free)["CPU"] == f"version {kernels}, threads 7"
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    over_ray = attrs.evolve(free, driver=attrs.evolve(free.driver, kind="ray"), ray=attrs.evolve(plan.ray, ranks=2))
    assert fingerprints(over_ray)["CPU"] == f"version {kernels}, threads 4"
    elsewhere = attrs.evolve(over_ray, ray=attrs.evolve(over_ray.ray, address="10.0.0.1:6379"))
    assert "CPU" not in fingerprints(elsewhere), "what a cluster computes on is not known here"
    monkeypatch.setattr("verl_fn.build.device", lambda driver: "cuda")
    assert "CPU" not in fingerprints(plan)


def test_a_fork_prints_the_day_of_its_step(tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    days = {None: "2026-01-01", 2: "2026-02-02"}
    for step, day in days.items():
        record(run, step, tiny_run(tiny, run, "algorithm.name=sft").dated(day).table, {})
        (run / f"checkpoints/step_{(step or 0) + 2}").mkdir(parents=True)
    forks = [
        tiny_run(tiny, tmp_path / "fork", f"trainer.resume_from_path={path}") for path in reversed(checkpoints(run))
    ]
    assert [run_date(fork) for fork in forks] == list(days.values())


def test_a_continuation_that_dies_leaves_replay_and_fork_as_they_were(tiny, copy, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(loop, "advance", dies)
        train(plan(tiny, copy, "actor.optim.lr=0.5", steps=3), SILENT)
    assert fork_plan(copy, 1).roles["actor"].optim.lr == fork_plan(copy, 2).roles["actor"].optim.lr == 1e-3
    lines = []
    train(plan(tiny, copy, steps=3), lines.append)
    assert [line for line in lines if "another setting" in line] == [
        "continuing with another setting: trainer.total_training_steps: 2 -> 3"
    ]
    assert [replay(copy, step, say=SILENT).difference for step in (2, 3)] == [None, None]


def test_a_fork_of_a_step_begins_with_its_config(tiny, copy, run):
    record(copy, 1, plan(tiny, copy, "actor.optim.lr=0.5").table, {})
    assert [fork_plan(copy, step).roles["actor"].optim.lr for step in (1, 2)] == [1e-3, 0.5]


def test_a_checkpoint_is_evaluated_on_the_problems_of_its_step(tiny, copy, monkeypatch):
    record(copy, 1, plan(tiny, copy, "data.val_size=3").table, {})
    asked = []
    monkeypatch.setattr(evaluate, "evaluate_model", lambda plan, say: (asked.append(plan.data.val_size) or {}, []))
    for step in (1, 2):
        assert main(["eval", str(copy / f"checkpoints/step_{step}/actor"), "rollout.val_kwargs.n=1"]) == 0
    assert asked == [8, 3]


def test_a_replay_and_a_continuation_name_the_code_that_changed(tiny, copy, run, capsys):
    """The file that changed is one that the named file imports."""
    helper = run.parent / "code/helper.py"
    lines = []
    try:
        helper.write_text("LIMIT = 0.5\n")
        assert main(["replay", str(copy), "--step", "2"]) == 1
        said = capsys.readouterr().out
        assert f"note: the replay has another content of {helper} than step 2 had" in said
        assert f"likely because the replay has another content of {helper}" in said and "rewards.py" not in said
        train(plan(tiny, copy, steps=3), lines.append)
        assert f"continuing with another content of {helper}" in lines
        assert replay(copy, 3, say=SILENT).changed == ()
    finally:
        helper.write_text("LIMIT = 1.0\n")
    found = replay(copy, 2, say=SILENT)
    assert found.difference is None and found.changed == ()


# Identity


def test_a_checkpoint_of_another_run_is_not_continued(tiny, copy, run, tmp_path):
    train(plan(tiny, tmp_path / "b", "trainer.seed=1"), SILENT)
    assert identity_at(copy, 1) == identity_at(run, 2) != identity_at(tmp_path / "b", 2)
    shutil.rmtree(copy / "checkpoints/step_2")
    shutil.copytree(tmp_path / "b/checkpoints/step_2", copy / "checkpoints/step_2")
    with pytest.raises(
        RunError, match=r"step_2 is of another run than .*; .*step_1 is whole: remove the damaged one"
    ):
        train(plan(tiny, copy, steps=3), SILENT)
    assert main(["eval", str(copy)]) == 1
    # It goes on elsewhere, and so do a copy of the whole folder and checkpoints that are moved away and back.
    shutil.move(copy / "checkpoints/step_2", tmp_path / "kept")
    shutil.move(copy / "checkpoints/step_1", tmp_path / "aside")
    shutil.move(tmp_path / "aside", copy / "checkpoints/step_1")
    train(plan(tiny, copy, steps=2), SILENT)
    train(plan(tiny, tmp_path / "fork", f"trainer.resume_from_path={tmp_path}/kept", steps=3), SILENT)
    assert identity_at(tmp_path / "fork", 3) not in (identity_at(copy, 3), identity_at(tmp_path / "b", 3))
    (copy / IDENTITY).unlink()
    manifest = copy / "checkpoints/step_2" / MANIFEST
    strip(manifest)
    with pytest.raises(RunError, match=r"are of several runs: step_1, step_0 were put there, or .*run.json is lost"):
        train(plan(tiny, copy, steps=3), SILENT)


def strip(manifest):
    """Makes a manifest as it was before checkpoints had an identity."""
    from verl_fn.runs.checkpoints import CHECKSUM, _checksum

    content = {k: v for k, v in json.loads(manifest.read_text()).items() if k not in ("run", CHECKSUM)}
    atomic.write(manifest, json.dumps(content | {CHECKSUM: _checksum(content)}))


def test_a_checkpoint_without_an_identity_is_not_one_of_a_run_that_has_one(copy):
    verify(copy / "checkpoints/step_2")
    strip(copy / "checkpoints/step_2" / MANIFEST)
    with pytest.raises(CheckpointError, match=r"step_2 is of another run than .*: move it away"):
        verify(copy / "checkpoints/step_2")


@pytest.mark.parametrize("content", [
    {}, "", None, [{"since": 0, "id": None, "settings": ""}], [{"since": 1.9, "id": "a", "settings": ""}],
    [{"since": float("inf"), "id": "a", "settings": ""}], [{"since": 0, "id": "a"}],
])  # fmt: skip
def test_a_file_of_identities_that_holds_something_else_is_damaged(tmp_path, content):
    (tmp_path / IDENTITY).write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"run\.json is damaged: it is no list of identities"):
        identity_at(tmp_path, 1)


def test_a_run_of_an_older_version_goes_on(tiny, copy, run):
    for checkpoint in checkpoints(copy):
        strip(checkpoint / MANIFEST)
    for file in ("run.json", "logs.crc"):
        (copy / file).unlink()
    (copy / "inputs.json").write_text("{}")
    assert main(["eval", str(copy)]) == 0 and altered(copy) == []
    train(plan(tiny, copy, steps=3), SILENT)
    assert [replay(copy, step, say=SILENT).difference for step in (1, 2, 3)] == [None] * 3
    for checkpoint in checkpoints(copy):
        verify(checkpoint)
    assert altered(copy) == [] and identity_at(copy, 2) == "" != identity_at(copy, 3)


# What others did to the folder


@pytest.mark.parametrize("file", ["metrics.jsonl", "journal.jsonl", "generations.jsonl"])
def test_a_changed_digit_or_a_lost_line_of_a_log_is_noticed(tiny, copy, run, file, capsys):
    assert altered(copy) == []
    lines = (copy / file).read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["step"] > 0)
    step, digit = json.loads(lines[at])["step"], lines[at].rindex("0", 0, -2)
    (copy / file).write_text(
        "".join([*lines[:at], lines[at][:digit] + "1" + lines[at][digit + 1 :], *lines[at + 1 :]])
    )
    expected = f"{copy / file} was changed: step {step} is not what the run wrote"
    assert altered(copy) == [expected]
    said = []
    train(plan(tiny, copy), said.append)
    assert f"note: {expected}" in said
    train(plan(tiny, copy, steps=3), said.append)
    assert expected in said and altered(copy) == [expected]  # a continuation does not forget it
    assert main(["report", str(copy), "--out", str(copy / "r.html")]) == 0
    assert f"note: {expected}" in capsys.readouterr().err
    lines = (copy / file).read_text().splitlines(keepends=True)
    (copy / file).write_text("".join(line for line in lines if json.loads(line)["step"] != 2))
    assert f"{copy / file} was changed: step 2 is gone" in altered(copy)


def test_what_kills_left_is_removed_at_every_start_but_not_under_another_process(tiny, copy, run):
    left = [copy / name for name in ("checkpoints/.writing_step_7", "checkpoints/.removing_step_1")]
    left += [copy / "answers/.step_9.parquet.writing", copy / ".config.toml.writing"]
    for path in left[:2]:
        (path / "actor").mkdir(parents=True)
    for path in left[2:]:
        path.write_text("half")
    with Run(plan(tiny, tmp := copy)).locked():
        assert not any(path.exists() for path in left)
        left[0].mkdir()
        with pytest.raises(RunError, match="another process trains in"):
            train(plan(tiny, tmp, steps=3), SILENT)
        assert left[0].exists()
    train(plan(tiny, copy), SILENT)  # it has finished
    assert not left[0].exists()


def test_a_finished_run_in_a_folder_that_cannot_be_written_says_so(tiny, copy, run, monkeypatch):

    def refuses(path, flags):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(folder_module, "_no_link", refuses)
    monkeypatch.setattr(folder_module.os, "access", lambda *args: False)
    said = []
    train(plan(tiny, copy), said.append)
    assert said == ["this run has finished, after 2 steps; nothing was done or changed"]
    with pytest.raises(RunError, match="the run's folder cannot be written to"):
        train(plan(tiny, copy, steps=3), SILENT)


def test_a_continuation_says_which_logged_steps_are_done_again(tiny, copy, run):
    shutil.rmtree(copy / "checkpoints/step_2")
    said = []
    train(plan(tiny, copy), said.append)
    assert "the log goes on to step 2, but no checkpoint does: these steps are done again" in said
    assert [row["step"] for row in read_metrics(copy)] == [0, 1, 2] and altered(copy) == []
