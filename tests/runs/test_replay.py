"""Fork and replay, and what a run tells of itself on the way."""

import importlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_configs import tiny_run

from verl_fn import atomic
from verl_fn.cli import commands, main
from verl_fn.runs import RunError, journal, loop
from verl_fn.runs.logs import read_lines, read_metrics
from verl_fn.runs.loop import restored_state, train
from verl_fn.runs.replay import Replayed, _first_metric, _origin, fork_plan, replay
from verl_fn.state import pack

SILENT = lambda line: None  # noqa: E731


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "a"
    more = ["algorithm.name=ppo", "trainer.journal=samples", "algorithm.use_kl_in_reward=true", "trainer.save_freq=2"]
    train(tiny_run(tiny, folder, *more), SILENT)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "a", symlinks=True)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("recorded", [False, True])
def test_every_step_comes_out_bitwise_the_same(run, step, recorded):
    found = replay(run, step, recorded=recorded, say=SILENT)
    assert (found.step, found.difference) == (step, None)
    assert found.compared["metrics"] > 30 and found.compared["state leaves"] > 50
    assert found.compared["sample fields"] > 5


def change(file, step, edit):
    rows = read_lines(file)
    for row in rows:
        if row["step"] == step:
            edit(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_first_value_that_differs_is_named(copy):
    change(copy / "metrics.jsonl", 3, lambda row: row.update({"actor/pg_loss": row["actor/pg_loss"] + 1e-9}))
    assert replay(copy, 3, say=SILENT).difference.startswith("metric actor/pg_loss: logged")
    change(copy / "journal.jsonl", 3, lambda row: row["samples"].update({".tokens": "0"}))
    assert replay(copy, 3, say=SILENT).difference == "samples .tokens: differs from the journal"


def test_a_value_that_only_one_of_two_lines_has_is_a_difference():
    one, more = {"state": {"actor": {".a": "0"}}}, {"state": {"actor": {".a": "0", ".b": "0"}}}
    for recorded, now in ((one, more), (more, one)):
        assert journal.first_difference(recorded, now, "state") == "state actor.b: differs from the journal"


def test_an_evaluation_that_differs_is_named(copy):
    name = "val-core/reverse/acc/mean@1"
    change(copy / "metrics.jsonl", 3, lambda row: row.update({name: row[name] + 1e-9}))
    assert replay(copy, 3, say=SILENT).difference.startswith(f"metric {name}: logged")


def test_counters_of_work_are_not_compared(copy):
    """A continued run may have copied what the replay, which starts at another checkpoint, need not."""
    change(copy / "metrics.jsonl", 3, lambda row: row.update({"perf/residency_copies": 24.0}))
    assert replay(copy, 3, say=SILENT).difference is None


def test_a_step_of_several_processes_is_not_replayed_in_one(copy):
    """It would be rounded otherwise, which is no fault of the run."""
    change(copy / "metrics.jsonl", 2, lambda row: row.update({"perf/ranks": 2}))
    with pytest.raises(RunError, match=r"step 2 .* made by 2 training processes.*--nproc-per-node 2"):
        replay(copy, 2, say=SILENT)
    assert replay(copy, 3, say=SILENT).difference is None


def test_a_run_over_several_processes_is_evaluated_in_one(copy, capsys):
    layout = ["actor.strategy=fsdp", "actor.fsdp_config.ulysses_sequence_parallel_size=2", "critic.strategy=fsdp"]
    assert main(["eval", str(copy), *layout]) == 0, capsys.readouterr().err


def test_a_state_that_differs_is_named_by_its_leaf(copy):
    name = ".params['model.norm.weight']"
    change(copy / "journal.jsonl", 3, lambda row: row["state"]["critic"].update({name: "0"}))
    assert replay(copy, 3, say=SILENT).difference == f"state critic{name}: differs from the journal"


def test_another_learning_rate_is_seen_at_the_step_where_it_first_acts(copy):
    text = (copy / "config.toml").read_text()
    assert "lr = 0.001" in text
    (copy / "config.toml").write_text(text.replace("lr = 0.001", "lr = 0.002"))
    shutil.rmtree(copy / "checkpoints")
    found = replay(copy, 3, say=SILENT)
    assert found.step == 1 and found.difference.startswith(("metric actor/lr", "metric actor/"))


def test_without_a_journal_the_checkpoint_stands_in(copy, monkeypatch):
    (copy / "journal.jsonl").unlink()
    found = replay(copy, 2, say=SILENT)
    assert found.difference is None and found.compared["state leaves"] > 50
    with monkeypatch.context() as patch:
        earlier = lambda path, *args: restored_state(path.with_name("step_2"), *args)  # noqa: E731
        patch.setattr("verl_fn.runs.replay.restored_state", earlier)
        difference = replay(copy, 3, say=SILENT).difference
    assert re.fullmatch(r"state actor\.params\[.*\]: another value than in .*step_3", difference)
    shutil.rmtree(copy / "samples")
    with pytest.raises(RunError, match=r"no samples of step 1: they are kept with trainer.journal=samples"):
        replay(copy, 2, recorded=True, say=SILENT)
    with pytest.raises(RunError, match=r"no step 9 to replay; its metrics.jsonl ends at step 3"):
        replay(copy, 9, say=SILENT)


def test_a_fork_goes_on_from_the_state_under_another_config(run, tmp_path):
    cfg = fork_plan(run, 2, [f"trainer.dir={tmp_path}/b", "actor.optim.lr=0.0", "critic.optim.lr=0.0"])
    lines = []
    train(cfg, lines.append)
    assert f"from {run}/checkpoints/step_2" in "".join(lines)
    ours, theirs = read_metrics(tmp_path / "b"), read_metrics(run)
    assert [row["step"] for row in ours] == [0, 1, 2, 3]
    assert ours[:3] == theirs[:3]
    # The same samples, from the same state and key; the update is another.
    assert ours[3]["critic/score/mean"] == theirs[3]["critic/score/mean"]
    assert (ours[3]["actor/lr"], theirs[3]["actor/lr"]) == (0.0, 0.001)
    with pytest.raises(RunError, match=r"no checkpoint of step 1; there are: 0, 2, 3"):
        fork_plan(run, 1)


def test_a_fork_notes_what_its_own_settings_miss_alone(run, tmp_path, monkeypatch):
    """The config of the run holds every key, and what has no effect there was said when it began."""
    config = run / "config.toml"
    before, given = [f"of {config}"], [f"of {config}", "of the fork"]
    monkeypatch.setattr(commands, "notes", lambda file, overrides: given if overrides else before)
    noted = []
    monkeypatch.setattr(commands, "_train", lambda plan, hints, args: noted.extend(hints) or 0)
    assert main(["fork", str(run), "--step", "2", f"trainer.dir={tmp_path / 'fork'}"]) == 0
    assert noted == ["of the fork"]


def test_a_fork_with_nothing_changed_is_the_run(run, tmp_path):
    train(fork_plan(run, 2, [f"trainer.dir={tmp_path}/b"]), SILENT)
    ours, theirs = (read_lines(folder / "journal.jsonl")[-1] for folder in (tmp_path / "b", run))
    assert ours == theirs


def test_a_run_continued_with_other_settings_says_which(run, tiny, copy):
    lines = []
    more = ["algorithm.name=ppo", "trainer.journal=samples", "algorithm.use_kl_in_reward=true", "trainer.save_freq=2"]
    more += ["actor.optim.lr=5e-4", "trainer.total_training_steps=4"]
    with pytest.raises(RunError, match="holds checkpoints of another run"):
        train(tiny_run(tiny, copy, *more, "trainer.resume_mode=disable"), lines.append)
    assert not any("is dropped" in line for line in lines)
    first = f"trainer.resume_from_path={copy}/checkpoints/step_2"
    train(tiny_run(tiny, copy, *more, first), lines.append)
    ignored = [line for line in lines if "resume_from_path" in line]
    assert len(ignored) == 1 and ignored[0].startswith("continuing from the folder's newest checkpoint, although ")
    assert "continuing with another setting: actor.optim.lr: 0.001 -> 0.0005" in lines
    assert "continuing with another setting: trainer.total_training_steps: 3 -> 4" in lines
    lines.clear()
    train(tiny_run(tiny, copy, *more, "trainer.total_training_steps=5"), lines.append)
    (line,) = [line for line in lines if "resume_from_path" in line]
    assert line.startswith("continuing with another setting: trainer.resume_from_path: ") and line.endswith("-> None")


def test_a_finished_run_is_left_as_it_is(run, tiny, copy):
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    lines = []
    more = ["algorithm.name=ppo", "trainer.journal=samples", "algorithm.use_kl_in_reward=true", "trainer.save_freq=2"]
    train(tiny_run(tiny, copy, *more, "actor.optim.lr=0.5"), lines.append)
    assert "this run has finished, after 3 steps; nothing was done or changed" in lines[0]
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file() and p.name != ".lock"} == {
        p: data for p, data in before.items() if p.name != ".lock"
    }


