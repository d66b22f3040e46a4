"""What a run's folder records, without any training: identities, inputs, logs, and the manifests of checkpoints."""

import contextlib
import errno
import shutil
import sys
from types import SimpleNamespace

import attrs
import pytest
from run_configs import tiny_run

from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.runs import RunError, history, loop
from verl_fn.runs import checkpoints as files
from verl_fn.runs.checkpoints import check_model_folder, checkpoints_at_once, identities, identity_at, seal
from verl_fn.runs.folder import FAILURE, Run
from verl_fn.runs.history import changed_inputs, changed_keys, fingerprints, record, recorded_inputs, run_config
from verl_fn.runs.logs import (
    GENERATIONS,
    METRICS,
    _identity,
    altered,
    loggers,
    read_answers,
    read_lines,
    read_metrics,
)
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay

SILENT = lambda line: None  # noqa: E731


@pytest.fixture
def plan(tiny, tmp_path):
    return tiny_run(tiny, tmp_path / "run", "algorithm.name=sft")


@pytest.fixture
def run(plan):
    """The folder of a run that has begun."""
    made = Run(plan, SILENT)
    made.folder.mkdir()
    return made


# Identities and inputs


def test_an_identity_depends_on_the_one_before(tiny, tmp_path):
    """A run that went back to its first settings is another one than a run that never left them; so is a fork."""
    tables = [tiny_run(tiny, tmp_path, "algorithm.name=sft", f"actor.optim.lr={lr}").table for lr in (0.1, 0.2)]
    run = tmp_path / "run"
    run.mkdir()
    for step, table in ((None, tables[0]), (2, tables[1]), (4, tables[0])):
        record(run, step, table, {})
        (run / f"checkpoints/step_{(step or 0) + 2}").mkdir(parents=True)
        other = next(one for one in tables if one is not table)
        assert changed_keys(run, table) == {}, "the newest checkpoint decides"
        assert list(changed_keys(run, other)) == ["actor.optim.lr"]
    first, second, third = (identity_at(run, step) for step in (1, 3, 5))
    assert len({first, second, third}) == 3 and (identity_at(run, 2), identity_at(run, 4)) == (first, second)
    record(run, 4, tables[0], {"torch": "version 2"})
    record(run, 4, tables[0], {"CPU": "version AVX2, 2 threads"})
    assert identity_at(run, 5) == third, "another version leaves it as it is, and so does another CPU"
    record(run, 4, tables[0], {"data": "CRC 1"})
    assert identity_at(run, 5) != third
    record(run, 4, tables[1], {})
    assert identity_at(run, 5) == second and len(identities(run)) == 2, "the steps after 4 were never made otherwise"
    record(run, 0, tables[1], {})
    assert [one["since"] for one in identities(run)] == [0, 0] and identity_at(run, 1) != identity_at(run, 0) == first
    forks = []
    for origin in ("", first, second):
        (fork := tmp_path / f"fork_{len(forks)}").mkdir()
        record(fork, None, tables[0], {}, origin)
        forks.append(identity_at(fork, 1))
    assert forks[0] == first and len(set(forks)) == 3


def test_lists_of_files_are_known_by_their_names(tiny, tmp_path):
    table, found = tiny_run(tiny, tmp_path, "algorithm.name=sft").table, []
    for one, other in (("/a/x", "/a/y"), ("/b/x", "/c/d/y"), ("/a/x", "/a/z"), ("x", "relative/y")):
        (folder := tmp_path / str(len(found))).mkdir()
        record(folder, None, table | {"data": {"train_files": [one, other]}}, {})
        found.append(identity_at(folder, 1))
    assert found[0] == found[1] and len(set(found)) == 3


