"""The first step's benchmark: its ranks end together, and nothing that is wrong counts as held."""

import math
import os
import sys

import pytest
import torch

from verl_fn.benchmarks.first_step_errors import compare_tensors
from verl_fn.benchmarks.first_step_layout import Layout
from verl_fn.benchmarks.together import run_together

FAILS = """
import os, sys, time
if os.environ["RANK"] == "0":
    open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit("broken on purpose")
"""
TALKS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("x" * 2**20)
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def run(code, path):
    run_together([sys.executable, "-S", "-c", code, str(path)], 2, "layout")


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path):
    with pytest.raises(RuntimeError, match=r"layout: rank 1 failed with status 1\nbroken on purpose"):
        run(FAILS, tmp_path / "pid")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_rank_that_prints_much_lets_none_wait(tmp_path):
    run(TALKS, tmp_path / "done")
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("kind", ["gradient", "update", "from_reference"])
def test_tensors_that_are_not_finite_miss_every_bar(kind):
    wanted = {f"{name}.w": torch.ones(4) for name in ("gradient", "update", "from_reference")}
    spoilt = {**wanted, f"{kind}.w": torch.tensor([math.nan, 1.0, 1.0, 1.0])}
    errors = compare_tensors(spoilt, wanted, {"w": torch.ones(4)}, "cpu")
    assert not errors["update_from_reference" if kind == "from_reference" else kind] < math.inf


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("fspd:2", "there is no backend 'fspd'"),
        ("fsdp:x", "'x' is neither a number of ranks nor bf16 nor key=value"),
        ("fsdp:0", "it must have at least one rank"),
        ("megatron:tp=x", "tp is 'x'; it must be a number from 1"),
        ("fsdp:2,lora=0", "lora is '0'; it must be a number from 1"),
        ("megatron:tp=2,foo=1", "megatron takes no option 'foo'"),
        ("local:head=value", "local takes no option 'head'"),
        ("local:2", "local has one rank, and fsdp:2 has two"),
    ],
)
def test_layouts_that_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(layout)
