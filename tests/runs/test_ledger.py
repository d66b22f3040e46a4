"""The ledger of a step says who left out a row: the engine, the reward or the algorithm."""

import pytest
import torch

from verl_fn.algorithms import Experience, Workers
from verl_fn.backends.mock import MockRollout
from verl_fn.backends.weight_sync import Weights
from verl_fn.runs.recorder import draw
from verl_fn.runs.steps import rows_of
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.state.batch import concatenate

SAMPLING = Sampling(max_tokens=4)


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
    engine = MockRollout(lambda prompt: [7, 8, 2])
    engine.publish(0, Weights.of({}))
    w = Workers(
        trainers={}, rollout=engine, reward=lambda batch, problems: batch.take(torch.tensor(keeps)), tokenizer=None,
        sampling=SAMPLING,
    )  # fmt: skip
    report = rows_of(draw(lambda w: Experience(sample(w), count, {}), count, w), [], 0, w)
    rows = {name.rpartition("/")[2]: n for name, n in report.items() if name.startswith("rollout/rows_dropped/")}
    tokens = {name.rpartition("/")[2]: n for name, n in report.items() if name.startswith("rollout/tokens_dropped/")}
    assert rows == dropped and report["rollout/rows_asked"] == count
    assert report["rollout/rows_learned"] == count - sum(dropped.values())
    assert tokens == {name: 3 * n for name, n in dropped.items() if name != "engine"}
