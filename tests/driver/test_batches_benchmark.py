"""The benchmark of what ranks read of a batch, on a small one."""

import json

from verl_fn.benchmarks import batches


def test_a_rank_that_shares_memory_copies_nothing(ray_cluster, tmp_path):
    path = tmp_path / "batches.json"
    assert batches.main(["--rows", "64", "--length", "64", "--rounds", "1", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert results["shared"]["copied_mb"] == 0.0 < results["copied"]["copied_mb"]
