"""Settings of torch inside a step do not depend on the caller, who finds his own again afterwards."""

import contextlib
import threading

import pytest
import torch

from verl_fn.state import Batch, SharedSetting, isolated, read_only
from verl_fn.state.guards import one_thread


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


def settings():
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device().type,
    }


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_settings_are_the_same_inside_and_restored_outside(name, gradients):
    with SURROUNDINGS[name]():
        before = settings()
        with isolated(gradients=gradients):
            inside = settings()
            made = torch.zeros(2)
        assert settings() == before
    assert inside == {
        "autocast": False, "gradients": gradients, "inference": False, "dtype": torch.float32, "device": "cpu",
    }  # fmt: skip
    assert (made.dtype, made.device.type, made.is_inference()) == (torch.float32, "cpu", False)


def test_settings_are_restored_after_an_error():
    with default_dtype(torch.float64), torch.inference_mode():
        before = settings()
        with pytest.raises(ZeroDivisionError), isolated():
            raise ZeroDivisionError
        assert settings() == before


def test_transformations_keep_their_own_mode():
    def square(x):
        with isolated(gradients=None):
            return x.square().sum()

    with torch.no_grad():
        assert torch.func.grad(square)(torch.tensor([3.0])).tolist() == [6.0]


def test_a_setting_of_the_process_lasts_until_the_last_of_several_threads_ends():
    """The first one to end would otherwise restore the caller's value while the other still computes."""
    value = ["theirs"]
    setting = SharedSetting(lambda: value[0], lambda new: value.__setitem__(0, new))
    began, ended, seen = threading.Event(), threading.Event(), []

    def other():
        with setting.set_to("ours"):
            began.set()
            assert ended.wait(30)
            seen.append(value[0])

    thread = threading.Thread(target=other)
    with setting.set_to("ours"):
        thread.start()
        assert began.wait(30)
    ended.set()
    thread.join(30)
    assert seen == ["ours"] and value == ["theirs"]


def test_the_number_of_threads_is_restored_also_after_an_error():
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with contextlib.suppress(ZeroDivisionError), one_thread():
                assert torch.get_num_threads() == 1
                1 / 0  # noqa: B018
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_every_field_of_a_batch_is_read_only():
    """Ragged ones are seen by their versions; all others also if a write counts none, as through numpy."""
    wide = torch.zeros(3, 4)
    batch = Batch.from_rows([[1, 2], [3]]).with_tokens(x=wide[:, ::2], half=wide[:, 0].bfloat16()).with_rows(y=[1, 2])
    batch = batch.with_ragged(images=[[0.5], []])
    more = torch.zeros(2)
    writes = {
        name: lambda name=name: batch[name].add_(1) for name in ("tokens", "positions", "x", "half", "y", "images")
    }
    writes |= {"cu_seqlens": lambda: batch.cu_seqlens.data.add_(1), "more": lambda: more.numpy().fill(1.0)}
    writes |= {"x ": lambda: wide.numpy().fill(3.0), "half ": lambda: batch["half"].data.fill_(2.0)}
    for name, write in writes.items():
        refused = pytest.raises(ValueError, match=f"^mine writes into {name.strip()} in place")
        with refused, read_only("mine", ValueError, batch, more=more):
            write()
    with read_only("mine", ValueError, batch, more=more):
        assert batch["images"].sum() > 0
