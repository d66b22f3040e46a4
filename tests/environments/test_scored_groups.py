"""Conversations of a problem that the environment scores together, once the last of them has ended."""

from pathlib import Path

import attrs
import pytest
import torch
from test_conversing import END, TOKENIZER, OneByOne, ids, user

from verl_fn.algorithms import Workers
from verl_fn.algorithms.experience import requests_of, without_failures
from verl_fn.backends.mock import MockRollout, Response
from verl_fn.backends.weight_sync import Weights
from verl_fn.data.tasks import Problem
from verl_fn.environments import Done
from verl_fn.environments.engine import Conversing, Limits
from verl_fn.environments.processes import EnvError, EnvProcesses, Failure, Job, Scores, Scoring
from verl_fn.environments.rendering import Renderer
from verl_fn.rewards import Reward, unscored
from verl_fn.runs.steps import counts_of, ledger
from verl_fn.state import Key, Sampling, pack, tree

FOLDER = Path(__file__).parent
PROBLEM = {"prompt": "2+3?", "answer": "5", "id": 0, "data_source": "s", "extra_info": {}}


def ranked(log, **options):
    return EnvProcesses("talkers.py:Ranked", 3.0, folder=FOLDER, arguments={"log": str(log)}, **options)


def jobs_of(replies, group=0, first=0):
    return tuple(Job(first + i, 10 + i, PROBLEM, (reply,), group) for i, reply in enumerate(replies))


def played(run, *groups):
    """Has the conversations of groups, and returns the jobs that score them."""
    jobs = [jobs_of(replies, number, 10 * number) for number, replies in enumerate(groups)]
    assert run.scores_groups
    every = [job for group in jobs for job in group]
    run([attrs.evolve(job, replies=()) for job in every])
    assert set(run(every)) == {Done(0.5, 0.0)}
    return [Scoring(7, group) for group in jobs]


def test_a_group_is_scored_in_one_process_and_its_instances_are_closed_then(tmp_path):
    log = tmp_path / "log"
    run = ranked(log, num_workers=2)
    groups = played(run, ("3", "1", "2"), ("5", "8"), ("4",))
    assert not log.exists(), "no instance is closed before its group was scored"
    assert run(groups) == [
        Scores((Done(0.2, 1.0), Done(0.0, 0.0), Done(0.1, 0.0))),
        Scores((Done(0.0, 0.0), Done(0.1, 1.0))),
        Scores((Done(0.0, 1.0),)),
    ]
    lines = log.read_text().splitlines()
    assert lines.count("closed") == 6
    pids = {line.split(" ", 1)[1].split("]")[0]: line.split()[0] for line in lines if line != "closed"}
    assert pids["[3, 1, 2"] == pids["[4"] != pids["[5, 8"]


def test_a_group_whose_process_has_ended_is_played_again_with_the_same_numbers(tmp_path):
    def scored(log, crash):
        run = ranked(log)
        (group,) = played(run, ("3", "1"))
        if crash:
            (failed,) = run([Job(5, 1, PROBLEM, ("crash",))])
            assert failed.reason == "env_crashed"
        result = run([group])
        return result, [line.split()[1:] for line in log.read_text().splitlines() if line != "closed"]

    whole, again = scored(tmp_path / "a", False), scored(tmp_path / "b", True)
    assert whole == again and whole[0] == [Scores((Done(0.1, 1.0), Done(0.0, 0.0)))]


@pytest.mark.parametrize(
    ("reply", "reason", "problem"),
    [
        ("666", "env_crashed", "raised KeyError: 'no judge'"),
        ("777", "env_crashed", "ended its process with exit code 3"),
        ("888", "env_timed_out", r"took longer than env.timeout (3 s)"),
        ("999", "env_crashed", "from score_group; it must return Done(reward) for each of the 2 conversations"),
    ],
)
def test_a_group_that_cannot_be_scored_fails_alone(tmp_path, reply, reason, problem):
    groups = played(run := ranked(tmp_path / "log"), ("1", reply), ("3", "2"))
    failed, scored = run(groups)
    assert failed.reason == reason and problem in failed.problem
    assert scored == Scores((Done(0.1, 1.0), Done(0.0, 0.0)))


def test_a_conversation_that_does_not_end_again_fails_its_group(tmp_path):
    run = ranked(tmp_path / "log")
    (result,) = run([Scoring(7, jobs_of(("1", "x")))])
    assert result.reason == "env_crashed" and "did not end a conversation again" in result.problem


def test_a_scorer_that_is_no_static_method_is_refused():
    with pytest.raises(EnvError, match="RanksItself has a score_group that is no @staticmethod"):
        EnvProcesses("talkers.py:RanksItself", folder=FOLDER)