def test_folders_from_the_hub_and_libraries_are_inputs(tiny, tmp_path, monkeypatch):
    """The folders of all models and of all data, and the packages that a task or an engine needs."""
    critic, data = tmp_path / "critic", tmp_path / "set/parts"
    shutil.copytree(tiny, critic)
    data.mkdir(parents=True)
    (data / "val.jsonl").write_text("{}\n")
    monkeypatch.setattr(history, "recorded", lambda folder: f"hub {folder.name}" if folder != tmp_path else None)
    monkeypatch.setattr(history.importlib.metadata, "version", lambda name: f"{name} 7")
    monkeypatch.setattr(history.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(history, "installed_version", lambda name: None if name == "transformers" else f"{name} 8")
    plan = tiny_run(tiny, tmp_path / "run", "algorithm.name=ppo", f"critic.path={critic}")
    plain = fingerprints(plan)
    assert plain[str(critic)] == "hub critic" and plain["torch"] == "version torch 8"
    assert not plain.keys() & {"transformers", "vllm", "reasoning-gym"}
    found = fingerprints(attrs.evolve(plan, data=attrs.evolve(plan.data, val_files=(str(data / "val.jsonl"),))))
    assert (found[str(data)], found[str(data.parent)]) == ("hub parts", "hub set")
    assert fingerprints(attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, name="vllm")))["vllm"] == (
        "version vllm 8"
    )
    reasoning = attrs.evolve(plan, data=attrs.evolve(plan.data, task="reasoning_gym:chain_sum"))
    assert history.reasoning_names(reasoning.data.task)
    assert fingerprints(reasoning)["reasoning-gym"] == "version reasoning-gym 7"
    monkeypatch.setattr(history.importlib.util, "find_spec", lambda name: None)
    assert "reasoning-gym" not in fingerprints(reasoning)


def test_all_code_of_the_user_is_an_input(tiny, tmp_path):
    plan = tiny_run(tiny, tmp_path / "run", "algorithm.name=sft")
    names = ["algorithm", "convert", "reward", "environment"]
    for name in (*names, "some_environment"):
        (tmp_path / f"{name}.py").write_text("one = 1\n")
    own, convert, reward, environment = (f"{tmp_path}/{name}.py:one" for name in names)
    plan = attrs.evolve(
        plan,
        code=(own,),
        data=attrs.evolve(plan.data, convert=(convert,)),
        reward=attrs.evolve(plan.reward, functions=(reward,)),
        env=attrs.evolve(plan.env, name=environment),
    )
    found = fingerprints(plan)
    assert all(f"{tmp_path}/{name}.py" in found for name in names)
    # An environment of the package verifiers has the name of a distribution.
    packaged = attrs.evolve(plan.env, name=f"verifiers:{tmp_path}/some-environment")
    assert f"{tmp_path}/some_environment.py" in fingerprints(attrs.evolve(plan, env=packaged))


def test_a_set_of_several_files_is_one_input(tmp_path):
    files_ = [tmp_path / name for name in "ab"]
    for file in files_:
        file.write_text("1")
    before = history._whole(files_)
    files_[0].write_text("2")
    assert before.startswith("2 files, CRC ") and history._whole(files_) != before != history._whole(files_[:1])
    assert changed_inputs({"set": before}, {"set": history._whole(files_), "new": "x"}) == ["another content of set"]


def test_a_run_without_checkpoints_may_lose_its_config(run, plan):
    """Nothing depends on it, so it is written again."""
    (run.folder / "config.toml").write_text("[trainer")
    run.start(0, origin=None)
    assert run_config(run.folder)[0].algorithm.name == "sft" and recorded_inputs(run.folder) == run.inputs


# The folder


def test_how_a_run_ended_is_one_line(run):
    run.failed(ValueError())
    assert (run.folder / FAILURE).read_text() == "ended after step 0 with an error: ValueError\n"
    run.log(7, {"loss": 1.0, "kl": 2.0})
    run.failed(ValueError("first\nsecond"))
    assert (run.folder / FAILURE).read_text() == "ended after step 7 with an error: ValueError: first\n"


