"""Fork and replay, and what a run tells of itself on the way."""

import json
import shutil

import pytest
from run_configs import tiny_run

from verl_fn.replay import fork_config, replay
from verl_fn.runs import RunError, read_lines, read_metrics
from verl_fn.train import train

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
    assert replay(copy, 3, say=SILENT).difference == "samples .tokens: another value than in the journal"


def test_a_state_that_differs_is_named_by_its_leaf(copy):
    name = ".params['model.norm.weight']"
    change(copy / "journal.jsonl", 3, lambda row: row["state"]["critic"].update({name: "0"}))
    assert replay(copy, 3, say=SILENT).difference == f"state critic{name}: another value than in the journal"


def test_another_learning_rate_is_seen_at_the_step_where_it_first_acts(copy):
    text = (copy / "config.toml").read_text()
    assert "lr = 0.001" in text
    (copy / "config.toml").write_text(text.replace("lr = 0.001", "lr = 0.002"))
    shutil.rmtree(copy / "checkpoints")
    found = replay(copy, 3, say=SILENT)
    assert found.step == 1 and found.difference.startswith(("metric actor/lr", "metric actor/"))


def test_without_a_journal_the_checkpoint_stands_in(copy):
    (copy / "journal.jsonl").unlink()
    found = replay(copy, 2, say=SILENT)
    assert found.difference is None and found.compared["state leaves"] > 50
    shutil.rmtree(copy / "samples")
    with pytest.raises(RunError, match=r"no samples of step 1: they are kept with trainer.journal=samples"):
        replay(copy, 2, recorded=True, say=SILENT)
    with pytest.raises(RunError, match=r"no step 9 to replay; its metrics.jsonl ends at step 3"):
        replay(copy, 9, say=SILENT)


def test_a_fork_goes_on_from_the_state_under_another_config(run, tmp_path):
    cfg = fork_config(run, 2, [f"trainer.dir={tmp_path}/b", "actor.optim.lr=0.0", "critic.optim.lr=0.0"])
    lines = []
    train(cfg, lines.append)
    assert f"from {run}/checkpoints/step_2" in "".join(lines)
    ours, theirs = read_metrics(tmp_path / "b"), read_metrics(run)
    assert [row["step"] for row in ours] == [0, 1, 2, 3]
    assert ours[:3] == theirs[:3]
    # The same samples, from the same state and key; the update is another.
    assert ours[3]["critic/score/mean"] == theirs[3]["critic/score/mean"]
    assert (ours[3]["actor/lr"], theirs[3]["actor/lr"]) == (0.0, 0.001)
    with pytest.raises(RunError, match=r"no checkpoint of step 1; there are: 2, 3"):
        fork_config(run, 1)


def test_a_fork_with_nothing_changed_is_the_run(run, tmp_path):
    train(fork_config(run, 2, [f"trainer.dir={tmp_path}/b"]), SILENT)
    ours, theirs = (read_lines(folder / "journal.jsonl")[-1] for folder in (tmp_path / "b", run))
    assert ours == theirs


def test_a_run_continued_with_other_settings_says_which(run, tiny, copy):
    lines = []
    more = ["algorithm.name=ppo", "trainer.journal=samples", "algorithm.use_kl_in_reward=true", "trainer.save_freq=2"]
    train(tiny_run(tiny, copy, *more, "actor.optim.lr=5e-4", "trainer.total_training_steps=4"), lines.append)
    assert "continuing with another setting: actor.optim.lr: 0.001 -> 0.0005" in lines
    assert "continuing with another setting: trainer.total_training_steps: 3 -> 4" in lines