def test_what_the_state_holds_cannot_be_changed_in_place(run, tiny, copy):
    more = ["algorithm.name=ppo", "trainer.journal=samples", "algorithm.use_kl_in_reward=true", "trainer.save_freq=2"]
    for other in ("trainer.seed=5", "algorithm.kl_ctrl.type=adaptive"):
        with pytest.raises(RunError, match=r"cannot change in a run that is continued .* Fork the run"):
            train(tiny_run(tiny, copy, *more, other, "trainer.total_training_steps=4"), SILENT)
    for role in ("actor", "critic"):
        for other in ("optim.moments_dtype=bfloat16", "lora_rank=2"):
            told = rf"{role}\.{other.partition('=')[0]} cannot change .* is in {copy}/checkpoints/step_3/{role}$"
            with pytest.raises(RunError, match=told):
                train(tiny_run(tiny, copy, *more, f"{role}.{other}", "trainer.total_training_steps=4"), SILENT)


def test_a_fork_takes_up_another_seed_and_controller(run, tmp_path):
    for name, other in (("seed", "trainer.seed=5"), ("kl", "algorithm.kl_ctrl.kl_coef=0.5")):
        train(fork_plan(run, 2, [f"trainer.dir={tmp_path}/{name}", other]), SILENT)
    seed, kl, whole = (read_metrics(folder)[-1] for folder in (tmp_path / "seed", tmp_path / "kl", run))
    assert seed["actor/entropy"] != whole["actor/entropy"]
    assert kl["actor/entropy"] == whole["actor/entropy"]
    name = "actor/reward_kl_penalty_coeff"
    assert (kl[name], whole[name]) == (0.5, 0.001)