def test_a_model_of_any_role_among_the_runs_checkpoints_is_refused(tiny, tmp_path):
    inside = shutil.copytree(tiny, tmp_path / "run/checkpoints/step_3/critic")
    with pytest.raises(RunError, match="step_3/critic is one of the run's own checkpoints"):
        Run(tiny_run(tiny, tmp_path / "run", "algorithm.name=ppo", f"critic.path={inside}"))


def test_a_run_that_starts_over_keeps_no_line_of_any_log(run):
    run.start(0, origin=None)
    run.log(1, {"loss": 1.0})
    run.append(GENERATIONS, {"step": 1, "response": "old"})
    run.start(0, origin=None)
    assert read_metrics(run.folder) == read_answers(run.folder) == [] and altered(run.folder) == []


def test_an_evaluation_of_a_step_whose_line_is_lost_gets_a_line(run):
    run.log(1, {"loss": 1.0})
    run.amend(2, {"val-core/acc": 0.5})
    run.amend(2, {"timing_s/testing": 1.0})
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "timing_s/testing": 1.0, "val-core/acc": 0.5}]
    assert read_metrics(run.folder) == rows and altered(run.folder) == []


def test_an_error_of_another_disk_names_its_folder(run, tmp_path):
    with pytest.raises(RunError) as error, run.written("responses", tmp_path / "no/such"):
        raise OSError(errno.ENOSPC, "No space left")
    said = str(error.value)
    assert said.startswith(f"responses cannot be written to {tmp_path}/no/such: No space left (")
    assert "; there is no checkpoint yet. Make room" in said
    (run.folder / "checkpoints/step_3").mkdir(parents=True)
    intact = pytest.raises(RunError, match=rf"written to {run.folder}: .*the last intact checkpoint is .*/step_3\.")
    with intact, run.written("responses"):
        raise OSError(errno.ENOSPC, "No space left")


# Logs


def test_several_altered_steps_are_counted(run):
    for step in range(1, 8):
        run.log(step, {"loss": float(step)})
    file = run.folder / METRICS
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], *(line.replace(".0", ".5") for line in lines[1:3]), lines[6]]))
    assert altered(run.folder) == [
        f"{file} was changed: step 2 and 1 more is not what the run wrote",
        f"{file} was changed: step 4 and 2 more is gone",
    ]
    file.write_text("".join(lines[:6]))
    with (run.folder / "logs.crc").open("a") as sums:
        sums.write(f"{METRICS} x 00000000\n{METRICS} 3\n\n")
    assert altered(run.folder) == [], "a kill may precede the line of the last checksum"


def test_only_the_last_line_of_a_log_may_be_cut_off(tmp_path):
    file = tmp_path / "log"
    assert read_lines(file) == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_lines(file) == [{"step": 1}, {"step": 2}]
    table = "not a table with a step"
    for line, problem in (('{"loss": 1}', table), ("[1]", table), ('{"step": "1"}', table), ('{"st', "Untermin")):
        file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
        with pytest.raises(RunError, match=f"log, line 2, is damaged: .*{problem}"):
            read_lines(file)


