"""Ranks of the first step's benchmark end together, whatever they print."""

import os
import sys

import pytest

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