def test_two_forks_of_one_step_do_not_share_a_folder(copy):
    train(fork_plan(copy, 2), SILENT)
    assert fork_plan(copy, 2).trainer.dir == f"{copy}_fork_2"
    with pytest.raises(RunError, match=r"holds a fork with other settings \(actor.optim.lr: 0.001 -> 0.5\)"):
        fork_plan(copy, 2, ["actor.optim.lr=0.5"])


def test_a_fork_is_replayed_from_where_it_began(copy, tmp_path):
    train(fork_plan(copy, 2, [f"trainer.dir={tmp_path}/b", "actor.optim.lr=1e-2", "trainer.save_freq=-1"]), SILENT)
    found = replay(tmp_path / "b", 3, say=SILENT)
    assert (found.step, found.difference) == (3, None)
    with pytest.raises(RunError, match=r"step 2 is of the run that was forked: replay it in"):
        replay(tmp_path / "b", 2, say=SILENT)


def test_a_step_is_replayed_with_the_settings_of_its_time(tiny, copy):
    more = ["algorithm.name=ppo", "trainer.journal=samples", "algorithm.use_kl_in_reward=true", "trainer.save_freq=1"]
    train(tiny_run(tiny, copy, *more, "actor.optim.lr=5e-4", "trainer.total_training_steps=5"), SILENT)
    for step in (2, 3, 4, 5):
        assert replay(copy, step, say=SILENT).difference is None, step
    for step in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_{step}")
    with pytest.raises(RunError, match=r"apply since step 3, .* left to replay from; trainer.max_ckpt_to_keep says"):
        replay(copy, 5, say=SILENT)


