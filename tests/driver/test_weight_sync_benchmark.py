"""The benchmark of publication, on a tiny model."""

import json

import pytest

from verl_fn.benchmarks import weight_sync


@pytest.mark.parametrize(("ranks", "placement"), [(1, "colocated"), (2, "colocated"), (2, "apart")])
def test_it_measures_and_writes(ray_cluster, tmp_path, ranks, placement):
    path = tmp_path / "weight_sync.json"
    options = ["--shapes", "tiny", "--rounds", "2", "--dtype", "bfloat16", "--engine", "sampler", "--json", str(path)]
    options += ["--ranks", str(ranks), "--placements", placement]
    assert weight_sync.main(["--device", "cpu", *options]) == 0
    result = json.loads(path.read_text())["results"][f"tiny {placement}"]
    assert result["bytes"] > 2 * 64 * 64 and result["allowed"] > weight_sync.SECONDS
    assert [len(seconds) for seconds in result["seconds"].values()] == [2, 2 if placement == "colocated" else 1]


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_no_ranks_are_refused(ranks, capsys):
    with pytest.raises(SystemExit):
        weight_sync.main(["--ranks", ranks])
    assert f"argument --ranks: it must be a whole number from 1 on, not {ranks}" in capsys.readouterr().err


def test_bytes_are_sent_between_two_processes():
    assert weight_sync.sent_seconds(1000, "cpu") > 0
