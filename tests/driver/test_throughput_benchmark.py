"""What the benchmarks beside other engines make of their numbers."""

import doctest

import pytest

from verl_fn.benchmarks import residency, throughput


@pytest.mark.parametrize("module", [residency, throughput], ids=lambda module: module.__name__)
def test_examples(module):
    assert doctest.testmod(module).failed == 0


def test_engines_of_another_backend_are_refused(capsys):
    with pytest.raises(SystemExit):
        throughput.main(["--backend", "fsdp", "--engines", "ours", "verl-fused"])
    assert "--backend fsdp has the engines ours, ours-deterministic, verl," in capsys.readouterr().err
