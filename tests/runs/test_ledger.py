"""The ledger of a step says who left out a row: the engine, the reward or the algorithm."""

import json

import pytest
import torch

from verl_fn.algorithms import Experience, Workers
from verl_fn.backends.mock import MockRollout
from verl_fn.backends.weight_sync import Weights
from verl_fn.runs.recorder import Drawn, Waiting, ask, read_waiting, save_waiting, tensors_of
from verl_fn.runs.steps import rows_of
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.state.batch import concatenate

SAMPLING = Sampling(max_tokens=4)


def mock():
    engine = MockRollout(lambda prompt: [7, 8, 2])
    engine.publish(0, Weights.of({}))
    return engine


def asked(w, *prompts, key=0):
    return pack(w.rollout.generate(requests_for(prompts, SAMPLING, Key.from_seed(key)), version=0))


def all_learned(w):
    return w.reward(asked(w, [5], [6], [5]), [])


def one_call_scored(w):
    return concatenate([asked(w, [5], [6], [5]), w.reward(asked(w, [9], key=1), [])])


def one_left_out(w):
    return all_learned(w).take(torch.tensor([0, 2]))


def streamed(w):
    several = Sampling(max_tokens=4, n=2)
    samples = w.rollout.stream(requests_for([[5], [6]], several, Key.from_seed(0)), version=0)
    return w.reward(pack(list(samples)), [])


@pytest.mark.parametrize(
    ("sample", "keeps", "count", "dropped"),
    [
        (all_learned, [0, 1, 2], 3, {"engine": 0, "algorithm": 0}),
        (all_learned, [0], 3, {"engine": 0, "algorithm": 0, "reward": 2}),
        (one_left_out, [0, 1, 2], 3, {"engine": 0, "algorithm": 1}),
        (one_call_scored, [0], 4, {"engine": 0, "algorithm": 0}),
        (streamed, [0, 1, 2, 3], 4, {"engine": 0, "algorithm": 0}),
    ],
    ids=["all", "reward", "algorithm", "one call scored", "a stream"],
)
def test_who_left_out_rows(sample, keeps, count, dropped):
    w = Workers(
        trainers={}, rollout=mock(), reward=lambda batch, problems: batch.take(torch.tensor(keeps)), tokenizer=None,
        sampling=SAMPLING,
    )  # fmt: skip
    report = rows_of(ask(lambda w: Experience(sample(w), count, {}), range(count), w, ahead=False).drawn, [], 0, w)
    rows = {name.rpartition("/")[2]: n for name, n in report.items() if name.startswith("rollout/rows_dropped/")}
    tokens = {name.rpartition("/")[2]: n for name, n in report.items() if name.startswith("rollout/tokens_dropped/")}
    assert rows == dropped and report["rollout/rows_asked"] == count
    assert report["rollout/rows_learned"] == count - sum(dropped.values())
    assert tokens == {name: 3 * n for name, n in dropped.items() if name != "engine"}


def test_what_waits_is_read_as_it_was_written(tmp_path):
    """Several calls of engine and reward, rows that were left out by reason, and fields of all kinds."""
    several = Sampling(max_tokens=4, n=2)
    calls = [[sample] for sample in ([5], [6])]
    first, second = (
        mock().generate(requests_for(prompts, several, Key.from_seed(i)), version=0)
        for i, prompts in enumerate(calls)
    )
    scored = [pack(samples).with_rows(score=[0.5, float(i)]) for i, samples in enumerate((first, second))]
    rest = scored[1].take([1])
    ragged = scored[0].with_ragged(images=[[[0.25, 0.5]], []])
    experience = Experience(ragged, 3, {}, report={"kept": 0.5}, dropped={"short": rest, "long": scored[0]})
    several_calls = Drawn(experience, 2, 4, (first, second), tuple(scored))
    alone = Drawn(Experience(scored[0], 1, {}), 1, 2, (first,), (scored[0],))
    unscored = Drawn(Experience(scored[0], 1, {}), 1, 2, (first,), ())
    w = Workers(trainers={}, rollout=mock(), reward=None, tokenizer=None, sampling=several)
    drawn = several_calls, alone, unscored
    records = save_waiting([Waiting(one.problems, one.asked, one) for one in drawn], tmp_path, w)
    assert [record["file"] for record in records] == [f"waiting_{i}.safetensors" for i in range(3)]
    for waiting, one in zip(read_waiting(json.loads(json.dumps(records)), tmp_path), drawn, strict=True):
        found = waiting.drawn
        assert (waiting.problems, waiting.asked) == (found.problems, found.asked) == (one.problems, one.asked)
        assert found.experience.problems == one.experience.problems
        assert found.experience.report == one.experience.report
        assert list(found.experience.dropped) == list(one.experience.dropped)
        pairs = [(found.experience.batch, one.experience.batch)]
        pairs += zip(found.experience.dropped.values(), one.experience.dropped.values(), strict=True)
        pairs += zip(found.scored, one.scored, strict=True)
        pairs += zip(map(pack, found.samples), map(pack, one.samples), strict=True)
        for got, expected in pairs:
            assert tensors_of(got).keys() == tensors_of(expected).keys()
            assert all(torch.equal(t, tensors_of(expected)[name]) for name, t in tensors_of(got).items())
