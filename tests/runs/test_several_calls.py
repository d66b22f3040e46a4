"""Runs whose steps ask the engine several times: the journal has every call, and nothing changes after a resume."""

import pytest
from run_configs import paced, tiny_run

from verl_fn.driver.ranks import local_workers
from verl_fn.runs import RunError
from verl_fn.runs.checkpoints import restore
from verl_fn.runs.folder import Run
from verl_fn.runs.journal import Recorded, read_samples
from verl_fn.runs.logs import TIMED, read_journal, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import prepare
from verl_fn.runs.replay import replay
from verl_fn.runs.state import algorithm_of, blank_state, initial_state
from verl_fn.runs.steps import ROWS_WAITING, advance

SILENT = lambda line: None  # noqa: E731
SETTINGS = {
    "remax": ["rollout.n=2"],
    "dapo": ["rollout.n=4", "algorithm.overlong_buffer.len=4"],
}


def plan(tiny, folder, name, *more):
    settings = ["data.train_batch_size=4", "trainer.journal=samples", "trainer.val_before_train=false"]
    return tiny_run(
        tiny,
        folder,
        f"algorithm.name={name}",
        *SETTINGS[name],
        *settings,
        "trainer.test_freq=-1",
        "trainer.total_training_steps=2",
        *more,
    )


@pytest.fixture(scope="module", params=list(SETTINGS))
def run(request, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / request.param
    train(plan(tiny, folder, request.param), SILENT)
    return folder


def logged(folder):
    rows = [{k: v for k, v in row.items() if not k.startswith((*TIMED, "val-"))} for row in read_metrics(folder)]
    return rows, read_journal(folder), {p.name: p.read_bytes() for p in (folder / "samples").iterdir()}


def test_the_ledger_names_what_became_of_every_row(run):
    for row in read_metrics(run):
        dropped = {k: v for k, v in row.items() if k.startswith("rollout/rows_dropped/")}
        assert row["rollout/rows_asked"] == row["rollout/rows_learned"] + sum(dropped.values())
        assert row["rollout/rows_dropped/algorithm"] == row["rollout/rows_dropped/engine"] == 0
        if run.name == "remax":
            assert (row["rollout/rows_asked"], row["rollout/rows_dropped/baseline"]) == (12, 4)
        else:
            assert row["rollout/rows_asked"] > row["rollout/rows_learned"] == 16
            assert row["train/num_gen_batches"] > 1 and row["reward/overlong/mean"] < 0


def test_the_journal_has_every_call_in_order(run):
    rows = read_metrics(run)
    for row in rows:
        calls = read_samples(run, row["step"])
        assert sum(len(call) for call in calls) == row["rollout/rows_asked"]
        assert len(calls) == (2 if run.name == "remax" else row["train/num_gen_batches"])
        names = read_journal(run)[row["step"]]["samples"]
        assert {f".tokens of call {number}" for number in range(2, len(calls) + 1)} | {".tokens"} <= set(names)
    if run.name == "dapo":
        ids = [i for row in rows for call in read_samples(run, row["step"]) for i in call["group"].unique().tolist()]
        assert ids == list(range(sum(row["rollout/rows_asked"] for row in rows) // 4)), "each problem once, in order"


@pytest.mark.parametrize("recorded", [False, True])
def test_a_replay_is_bitwise_the_same(run, recorded):
    found = replay(run, 2, recorded=recorded, say=SILENT)
    assert (found.step, found.difference) == (2, None)


def test_a_step_that_asks_more_often_than_the_journal_is_named(run):
    engine = Recorded(read_samples(run, 1)[:1])
    with pytest.raises(RunError, match="of other prompts"):
        engine.generate([])
    with pytest.raises(RunError, match=r"more often than when it was recorded \(1 times\)"):
        engine.generate([])


def test_a_resumed_run_is_the_undisturbed_one(run, tiny, tmp_path):
    """Its cursor stands behind the problems that took the places of others."""
    for steps in (1, 2):
        train(plan(tiny, tmp_path / "a", run.name, f"trainer.total_training_steps={steps}"), SILENT)
    assert logged(tmp_path / "a") == logged(run)


def test_greedy_responses_wait_with_the_experience_that_they_belong_to(tiny, tmp_path):
    """Sampled ahead, saved and restored, ReMax takes the steps of the undisturbed run, and its ledger closes."""
    of_run = plan(tiny, tmp_path, "remax")
    source, algorithm, ahead = prepare(of_run, SILENT), algorithm_of(of_run), paced(of_run, 4, 2)

    def take(state, until):
        reports = []
        while state.step < until:
            state, report, _ = advance(algorithm, state, source, w, ahead)
            reports.append({k: v for k, v in report.items() if not k.startswith(TIMED)})
        return state, reports

    with local_workers(of_run) as w:
        _, whole = take(initial_state(of_run, w), 4)
        stopped, _ = take(initial_state(of_run, w), 1)
        folder = Run(of_run, SILENT).save(stopped, w)
        restored = restore(folder, blank_state(of_run), of_run, w)
        assert [(len(one.drawn.samples), len(one.drawn.scored)) for one in restored.waiting] == [(2, 2)] * 2
        assert take(restored, 4)[1] == whole[1:]
    assert [report[ROWS_WAITING] for report in whole] == [24, 12, 12, 0]
    assert all(report["rollout/rows_dropped/baseline"] == 4 for report in whole)
