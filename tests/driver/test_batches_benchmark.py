"""The benchmark of what ranks read of a batch, on a small one."""

import json

import pytest

from verl_fn.benchmarks import batches


def test_a_rank_that_shares_memory_copies_nothing(ray_cluster, tmp_path):
    path = tmp_path / "batches.json"
    assert batches.main(["--rows", "64", "--length", "64", "--rounds", "1", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert results["shared"]["copied_mb"] == 0.0 < results["copied"]["copied_mb"]


def test_the_memory_of_the_driver_is_measured(ray_cluster, tmp_path):
    path = tmp_path / "driver.json"
    assert batches.main(["--driver", "--rows", "32", "--n", "4", "--length", "256", "--json", str(path)]) == 0
    driver = json.loads(path.read_text())["results"]["driver"]
    # Tokens and positions of 8 bytes each, and eight fields of 4.
    assert driver["batch_mb"] == pytest.approx(32 * 4 * 256 * 48 / 1e6, rel=0.01) and driver["peak_mb"] > 0
