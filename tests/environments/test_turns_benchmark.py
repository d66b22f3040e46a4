"""The benchmark of conversations, on a tiny model."""

import json

import pytest

from verl_fn.benchmarks import turns


@pytest.mark.parametrize("shortest", [0, 2])
def test_it_measures_and_writes(tmp_path, shortest):
    path = tmp_path / "turns.json"
    options = ["--engine", "sampler", "--shape", "tiny", "--conversations", "3", "--turns", "2", "--reply", "6"]
    rest = ["--rounds", "1", "--shortest", str(shortest), "--json", str(path)]
    assert turns.main(["--device", "cpu", *options, *rest]) == 0
    result = json.loads(path.read_text())
    assert 6 <= result["tokens"] <= 36 and result["bar"] == (None if shortest else turns.BAR)
    assert [len(rates) for rates in result["tokens_a_second"].values()] == [1, 1, 1]
