"""Sampling ahead of learning: versions, lags, the ledger, checkpoints, and the same run whatever happens.

In one process everything that is asked for is drawn at once. Over Ray it is drawn while the trainer learns, with the
same numbers: ``tests/driver/test_overlap.py``.
"""

import contextlib
import json
from pathlib import Path

import attrs
import pytest
import torch
from run_configs import paced, tiny_run

from verl_fn.algorithms import Experience
from verl_fn.config import ConfigError, evaluation_plan, load, make_plan
from verl_fn.driver.ranks import local_workers
from verl_fn.errors import ArgumentError
from verl_fn.runs import RunError
from verl_fn.runs.checkpoints import restore
from verl_fn.runs.evaluate import validate
from verl_fn.runs.folder import Run
from verl_fn.runs.journal import Recorded, digests, entry, keep_responses
from verl_fn.runs.logs import TIMED, read_journal, read_metrics
from verl_fn.runs.loop import Interrupted, train
from verl_fn.runs.prepare import prepare
from verl_fn.runs.recorder import Waiting
from verl_fn.runs.state import algorithm_of, blank_state, initial_state
from verl_fn.runs.steps import ROWS_WAITING, advance
from verl_fn.state import Outcome, pack, tree

SILENT = lambda line: None  # noqa: E731
GRPO = ["algorithm.name=grpo", "rollout.n=2", "algorithm.rollout_is=token"]


class Steps:
    """Steps of a run one by one, with the values that the loop would write to its logs."""

    def __init__(self, plan, w, source, state=None):
        self.plan, self.w, self.source, self.algorithm = plan, w, source, algorithm_of(plan)
        self.state = state or initial_state(plan, w)
        self.reports, self.entries, self.drawn = [], [], []

    def take(self, max_lag, until, steps=9, w=None, in_flight=False):
        while self.state.step < until:
            plan = paced(self.plan, steps, max_lag, in_flight)
            self.state, report, drawn = advance(self.algorithm, self.state, self.source, w or self.w, plan)
            self.reports.append({k: v for k, v in report.items() if not k.startswith(TIMED)})
            self.entries.append(entry(self.state, drawn, self.w, self.plan))
            self.drawn.append(drawn)
        return self

    def versions(self):
        batches = [drawn.experience.batch for drawn in self.drawn]
        return [b["versions"][b["response_mask"].bool()].unique().tolist() for b in batches]


@pytest.fixture(scope="module")
def parts(tiny, tmp_path_factory):
    plan = tiny_run(tiny, tmp_path_factory.mktemp("ahead"), *GRPO)
    source = prepare(plan, SILENT)
    with local_workers(plan) as w:
        yield plan, w, source


@pytest.fixture
def new(parts):
    return lambda state=None: Steps(*parts, state)


@pytest.mark.parametrize(
    ("max_lag", "versions"),
    [
        (0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (1, [0, 0, 1, 2, 3, 4, 5, 6, 7]),
        (2, [0, 0, 0, 2, 2, 4, 4, 6, 6]),
        (3, [0, 0, 0, 0, 3, 3, 3, 6, 6]),
    ],
)
def test_versions_depend_on_the_step_alone_and_lags_are_bounded(new, max_lag, versions):
    steps = new().take(max_lag, 9)
    assert steps.versions() == [[version] for version in versions]
    lags = [step - version for step, version in enumerate(versions)]
    assert [report["training/rollout_lag/max"] for report in steps.reports] == lags
    assert max(lags) == max_lag
    assert steps.state.waiting == ()


def test_with_updates_in_flight_every_step_publishes_and_asks_for_one_batch(parts, new, tmp_path):
    """A state that is saved in between continues with the batches that wait."""
    plan, w, _ = parts
    whole = new().take(2, 9, in_flight=True)
    assert whole.versions() == [[0], [0], [0], [1], [2], [3], [4], [5], [6]]
    assert [report[ROWS_WAITING] for report in whole.reports] == [32, 32, 32, 32, 32, 32, 32, 16, 0]
    assert {report["training/rollout_before_update"] for report in whole.reports} == {0.0}
    stopped = new().take(2, 4, in_flight=True)
    run = Run(attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, dir=str(tmp_path))), SILENT)
    state = restore(run.save(stopped.state, w), blank_state(plan), plan, w)
    again = new(state).take(2, 9, in_flight=True)
    assert again.entries == whole.entries[4:] and again.reports == whole.reports[4:]


