"""The benchmark of publication, on a tiny model."""

import json

from verl_fn.benchmarks import publish


def test_it_measures_and_writes(ray_cluster, tmp_path):
    path = tmp_path / "publish.json"
    options = ["--device", "cpu", "--shapes", "tiny", "--rounds", "2", "--dtype", "float32", "--json", str(path)]
    assert publish.main(options) == 0
    result = json.loads(path.read_text())["results"]["tiny"]
    assert result["bytes"] > 4 * 64 * 64 and result["allowed"] > publish.SECONDS
    assert [len(seconds) for seconds in result["seconds"].values()] == [2, 2]