def test_a_continued_run_is_the_same_one_for_wandb(tiny, tmp_path, monkeypatch):
    made, ended, logged = [], [], []
    of_wandb = SimpleNamespace(log=lambda report, step: logged.append(step), finish=lambda: ended.append(len(logged)))
    fake = SimpleNamespace(init=lambda **given: made.append(given) or of_wandb, __spec__=True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (folder := tmp_path / "run").mkdir()
    for start, more in ((None, []), (3, ["trainer.experiment_name=mine"])):
        trainer = tiny_run(tiny, folder, "trainer.logger=wandb", "trainer.project_name=p", *more).trainer
        with loggers(trainer, {}, folder, start) as (log,):
            log((start or 0) + 1, {"loss": 1.0})
    assert [one["name"] for one in made] == ["run", "mine"] and made[0]["id"] == made[1]["id"]
    assert {(one["resume"], one["dir"], one["project"]) for one in made} == {("allow", str(folder), "p")}
    assert (logged, ended) == ([1, 4], [1, 2])
    (other := tmp_path / "other").mkdir()
    with loggers(trainer, {}, other, None):
        assert made[2]["id"] != made[0]["id"]


def test_a_copy_and_a_run_that_starts_over_are_new_runs_for_wandb_and_a_moved_one_is_not(tmp_path):
    (run := tmp_path / "run").mkdir()
    first = _identity(run, fresh=True)
    assert _identity(run, fresh=False) == first
    copy = shutil.copytree(run, tmp_path / "copy")
    copied = _identity(copy, fresh=False)
    assert copied != first and _identity(copy, fresh=False) == copied and _identity(run, fresh=False) == first
    moved = run.rename(tmp_path / "moved")
    run.mkdir()  # another run takes the old place
    assert _identity(run, fresh=True) != first == _identity(moved, fresh=False)
    (link := tmp_path / "link").symlink_to(moved)
    assert _identity(link, fresh=False) == first
    assert _identity(moved, fresh=True) not in (first, copied)
    (moved / "wandb_id").write_text("of an older version")
    assert _identity(moved, fresh=False) == "of an older version"


def test_a_run_that_continues_from_its_first_checkpoint_continues_for_its_loggers(tiny, tmp_path, monkeypatch):
    """Its evaluation before training is not made again."""
    starts = []

    @contextlib.contextmanager
    def noted(trainer, table, folder, start):
        starts.append(start)
        yield []

    monkeypatch.setattr(loop, "loggers", noted)
    plan = tiny_run(tiny, tmp_path, "algorithm.name=sft", "trainer.total_training_steps=1")
    train(plan, lambda line: None)
    shutil.rmtree(tmp_path / "checkpoints" / "step_1")
    train(plan, lambda line: None)
    assert starts == [None, 0]


@pytest.mark.parametrize(("start", "kept"), [(None, [5]), (0, [0, 5]), (1, [0, 1, 5])])
def test_tensorboard_forgets_the_steps_that_a_run_makes_again(start, kept, tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = tiny_run(tiny, tmp_path, "trainer.logger=tensorboard").trainer
    for begins, steps in ((None, (0, 1, 2, 3)), (start, (5,))):
        with loggers(trainer, {}, tmp_path, begins) as (log,):
            for step in steps:
                log(step, {"loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == kept


def test_tensorboard_leaves_out_what_is_not_finite(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with loggers(tiny_run(tiny, tmp_path, "trainer.logger=tensorboard").trainer, {}, tmp_path, None) as (log,):
        log(1, {"nan": float("nan"), "loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]


# Checkpoints


def test_only_the_model_that_is_used_has_to_be_whole(plan, tmp_path):
    """A checkpoint of two models of which one is damaged; optimizer states do not matter to either."""
    step = tmp_path / "checkpoints/step_4"
    for name in ("actor/model", "actor/train_state.json", "actor_2/model"):
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_text("whole")
    seal(step, {"algorithm": "sft", "state": {".algorithm.step": 4}}, plan, None)
    check_model_folder(step / "actor")
    (step / "actor_2/model").write_text("broken")
    check_model_folder(step / "actor")
    with pytest.raises(CheckpointError, match="actor_2/model has 6 bytes of 5"):
        check_model_folder(step / "actor_2")
    check_model_folder(tmp_path)


def test_checkpoints_at_the_ends_only_take_the_room_of_two(plan):
    for every, most in ((0, 2), (-1, 2), (1, 4), (2, 3), (3, 2)):
        trainer = attrs.evolve(plan.trainer, save_freq=every, total_training_steps=3)
        assert checkpoints_at_once(attrs.evolve(plan, trainer=trainer)) == most, every


def test_a_run_that_continues_needs_room_for_one_more_at_least(plan, tmp_path, monkeypatch):
    """Also where the folder holds more checkpoints than it will keep."""
    for step in range(5):
        (tmp_path / f"run/checkpoints/step_{step}").mkdir(parents=True)
    less = attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, max_ckpt_to_keep=1))
    each = files.checkpoint_bytes(less)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=each - 1))
    with pytest.raises(Exception, match="room for 1 more"):
        files.check_disk(less)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=each))
    files.check_disk(less)


def test_the_memory_of_a_container_by_either_version_of_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    for version, (limit, used) in enumerate(files.LIMITS, 1):
        (tmp_path / limit).write_text(f"{10_000 // version}\n")
        (tmp_path / used).write_text("1000\n")
        assert files.free_memory() == 10_000 // version - 1000
    assert "memory.limit_in_bytes" in limit
    (tmp_path / limit).write_text(f"{2**62}\n")
    assert files.free_memory() == 9_000, "the smallest room counts"


def test_a_checkpoint_is_of_one_algorithm_and_its_roles(plan, tmp_path):
    step = tmp_path / "checkpoints/step_4"
    (step / "actor").mkdir(parents=True)
    seal(step, {"algorithm": "grpo", "state": {".algorithm.step": 4}}, plan, None)
    with pytest.raises(RunError, match="step_4 is of grpo with actor; the config asks for sft with actor"):
        files.restore(step, None, plan, None)
    (step / "critic").mkdir()
    (step / "checkpoint.json").unlink()
    seal(step, {"algorithm": "sft", "state": {".algorithm.step": 4}}, plan, None)
    with pytest.raises(RunError, match="step_4 is of sft with actor, critic; the config asks for sft with actor"):
        files.restore(step, None, plan, None)


def test_a_save_by_threads_is_waited_for_and_one_elsewhere_is_refused(tiny, plan, tmp_path):
    """Each role's state is saved as the run asks for it, and the manifest is written when all are."""
    asked = []

    def trainer(name):
        return SimpleNamespace(
            save=lambda state, folder, **more: (asked.append((name, more)), folder.mkdir())[1],
            saved=lambda: asked.append((name, (tmp_path / "a/checkpoint.json").exists())),
            map=lambda function, state: function(state),
        )

    both = tiny_run(tiny, tmp_path / "run", "algorithm.name=ppo")
    w = SimpleNamespace(trainers={name: trainer(name) for name in both.roles}, get=lambda value: value)
    had = SimpleNamespace(scheduler=5)
    state = SimpleNamespace(role=lambda name: had, step=3, waiting=(), without_roles=lambda plan: {"step": 3})
    for later in (False, True):
        (aside := tmp_path / "a").mkdir()
        manifest = files.begin(state, aside, both, w, "name", later=later)
        assert manifest["algorithm"] == "ppo" and manifest["run"] == "name" and "waiting" not in manifest
        assert manifest["updates"] == {name: [5, 6, 0] for name in ("actor", "critic")}
        seal(aside, manifest, both, w, later=later)
        more = {"later": True} if later else {}
        assert asked == [*((name, more) for name in both.roles), *((name, False) for name in both.roles if later)]
        shutil.rmtree(aside)
        asked.clear()
    w.trainers["critic"].save = lambda *args, **more: None
    (tmp_path / "a").mkdir()
    with pytest.raises(RunError, match=r"of critic wrote its checkpoint elsewhere than .*: no shared folder"):
        files.begin(state, tmp_path / "a", both, w)


# Replays that cannot begin


def test_steps_that_cannot_be_replayed_are_refused(run, plan):
    run.start(0, origin=None)
    for step in (0, 1, 3):
        run.log(step, {"loss": 1.0})
    for step in (0, -1, 2, 4):
        with pytest.raises(RunError, match=rf"has no step {step} to replay; its metrics.jsonl ends at step 3"):
            replay(run.folder, step, say=SILENT)
    with pytest.raises(RunError, match="sft draws no samples, so there are none to take from the journal"):
        replay(run.folder, 1, recorded=True, say=SILENT)