def test_the_ledger_closes_at_every_step(new):
    """What was asked for was learned from, dropped for a reason, or waits."""
    steps, learned = new(), 0
    for until in range(1, 10):
        report = steps.take(2, until).reports[-1]
        dropped = report["rollout/rows_dropped/engine"] + report["rollout/rows_dropped/algorithm"]
        assert report["rollout/rows_asked"] == report["rollout/rows_learned"] + dropped == 16
        learned += report["rollout/rows_learned"]
        waiting = steps.state.waiting
        assert report[ROWS_WAITING] == 16 * len(waiting)
        assert learned + report[ROWS_WAITING] == 2 * (steps.state.cursor + sum(d.problems for d in waiting))
        assert report["rollout/tokens_learned"] == steps.drawn[-1].experience.batch["response_mask"].sum()
    ids = [i for d in steps.drawn for i in d.experience.batch["group"].unique().tolist()]
    assert sorted(ids) == list(range(72)), "each problem once"


def test_rows_that_are_dropped_have_a_reason(parts):
    """An engine that loses an answer, and an algorithm that learns from half of the rows."""
    plan, w, source = parts

    class Loses:
        def __init__(self, inner):
            self.inner = inner

        def generate(self, requests, *, version=None):
            return self.inner.generate(requests, version=version)[:-1]

        def __getattr__(self, name):
            return getattr(self.inner, name)

    steps = Steps(plan, w, source)
    whole = steps.algorithm

    def half(state, problems, w):
        experience = whole.sample(state, problems, w)
        return attrs.evolve(experience, batch=experience.batch.take(range(8)))

    steps.algorithm = attrs.evolve(whole, sample=half)
    report = steps.take(1, 1, w=attrs.evolve(w, rollout=Loses(w.rollout))).reports[0]
    counts = [report[f"rollout/rows_{name}"] for name in ("asked", "learned", "dropped/engine", "dropped/algorithm")]
    assert counts == [16, 8, 1, 7]
    assert report["rollout/tokens_dropped/algorithm"] > 0


def test_draws_depend_on_the_step_and_not_on_when_they_were_asked_for(parts):
    """Weights that never change draw the same tokens for a step, whatever the lag."""
    plan, _, source = parts
    frozen = attrs.evolve(plan.roles["actor"].optim, lr=0.0)
    still = attrs.evolve(plan, roles={"actor": attrs.evolve(plan.roles["actor"], optim=frozen)})
    with local_workers(still) as w:
        runs = [Steps(still, w, source).take(lag, 5, steps=5) for lag in (0, 3)]
    for ours, theirs in zip(*(run.drawn for run in runs), strict=True):
        batches = [one.experience.batch.without("versions", "version") for one in (ours, theirs)]
        assert tree.equal(*batches)


def test_an_algorithm_that_publishes_by_itself_changes_no_version(new):
    """It knows its weights by the number of its step, and the engine by the step that they are of."""
    steps = new()
    whole = steps.algorithm

    def publishes(state, problems, w):
        w.rollout.publish(state.step, w.trainers["actor"].weights(state.actor.params))
        assert w.rollout.version == state.step
        return whole.sample(state, problems, w)

    steps.algorithm = attrs.evolve(whole, sample=publishes)
    assert steps.take(2, 5).versions() == [[0], [0], [0], [2], [2]]


def test_problems_that_a_step_takes_after_it_has_seen_samples_are_refused(new):
    """The next step has been given its own by then."""
    for max_lag, expected in ((0, contextlib.nullcontext()), (1, pytest.raises(ArgumentError, match="max_lag=0"))):
        steps = new()

        def takes_more(state, problems, w, whole=steps.algorithm):
            experience = whole.sample(state, problems, w)
            assert len(w.more(3)) == 3
            return experience

        steps.algorithm = attrs.evolve(steps.algorithm, sample=takes_more)
        with expected:
            assert steps.take(max_lag, 1).state.cursor == 11


