"""Strict surroundings for every test, and the tiny models that many share."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests make calls fail on purpose.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
# Tiny models only lose time to a second thread, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.use_deterministic_algorithms(True)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A Qwen3 folder of 0.02 M parameters with the alphabet of ``reverse``."""
    from verl_fn.backends.hf.new_model import new_model

    return new_model(tmp_path_factory.mktemp("tiny"), chars="abcdefgh>", hidden_size=32)
