"""Runs that end out of memory name the phase, the bytes of each part, and the setting to lower."""

import pickle
import threading

import pytest
import torch
from run_configs import TINY, tiny_run

from verl_fn.backends.local import Local
from verl_fn.backends.memory import (
    RUNNING,
    OutOfMemory,
    PhaseOutOfMemory,
    fits,
    in_phase,
    lacks_memory,
    reason_of,
)
from verl_fn.backends.sampler import Sampler
from verl_fn.cli import main
from verl_fn.runs.loop import train
from verl_fn.runs.memory import GIB, Phase, RunOutOfMemory, explain, explained, phases
from verl_fn.state import Batch

TORCH = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")
CUMEM = RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
NCCL = RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'")
CACHE = ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
# What fails, at which call, with which error, and what the message must hold.
FAILURES = {
    "update_weights": (Sampler, "publish", CUMEM, "publication"),
    "gen": (Sampler, "generate", RuntimeError("CUDA error: out of memory"), "generation"),
    "old_log_prob": (Local, "forward", TORCH, "log-probs"),
    "update_actor": (Local, "apply_update", TORCH, "update of the actor"),
}


@pytest.mark.parametrize("phase", FAILURES)
def test_each_phase_is_named_with_its_bytes(phase, tiny, tmp_path, monkeypatch):
    cls, method, error, title = FAILURES[phase]
    plan = tiny_run(tiny, tmp_path / "run", "algorithm.name=grpo", "rollout.n=2", "trainer.val_before_train=false")

    def fail(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(cls, method, fail)
    with pytest.raises(RunOutOfMemory) as raised:
        train(plan, lambda line: None)
    first, second, third = str(raised.value).splitlines()
    assert first == f"out of memory in {phase} ({title}): {error.args[0].splitlines()[0]}"
    described = next(p for p in phases(plan) if p.name == phase).describe()
    assert second == f"By the plan, a GPU holds there: {described}"
    lower = {"gen": "lower rollout.slots (64 now)", "update_actor": "ppo_max_token_len_per_gpu (16,384 now)"}
    assert lower.get(phase, "") in third and third.endswith("The same command continues from the last checkpoint")


@pytest.mark.parametrize(
    ("cls", "method", "phase"), [(Sampler, "publish", "update_weights"), (Sampler, "generate", "gen")]
)
def test_an_evaluation_names_its_phase(cls, method, phase, tiny, tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        raise CUMEM

    monkeypatch.setattr(cls, method, fail)
    with pytest.raises(RunOutOfMemory, match=f"out of memory in {phase} "):
        train(tiny_run(tiny, tmp_path / "run"), lambda line: None)


def test_a_micro_batch_keeps_its_own_message_on_the_command_line(tiny, tmp_path, monkeypatch, capsys):
    from verl_fn.backends import local

    def fail(*args, **kwargs):
        raise TORCH

    monkeypatch.setattr(local, "total_loss", fail)
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    more = ["trainer.val_before_train=false", f"model.path={tiny}", f"trainer.dir={tmp_path}/run"]
    assert main(["train", str(recipe), *TINY, *more]) == 1
    err = capsys.readouterr().err
    assert "error: out of memory in update_critic (update of the critic): micro-batch 1 of 1, with" in err
    assert "critic gradients" in err and "activations of" in err and "Traceback" not in err


@pytest.mark.parametrize("error", [TORCH, CUMEM, NCCL, CACHE, torch.OutOfMemoryError("")], ids=repr)
def test_what_counts_as_a_lack_of_memory(error):
    assert lacks_memory(error)
    with pytest.raises(PhaseOutOfMemory) as raised, in_phase("gen"), in_phase("inner"):
        raise error
    assert raised.value.phase == "inner" and isinstance(raised.value, OutOfMemory)


def test_a_micro_batch_names_its_share_of_the_budget():
    batch, error = Batch.from_rows([[1, 2], [3]]), torch.OutOfMemoryError("CUDA out of memory.\nSecond line")
    here = "micro-batch 2 of 4, with 2 rows and 3 tokens, does not fit into memory: lower ppo_max_token_len_per_gpu,"
    more = ", or turn on enable_gradient_checkpointing (checkpointing)"
    for options, said in (
        ({}, "8 now (max_tokens = 8 here)"),
        ({"keeps": True}, f"8 now (max_tokens = 8 here){more}"),
        ({"sharers": 2, "keeps": True}, f"4 now (max_tokens = 8 here, for 2 ranks){more}"),
    ):
        with pytest.raises(OutOfMemory) as raised, fits(batch, 1, 4, 8, **options):
            raise error
        assert str(raised.value) == f"{here} {said}. CUDA out of memory."
    with pytest.raises(ValueError, match=r"^another$"), fits(batch, 1, 4, 8):
        raise ValueError("another")


def test_the_first_line_that_says_it_is_the_reason():
    first, second = "CUDA out of memory. Tried 1 GiB", "CUDA error: out of memory"
    assert reason_of(RuntimeError(f"Traceback\n  {first}\n{second}\nlast")) == first
    assert reason_of(RuntimeError("Traceback\n  last \n")) == "last" and reason_of(RuntimeError()) == "RuntimeError"


def test_phases_of_other_threads_are_not_what_the_step_waits_for():
    def other():
        with in_phase("gen"):
            seen.extend(RUNNING)

    seen: list[str] = []
    with in_phase("update_actor"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with in_phase("update_weights"):
            seen.extend(RUNNING)
    assert seen == ["update_actor", "update_actor", "update_weights"] and not RUNNING


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("the row is out of range"),
        # Ray's own message about the memory of the machine, which no setting of a GPU changes.
        RuntimeError("Task was killed due to the node running low on memory."),
    ],
    ids=str,
)
def test_other_errors_pass_as_they_are(error, tiny, tmp_path):
    with pytest.raises(type(error)) as raised, explained(tiny_run(tiny, tmp_path), None), in_phase("gen"):
        raise error
    assert raised.value is error


def test_an_error_of_another_process_says_what_it_said_there():
    class TaskError(torch.OutOfMemoryError):
        """As Ray makes one of a worker's error: the text is a traceback."""

        cause = TORCH

        def __str__(self):
            return "ray::Host.run() (pid=7)\n  File ...\n    raise\ntorch.OutOfMemoryError: ..."

    error = TaskError()
    error.add_note("raised in trainer rank 1")
    with pytest.raises(PhaseOutOfMemory) as raised, in_phase("update_actor"):
        raise error
    assert raised.value.reason == reason_of(error) == str(TORCH)
    assert raised.value.__notes__ == ["raised in trainer rank 1"]
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.phase, str(again)) == ("update_actor", str(raised.value))


def test_notes_and_the_size_of_the_gpu_are_told(tiny, tmp_path):
    plan = tiny_run(tiny, tmp_path)
    with pytest.raises(RunOutOfMemory) as raised, explained(plan, 80 * GIB):
        error = PhaseOutOfMemory("values", "CUDA out of memory.")
        error.add_note("raised in trainer")
        raise error
    assert "out of memory in values (values): CUDA out of memory." in str(raised.value)
    assert "By the plan, a GPU of 80.00 GiB holds there: " in str(raised.value)
    assert raised.value.__notes__ == ["raised in trainer"]


def test_a_phase_that_no_plan_knows_shows_the_largest(tiny, tmp_path):
    plan = tiny_run(tiny, tmp_path)
    largest = max(phases(plan), key=lambda phase: phase.nbytes)
    for name, where in (("mine", "in mine"), ("", "outside of a phase")):
        text = explain(plan, None, name, "CUDA out of memory.")
        assert text.startswith(f"out of memory {where}: CUDA out of memory.\n")
        assert f"holds in its largest phase, the {largest.title}: {largest.describe()}" in text
    assert isinstance(largest, Phase)