@pytest.mark.parametrize("max_lag", [1, 3])
def test_a_state_continues_with_the_experience_that_waits(parts, new, tmp_path, max_lag):
    """Saved after any step and restored, it takes the steps of the undisturbed run, bitwise."""
    plan, w, _ = parts
    whole = new().take(max_lag, 6)
    for at in (1, 2, 3, 5):
        stopped = new().take(max_lag, at)
        run = Run(attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, dir=str(tmp_path / str(at)))), SILENT)
        folder = run.save(stopped.state, w)
        state = restore(folder, blank_state(plan), plan, w)
        assert len(list(folder.glob("waiting_*.safetensors"))) == len(state.waiting) == len(stopped.state.waiting)
        again = new(state).take(max_lag, 6)
        assert again.reports == whole.reports[at:]
        assert again.entries == whole.entries[at:]
        assert [pack(d.samples[0]).tokens.tolist() for d in again.drawn] == [
            pack(d.samples[0]).tokens.tolist() for d in whole.drawn[at:]
        ]
    assert "waiting" not in (run.save(new().take(0, 1).state, w) / "checkpoint.json").read_text()


def test_a_damaged_file_of_waiting_experience_is_refused(parts, new, tmp_path):
    plan, w, _ = parts
    plan = attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, dir=str(tmp_path)))
    folder = Run(plan, SILENT).save(new().take(1, 2).state, w)
    file = folder / "waiting_0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"damaged: waiting_0.safetensors has"):
        restore(folder, blank_state(plan), plan, w)


def test_with_recorded_samples_the_learner_is_bitwise_the_same(parts, new):
    """Sampling ahead or at once, by an engine or from the journal: what is learned depends on the samples alone."""
    _, w, _ = parts
    whole, again = new().take(2, 6), new()
    for step, drawn in enumerate(whole.drawn, 1):
        again.take(0, step, w=attrs.evolve(w, rollout=Recorded([pack(call) for call in drawn.samples])))
    assert again.entries == whole.entries
    waits = lambda report: {k: v for k, v in report.items() if k != ROWS_WAITING}  # noqa: E731
    assert [waits(r) for r in again.reports] == [waits(r) for r in whole.reports]


def test_another_max_lag_begins_with_what_waits(new):
    """Nothing that waits is lost or drawn again; then the new bound holds."""
    for lags, versions in (((3, 0), [0, 0, 0, 0, 4, 5]), ((3, 1), [0, 0, 0, 0, 3, 4]), ((0, 2), [0, 1, 2, 2, 2, 4])):
        assert new().take(lags[0], 2).take(lags[1], 6).versions() == [[version] for version in versions]


def test_an_evaluation_has_the_weights_of_its_step_and_changes_nothing(parts, new):
    plan, w, source = parts
    held_out = source.held_out(8)
    synchronous, whole, evaluated = new().take(0, 1), new().take(2, 5), new()
    expected = validate(synchronous.state, held_out, w, plan)
    for until in range(1, 6):
        evaluated.take(2, until)
        report, _ = validate(evaluated.state, held_out, w, plan)
        assert w.rollout.version == until
        if until == 1:
            assert expected[0] == report
    assert evaluated.entries == whole.entries


def test_every_evaluation_draws_with_the_same_keys(parts, new):
    """Also at temperature 1 its answers differ only by the weights."""
    plan, w, source = parts
    hot = attrs.evolve(plan.rollout.val_kwargs, temperature=1.0, n=3)
    plan = attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, val_kwargs=hot))
    state = new().state
    later = attrs.evolve(state, algorithm=attrs.evolve(state.algorithm, step=3))
    first, again = (validate(one, source.held_out(8), w, plan) for one in (state, later))
    assert first == again and len(first[1]) == 24 and len({answer["response"] for answer in first[1]}) > 8


def test_all_that_waits_is_saved(parts, new, tmp_path):
    """Problems that were taken, problems that are answered, rows that were asked for, and rows that were left out."""
    plan, w, _ = parts
    state = new().take(1, 1).state
    drawn = state.waiting[0].drawn
    experience = attrs.evolve(
        drawn.experience, problems=5, report={"train/x": 0.5}, dropped={"odd": drawn.experience.batch.take([3, 1])}
    )
    # An algorithm of the user may ask for rewards twice and learn from the first rows as they are.
    scored = experience.batch, experience.batch.take([2])
    odd = Waiting(11, 47, attrs.evolve(drawn, experience=experience, problems=11, asked=47, scored=scored))
    run = Run(attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, dir=str(tmp_path))), SILENT)
    (read,) = restore(run.save(attrs.evolve(state, waiting=(odd,)), w), blank_state(plan), plan, w).waiting
    assert (read.problems, read.drawn.experience.problems, read.asked) == (11, 5, 47)
    assert read.drawn.experience.report == {"train/x": 0.5}
    assert digests(read.drawn.experience.dropped["odd"]) == digests(experience.dropped["odd"])
    assert digests(read.drawn.experience.batch) == digests(experience.batch)
    assert [*map(digests, read.drawn.scored)] == [*map(digests, scored)]


