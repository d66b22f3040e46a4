"""What the benchmarks beside other engines make of their numbers."""

import doctest
import importlib.machinery
import sys
import types

import pytest
import torch

from verl_fn.benchmarks import residency, throughput


@pytest.mark.parametrize("module", [residency, throughput], ids=lambda module: module.__name__)
def test_examples(module):
    assert doctest.testmod(module).failed == 0


def test_engines_of_another_backend_are_refused(capsys):
    with pytest.raises(SystemExit):
        throughput.main(["--backend", "fsdp", "--engines", "ours", "verl-fused"])
    assert "--backend fsdp has the engines ours, ours-deterministic, verl," in capsys.readouterr().err


@pytest.mark.parametrize("held", [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_one_missed_bar_of_any_shape_and_peer_is_the_status(held, monkeypatch, capsys):
    """Beside another engine of ours there is no bar."""
    speed = {"tokens_a_second": 9, "mfu": 0.5, "peak_gib": 1.0, "median": 1.0}
    engine = {"update": speed, "logprobs": speed, "first_grad_norm": 1.0, "memory": 1.0, "grad_norm": 0.0}
    engines = ["ours", "ours-deterministic", "verl", "verl-fused"]
    bars = iter([0, *held[:2], 0, *held[2:]])
    verl = types.ModuleType("verl")
    verl.__spec__ = importlib.machinery.ModuleSpec("verl", None)
    monkeypatch.setitem(sys.modules, "verl", verl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(throughput, "measured", lambda args, shape: None)
    monkeypatch.setattr(throughput, "summary", lambda *_: dict.fromkeys(engines, engine))
    monkeypatch.setattr(throughput, "beside", lambda *_: engine | {"held": bool(next(bars))})
    given = ["--backend", "megatron", "--device", "cuda", "--shapes", "0.5b", "1.5b", "--engines", *engines]
    assert throughput.main(given) == (0 if all(held) else 1)
    assert capsys.readouterr().out.count("MISSED") == held.count(0)