class Ranking:
    """Environments that score groups: a conversation ends with its second reply unless that says otherwise."""

    scores_groups = True

    def __init__(self, scored=None):
        self.scored, self.calls = scored, []

    def __call__(self, jobs):
        return [self._scores(job) if isinstance(job, Scoring) else self._answer(job) for job in jobs]

    def _answer(self, job):
        if len(job.replies) < 2:
            return user(job.problem["prompt"] if not job.replies else "?")
        fails = {"d": Failure("env_crashed", "raised"), "e": Failure("env_timed_out", "took longer")}
        return fails.get(job.replies[-1], Done(9.0, 1.0))

    def _scores(self, scoring):
        self.calls.append([(job.number, job.group, job.replies[-1]) for job in scoring.jobs])
        return self.scored or Scores(tuple(Done(job.number / 10, 0.0) for job in scoring.jobs))


def talk(environment, last, kind=MockRollout, prompts=("ab", "ba")):
    """Two conversations of each problem; ``last`` has the second reply of each, by the place of the conversation."""
    places = {}

    def draw(turn):
        if len(turn.prompt) < 7:
            return [*ids("c"), END]
        # The keys of a conversation's replies tell conversations apart.
        said = last[places[turn.key.seed()]]
        return [*ids(said), END] if said else Response([*ids("cc")], finished=False)

    engine = kind(draw)
    engine.publish(3, Weights.of({}))
    conversing = Conversing(engine, environment, Renderer(TOKENIZER, [END]), TOKENIZER, [END], Limits(3, 8, 10))
    w = Workers({}, conversing, None, TOKENIZER, Sampling(40, n=2), converses=True)
    problems = [Problem(prompt, "", id=7 + i) for i, prompt in enumerate(prompts)]
    requests = requests_of(problems, w, w.sampling, Key.from_seed(0))
    for i, request in enumerate(requests):
        for number in range(2):
            # The engine folds in the number of its sample, 0, as well.
            key = request.key.fold_in(number).fold_in(1)
            places |= dict.fromkeys((key.seed(), key.fold_in(0).seed()), 2 * i + number)
    samples = conversing.generate(requests, version=3)
    return samples, Reward(unscored, TOKENIZER, [END])(pack(samples), problems)


@pytest.mark.parametrize("kind", [MockRollout, OneByOne])
def test_the_scores_of_a_group_replace_those_of_its_conversations(kind):
    environment = Ranking()
    samples, batch = talk(environment, "abcf", kind)
    assert sorted(environment.calls) == [[(0, 0, "a"), (1, 0, "b")], [(2, 1, "c"), (3, 1, "f")]]
    assert [(s.outcome.reason, s.outcome.score, s.outcome.acc) for s in samples] == [
        ("done", place / 10, 0.0) for place in range(4)
    ]
    assert torch.equal(batch["score"], torch.tensor([0.0, 0.1, 0.2, 0.3]))
    other = talk(Ranking(), "abcf", OneByOne if kind is MockRollout else MockRollout)[1]
    assert tree.equal(batch, other)


@pytest.mark.parametrize(
    ("last", "calls", "reasons"),
    [
        ("adbb", [[(0, 0, "a")], [(2, 1, "b"), (3, 1, "b")]], ["done", "env_crashed", "done", "done"]),
        (["e", "d", "b", ""], [[(2, 1, "b")]], ["env_timed_out", "env_crashed", "done", "length"]),
    ],
)
def test_members_that_failed_or_were_cut_off_are_not_scored_and_the_ledger_closes(last, calls, reasons):
    environment = Ranking()
    failed = sum(reason.startswith("env") for reason in reasons)
    with pytest.warns(UserWarning, match=f"{failed} of 4 conversations have failed, problem 7"):
        samples, batch = talk(environment, last)
    assert sorted(environment.calls) == calls and [s.outcome.reason for s in samples] == reasons
    scores = [place / 10 if reason == "done" else 0.0 for place, reason in enumerate(reasons)]
    assert [s.outcome.score for s in samples] == scores
    _closes(batch, failed)


@pytest.mark.parametrize("kind", [MockRollout, OneByOne])
def test_a_group_whose_scoring_fails_is_dropped_by_name(kind):
    class Judge(Ranking):
        def _scores(self, scoring):
            return Failure("env_timed_out", "took longer") if scoring.jobs[0].group else super()._scores(scoring)

    with pytest.warns(UserWarning, match=r"2 of 4 conv.*, problem 8 .* in scoring its group the environment took"):
        samples, batch = talk(Judge(), "abcf", kind)
    assert [s.outcome.reason for s in samples] == ["done", "done", "env_timed_out", "env_timed_out"]
    assert [s.outcome.score for s in samples] == [0.0, 0.1, 0.0, 0.0]
    _closes(batch, 2)
    with pytest.raises(EnvError, match="4 of 4 conversations have failed"):
        talk(Ranking(Failure("env_crashed", "raised")), "abcf", kind)


def _closes(batch, failed):
    learned = without_failures(batch)
    report = ledger([counts_of(batch)], learned, step=3, asked=4)
    dropped = {name: report[f"rollout/rows_dropped/{name}"] for name in ("env_timed_out", "env_crashed")}
    assert len(learned) == report["rollout/rows_learned"] == 4 - failed and sum(dropped.values()) == failed
    assert report["rollout/rows_dropped/engine"] == report["rollout/rows_dropped/algorithm"] == 0