def test_responses_are_kept_of_a_step_that_asks_the_reward_twice(parts, new, tmp_path):
    """It is not known then which samples the rows of a call were."""
    plan, w, _ = parts
    drawn = new().take(1, 1).state.waiting[0].drawn
    twice = attrs.evolve(drawn, scored=drawn.scored * 2, judged=drawn.judged * 2)
    run = Run(attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, dir=str(tmp_path))), SILENT)
    keep_responses(run, tmp_path / "1.jsonl", 1, twice, w)
    assert len((tmp_path / "1.jsonl").read_text().splitlines()) == 2 * len(drawn.scored[0])
    # An error names the folder that they go to, and not the run's.
    with pytest.raises(RunError, match=r"the responses of step 1 cannot be written to /proc/self/texts: "):
        keep_responses(run, Path("/proc/self/texts/1.jsonl"), 1, twice, w)


def test_responses_of_each_call_have_the_messages_of_its_own_conversations(parts, new, tmp_path):
    plan, w, _ = parts
    drawn = new().take(1, 1).state.waiting[0].drawn
    (samples,), said = map(w.get, drawn.samples), []
    for call in ("first", "second"):
        ends = [Outcome(0, "done", 1.0, 1.0, 1, messages=json.dumps([call, i])) for i in range(len(samples))]
        said.append([attrs.evolve(sample, outcome=end) for sample, end in zip(samples, ends, strict=True)])
    twice = attrs.evolve(drawn, samples=tuple(said), scored=drawn.scored * 2, judged=drawn.judged * 2)
    keep_responses(Run(plan, SILENT), tmp_path / "1.jsonl", 1, twice, w)
    kept = [json.loads(line)["messages"] for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert kept == [[call, i] for call in ("first", "second") for i in range(len(samples))]


def test_what_an_algorithm_asks_beside_the_problems_is_not_among_the_responses(parts, new, tmp_path):
    plan, w, _ = parts
    drawn = new().take(1, 1).state.waiting[0].drawn
    samples = w.get(drawn.samples[0])
    other = [attrs.evolve(sample, request=99) for sample in samples]
    calls, judged = (other, other + samples), drawn.judged * 2
    unscored = attrs.evolve(drawn, samples=calls, scored=(), judged=judged)
    keep_responses(Run(plan, SILENT), tmp_path / "1.jsonl", 1, unscored, w)
    kept = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert [row["problem"] for row in kept] == [sample.request for sample in samples]


def test_experience_that_cannot_be_saved_is_refused(parts, new, tmp_path):
    plan, w, _ = parts
    state = new().take(1, 1).state
    waiting = state.waiting[0]
    odd = attrs.evolve(waiting, drawn=attrs.evolve(waiting.drawn, experience=Experience({"rows": torch.ones(1)}, 8)))
    run = Run(attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, dir=str(tmp_path))), SILENT)
    with pytest.raises(RunError, match=r"a dict cannot be: .*driver.max_lag=0"):
        run.save(attrs.evolve(state, waiting=(odd,)), w)


@pytest.fixture(scope="module")
def ahead(tiny):
    """Makes the plan of a whole run that samples ahead in one process, which a config cannot ask for."""

    def plan(folder, *more, max_lag=2):
        settings = ["trainer.total_training_steps=5", "trainer.journal=samples", "trainer.save_freq=-1", *more]
        plan = tiny_run(tiny, folder, *GRPO, *settings)
        return attrs.evolve(plan, driver=attrs.evolve(plan.driver, max_lag=max_lag))

    return plan