def test_a_moved_run_is_replayed_where_it_is(copy, tmp_path):
    moved = copy.rename(tmp_path / "moved")
    assert replay(moved, 3, say=SILENT).difference is None
    assert not copy.exists()


def test_a_folder_belongs_to_one_process_at_a_time(tiny, copy):
    from verl_fn.runs.folder import Run

    cfg = tiny_run(tiny, copy, "algorithm.name=ppo")
    with Run(cfg).locked(), pytest.raises(RunError, match="another process trains in"):
        train(cfg, SILENT)


def test_a_damaged_line_in_a_log_is_named_and_nothing_is_dropped(tiny, copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:30], *lines[2:]]) + "\n")
    before = (copy / "metrics.jsonl").read_text()
    with pytest.raises(RunError, match=r"metrics.jsonl, line 2, is damaged"):
        train(tiny_run(tiny, copy, "algorithm.name=ppo", "algorithm.use_kl_in_reward=true"), SILENT)
    assert (copy / "metrics.jsonl").read_text() == before


def test_samples_that_the_journal_cannot_keep_are_refused(tiny, tmp_path, monkeypatch):
    """A replay would sample without them, and nobody would know."""
    with_images = lambda samples: pack(samples).with_ragged(images=[[]] * len(samples))  # noqa: E731
    monkeypatch.setattr(journal, "pack", with_images)
    more = ["algorithm.name=grpo", "rollout.n=2", "trainer.total_training_steps=1", "trainer.journal=samples"]
    with pytest.raises(RunError, match=r"samples of step 1 have ragged fields \(images\).*trainer.journal=digests"):
        train(tiny_run(tiny, tmp_path / "a", *more), SILENT)


def test_a_run_without_its_checkpoints_starts_over_only_where_asked_to(tiny, run, copy):
    shutil.rmtree(copy / "checkpoints")
    lines = []
    more = ["algorithm.name=ppo", "trainer.total_training_steps=1", "trainer.journal=samples"]
    before = (copy / "metrics.jsonl").read_bytes(), (copy / "config.toml").read_bytes()
    for fork in ([], [f"trainer.resume_from_path={run}/checkpoints/step_2"]):
        with pytest.raises(RunError, match=r"steps up to 3, but .* not mounted\? .*trainer\.resume_mode=disable"):
            train(tiny_run(tiny, copy, *more, *fork), SILENT)
    assert before == ((copy / "metrics.jsonl").read_bytes(), (copy / "config.toml").read_bytes())
    train(tiny_run(tiny, copy, *more, "trainer.resume_mode=disable"), lines.append)
    assert any("starting over; the log up to step 3 is dropped" in line for line in lines)
    assert [p.name for p in (copy / "samples").iterdir()] == ["step_1.safetensors"]


def test_a_step_that_was_cut_off_while_its_samples_were_written_leaves_nothing(tiny, tmp_path, monkeypatch):
    more = ["algorithm.name=grpo", "rollout.n=2", "trainer.journal=samples", "trainer.total_training_steps=2"]
    plan = tiny_run(tiny, tmp_path / "run", *more)
    cut = iter([KeyError("cut off")])

    def sync(file):
        if "step_2" in file.name and (error := next(cut, None)):
            raise error

    monkeypatch.setattr(atomic, "sync", sync)
    with pytest.raises(KeyError, match="cut off"):
        train(plan, SILENT)
    samples = tmp_path / "run" / "samples"
    assert {file.name for file in samples.iterdir()} == {"step_1.safetensors"}
    (samples / ".step_2.safetensors.writing").write_text("what a killed process leaves")
    (samples / "step_2.safetensors").write_text("of a step that is done again")
    train(tiny_run(tiny, tmp_path / "run", *more, "trainer.journal=digests"), SILENT)
    assert {file.name for file in samples.iterdir()} == {"step_1.safetensors"}
    train(tiny_run(tiny, tmp_path / "run", *more, "trainer.total_training_steps=3"), SILENT)
    assert {file.name for file in samples.iterdir()} == {"step_1.safetensors", "step_3.safetensors"}


