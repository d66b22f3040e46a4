"""Saves that end later: a thread writes while the state is updated."""

import os
import threading

import pytest
import torch
from rank_cases import KEY, optimizer
from safetensors.torch import load_file

from verl_fn.backends import tensor_file
from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock
from verl_fn.state import tree
from verl_fn.steps import ppo_clip
from verl_fn.testing import tiny_batch


@pytest.fixture(params=["local", "mock"])
def backend(request, tmp_path):
    if request.param == "mock":
        return Mock(8, optimizer(), max_tokens=24)
    return Local(new_model(tmp_path / "model", chars="abcd", hidden_size=16), optimizer(), max_tokens=24)


def grown(backend, state):
    """The state after an update. The update reuses the memory of the given state."""
    return backend.apply_update(state, backend.forward_backward(state, tiny_batch(), ppo_clip())[0])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Gate:
    """Lets threads write only when it is opened."""

    def __init__(self, monkeypatch):
        self.opened, self.waits = threading.Event(), threading.Event()
        inner = tensor_file.fill

        def fill(*args):
            if threading.current_thread() is not threading.main_thread():
                self.waits.set()
                self.opened.wait()
            inner(*args)

        monkeypatch.setattr(tensor_file, "fill", fill)


def test_the_state_may_be_updated_before_anything_is_written(backend, tmp_path, monkeypatch):
    state = grown(backend, backend.init(KEY))[0]
    backend.save(state, tmp_path / "now")
    gate = Gate(monkeypatch)
    backend.save(state, tmp_path / "later", later=True)
    assert gate.waits.wait(60)
    # The update copies nothing: nobody holds the state.
    _, metrics = grown(backend, state)
    assert metrics["perf/residency_copies"].value == 0
    with pytest.raises((OSError, CheckpointError)):
        backend.restore(tmp_path / "later")
    gate.opened.set()
    backend.saved()
    assert contents(tmp_path / "later") == contents(tmp_path / "now") and (tmp_path / "later").is_dir()
    assert not [thread for thread in threading.enumerate() if "save" in thread.name]
    backend.saved()  # nothing is left to wait for


def test_the_next_save_waits_for_the_one_before(backend, tmp_path):
    first = backend.init(KEY)
    digest = tree.digest(first)
    backend.save(first, tmp_path / "first", later=True)
    second = grown(backend, first)[0]
    backend.save(second, tmp_path / "second")
    assert tree.digest(backend.restore(tmp_path / "first")) == digest
    assert tree.equal(backend.restore(tmp_path / "second"), second)


def test_a_write_that_fails_in_the_thread_is_told_and_costs_only_that_save(backend, tmp_path, monkeypatch):
    state = backend.init(KEY)
    backend.save(state, tmp_path / "a")
    before = contents(tmp_path / "a")

    def full(*args):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        backend.save(grown(backend, state)[0], tmp_path / "a", later=True)
        with pytest.raises(OSError, match="No space left"):
            backend.saved()
    assert contents(tmp_path / "a") == before and not (tmp_path / "a" / ".writing").exists()
    backend.saved()
    again = backend.restore(tmp_path / "a")
    backend.save(again, tmp_path / "a", later=True)
    backend.saved()
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize("later", [False, True])
def test_zeros_are_neither_copied_nor_written_and_their_sign_is_kept(tmp_path, later):
    zeros, negative, mixed = torch.zeros(2**21), torch.full((2**21,), -0.0), torch.zeros(2**21)
    mixed[-1] = 1.0
    parts = {"zeros": zeros, "negative": negative, "mixed": mixed, "none": torch.zeros(0), "half": zeros.bfloat16()}
    spans = {name: tensor_file.Span.whole(t) for name, t in parts.items()}
    if later:
        spans = {name: span.on_cpu() for name, span in spans.items()}
        held = {name: span.elements.untyped_storage().nbytes() for name, span in spans.items()}
        assert held == {"zeros": 4, "negative": 2**23, "mixed": 2**23, "none": 4, "half": 2}
    file = tmp_path / "a.safetensors"
    tensor_file.start(file, spans)
    tensor_file.fill(file, spans)
    read = load_file(file)
    assert all(torch.equal(read[name].view(torch.uint8), t.view(torch.uint8)) for name, t in parts.items())
    # Of 28 MiB: 8 of the negative zeros, and the block of 4 that ends with a one.
    assert file.stat().st_blocks * 512 <= 13 * 2**20 < file.stat().st_size