def logged(folder):
    rows = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(folder)]
    files = {p.name: p.read_bytes() for p in (folder / "samples").iterdir()}
    return rows, read_journal(folder), files


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(ahead, tmp_path, monkeypatch, at):
    """Its evaluation in the middle of a round included."""
    train(ahead(tmp_path / "whole"), SILENT)
    lines = []

    class Signals:
        def __bool__(self):
            return read_metrics(tmp_path / "stopped")[-1]["step"] == at

    with monkeypatch.context() as patch:
        patch.setattr("verl_fn.runs.loop.stop_requests", lambda say: contextlib.nullcontext(Signals()))
        with pytest.raises(Interrupted, match=f"stopped after step {at}"):
            train(ahead(tmp_path / "stopped"), SILENT)
    train(ahead(tmp_path / "stopped"), lines.append)
    waits = {1: "2 batches", 2: "1 batch", 3: "2 batches"}[at]
    assert f"{waits} of samples wait to be learned from" in lines
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")


@pytest.mark.parametrize(("level", "noted"), [("", True), ("token", False), ("off", False)])
def test_waiting_samples_that_nothing_corrects_any_more_are_noted(ahead, tmp_path, level, noted):
    goal = ["trainer.stop_metric=reward", "trainer.test_freq=1", "trainer.val_before_train=false"]
    goal.append(f"algorithm.rollout_is={level}")
    train(ahead(tmp_path, *goal, "trainer.stop_at=-9"), SILENT)
    train(ahead(tmp_path, *goal, "trainer.stop_at=9", max_lag=0), (lines := []).append)
    assert any("samples wait" in line for line in lines)
    assert any("older weights drew them" in line for line in lines) == noted


def test_a_run_that_reached_its_goal_keeps_what_waits(ahead, tmp_path):
    """A higher goal continues it as the undisturbed run."""
    goal = ["trainer.stop_metric=reward", "trainer.test_freq=1", "trainer.val_before_train=false"]
    train(ahead(tmp_path / "whole", *goal, "trainer.stop_at=9"), SILENT)
    train(ahead(tmp_path / "a", *goal, "trainer.stop_at=-9"), SILENT)
    assert read_metrics(tmp_path / "a")[-1]["step"] == 1
    train(ahead(tmp_path / "a", *goal, "trainer.stop_at=9"), SILENT)
    assert logged(tmp_path / "a") == logged(tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=sft"], r"driver.max_lag = 1 .* sft samples nothing; leave it at 0"),
        (
            ["driver.max_lag=0", "rollout.in_flight_weight_updates=true"],
            r"rollout.in_flight_weight_updates .* driver.max_lag = 0 they do not; set driver.max_lag=1 or more",
        ),
        (["driver.kind=local"], r"one process for both; set driver.kind=ray rollout.placement=apart, or"),
        (
            ["rollout.in_flight_weight_updates=true", "actor.strategy=megatron", "actor.router_replay.mode=R3"],
            r"set rollout.in_flight_weight_updates=false or actor.router_replay.mode=R2",
        ),
        (["driver.kind=ray"], r"rollout.placement = colocated .*; set rollout.placement=apart, or driver.max_lag=0"),
    ],
)
def test_settings_that_cannot_sample_ahead_are_refused(overrides, message):
    cfg = load(overrides=["model.path=m", "driver.max_lag=1", *overrides])
    with pytest.raises(ConfigError, match=message):
        make_plan(cfg)
    assert evaluation_plan(cfg).driver.max_lag == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_dapo_samples_ahead_only_without_dynamic_sampling(lag):
    apart = ["model.path=m", "driver.kind=ray", "rollout.placement=apart", f"driver.max_lag={lag}"]
    dapo = [*apart, "algorithm.name=dapo", "rollout.n=2"]
    assert make_plan(load(overrides=[*dapo, "algorithm.filter_groups.enable=false"])).driver.max_lag == lag
    allowed = pytest.raises(ConfigError, match=r"set algorithm.filter_groups.enable=false, or driver.max_lag=0")
    with allowed if lag else contextlib.nullcontext():
        make_plan(load(overrides=dapo))


def test_correction_is_on_where_sampling_runs_ahead():
    apart = ["model.path=m", "driver.kind=ray", "rollout.placement=apart"]
    for more, level in (([], None), (["driver.max_lag=1"], "token")):
        assert make_plan(load(overrides=[*apart, *more])).options.rollout_is == level
    for level in ("off", "sequence"):
        chosen = ["driver.max_lag=1", f"algorithm.rollout_is={level}"]
        assert make_plan(load(overrides=[*apart, *chosen])).options.rollout_is == level