def test_a_replay_begins_at_the_last_checkpoint_with_the_same_settings(tmp_path):
    """A fork may begin at the checkpoint that it is a fork of."""
    run, other = tmp_path / "run", tmp_path / "other/checkpoints/step_4"
    for step in (5, 6, 8):
        (run / f"checkpoints/step_{step}").mkdir(parents=True)
    at = lambda step, since, fork=None: (found := _origin(run, fork, step, since)) and found.name  # noqa: E731
    assert [at(step, None) for step in (5, 6, 7, 8, 9)] == [None, "step_5", "step_6", "step_6", "step_8"]
    assert at(7, 6) == "step_6" and at(7, 5) == "step_6"
    for step, since in ((6, 6), (5, 3)):
        with pytest.raises(RunError, match=f"settings of step {step} apply since step {since}, and no check"):
            at(step, since)
    with pytest.raises(RunError, match="no checkpoint from there to before step 5 is left"):
        at(5, None, str(other))
    other.mkdir(parents=True)
    assert at(5, None, str(other)) == at(5, 4, str(other)) == "step_4" and at(6, None, str(other)) == "step_5"
    (kept := tmp_path / "kept").mkdir()
    assert at(1, None, str(kept)) == "kept", "its name says no step"
    (other.parents[1] / "config.toml").touch()
    with pytest.raises(RunError, match=r"step 4 is of the run that was forked: replay it in .*other"):
        at(4, None, str(other))


def test_a_run_says_which_engines_were_restarted():
    said, reasons = [], iter([[], ["engine 1 was lost", "engine 2 was lost"]])
    loop_ = SimpleNamespace(
        w=SimpleNamespace(processes=SimpleNamespace(restarts=lambda: next(reasons))), say=said.append
    )
    assert loop._Loop._restarts(loop_) == {} and said == []
    assert loop._Loop._restarts(loop_) == {"perf/engine_restarts": 2}
    assert said == ["note: engine 1 was lost", "note: engine 2 was lost"]


@pytest.mark.parametrize(
    ("found", "status", "lines"),
    [
        (
            Replayed(3, None, {"metrics": 30, "state leaves": 5}), 0,
            ["step 3 comes out bitwise the same: 30 metrics, 5 state leaves"],
        ),
        (
            Replayed(3, None, {"metrics": 30}), 0,
            ["step 3 comes out bitwise the same: 30 metrics", "the state itself was not compared: the run kept no"],
        ),
        (Replayed(2, "metric a", {"metrics": 30}), 1, ["step 2 differs; first in metric a"]),
        (
            Replayed(2, "metric a", {"metrics": 30}, ("one", "two")), 1,
            ["step 2 differs; first in metric a", "likely because the replay has one, and two"],
        ),
    ],
)  # fmt: skip
def test_a_replay_tells_its_result(found, status, lines, monkeypatch, capsys):
    asked = []
    module = importlib.import_module("verl_fn.runs.replay")
    monkeypatch.setattr(module, "replay", lambda *given, **more: asked.append((*given, more)) or found)
    assert main(["replay", "r", "--step", "3", *(["--recorded"] if status else [])]) == status
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(lines) and all(one.startswith(line) for one, line in zip(said, lines, strict=True))
    assert [(Path(folder).name, step, more) for folder, step, more in asked] == [("r", 3, {"recorded": bool(status)})]


def test_a_replay_has_metrics_of_evaluations_that_an_earlier_version_did_not_log():
    logged = {"actor/loss": 1.0, "val-core/x/acc/mean@1": 0.5}
    more = {"val-aux/x/response_length/clip_ratio": 0.0, "val/loss": 2.0}
    assert _first_metric(logged, logged | more) is None
    assert _first_metric(logged | more, logged) == "metric val-aux/x/response_length/clip_ratio: logged 0.0, now None"
    assert _first_metric(logged, logged | {"actor/kl": 0.0}) == "metric actor/kl: logged None, now 0.0"
