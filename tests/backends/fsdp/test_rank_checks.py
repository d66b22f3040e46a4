"""What sharded training refuses: every rank is told the same, and none waits for another."""

import functools
import re
import shutil

import pytest
import torch
from rank_checks import OPTIMIZERS
from ranks import Ranks

from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.local import Local
from verl_fn.backends.megatron import Megatron
from verl_fn.backends.memory import OutOfMemory
from verl_fn.steps import frozen
from verl_fn.testing import tiny_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16)


@pytest.mark.parametrize("kind", [Fsdp, functools.partial(Megatron, device="cpu")], ids=["fsdp", "megatron"])
def test_a_backend_without_a_process_group_says_how_to_make_one(folder, kind):
    with pytest.raises(
        LayoutError, match=r"there is no process group: start the ranks with torchrun .*HashStore\(\)"
    ):
        kind(folder, frozen())


def same(told):
    """What all ranks were told alike."""
    assert told[0] is not None and all(one == told[0] for one in told), told
    return told[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicate": 2}, "another replicate than rank 0 ('2' instead of '1')"),
        ({"sp": 2}, "another sp than rank 0"),
        ({"max_tokens": 24}, "another max_tokens than rank 0 ('24' instead of '16384')"),
        ({"head": "value"}, "another head than rank 0"),
        ({"dtype": "bfloat16"}, "another dtype than rank 0"),
        ({"checkpointing": True}, "another checkpointing than rank 0"),
        ({"device": "cuda"}, "another device than rank 0"),
        ({"deterministic": True}, "another deterministic than rank 0"),
    ],
    ids=str,
)
def test_ranks_with_other_settings(two, folder, options, says):
    assert f"LayoutError: ranks [1] were given {says}" in same(two.run("rank_checks.other_settings", folder, options))


def test_a_dtype_equals_its_name(two, folder):
    assert two.run("rank_checks.equal_dtypes", folder) == [None, None]


def test_ranks_with_other_optimizers(two, folder):
    """An optimizer is data: its settings are compared, and the names of functions in it."""
    told = same(two.run("rank_checks.other_optimizers", folder))
    assert [one for one in told if one is None or "another optimizer than rank 0" not in one] == []
    assert len(told) == len(OPTIMIZERS)


def test_ranks_with_other_models(two, folder, tmp_path):
    wider = new_model(tmp_path / "wider", chars="abcd", hidden_size=32)
    assert "another model (config.json) than" in same(two.run("rank_checks.other_models", folder, wider))
    assert "another model (config.json) than" in same(two.run("rank_checks.other_models", folder, tmp_path))
    seeded = new_model(tmp_path / "seeded", chars="abcd", hidden_size=16, seed=7)
    assert "another weights than" in same(two.run("rank_checks.other_weights", folder, seeded))
    assert "another key than" in same(two.run("rank_checks.other_keys", folder))


def test_ranks_with_other_folders(two, folder, tmp_path):
    to_save, to_restore = same(two.run("rank_checks.other_folders", folder, tmp_path))
    assert "another folder to save in than" in to_save and "another folder to restore than" in to_restore


def test_a_batch_that_a_rank_would_refuse_is_refused_by_all(two, folder):
    assert "row 0: response_mask is set on its first token" in same(two.run("rank_checks.bad_mask", folder))


def test_a_torn_file_on_one_rank(two, folder, tmp_path):
    torn = shutil.copytree(folder, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    assert "ModelError" in same(two.run("rank_checks.missing_weights", folder, torn))


def test_weights_that_one_rank_cannot_read(two, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "gone")
    (tmp_path / "gone/model.safetensors").unlink()
    told = same(two.run("rank_checks.missing_weights", folder, tmp_path / "gone"))
    assert told.startswith("ModelError") and "gone" in told


def test_a_state_that_goes_to_different_devices(two, folder):
    told = same(two.run("rank_checks.other_devices", folder))
    assert "another params for place than rank 0 ('meta' instead of 'cpu')" in told


def test_an_update_with_another_optimizer_on_one_rank(two, folder):
    told, lr = same(two.run("rank_checks.other_updates", folder))
    assert [text for text in told[:2] if "ranks [1] were given another optimizer for apply_update" not in text] == []
    assert "apply_update takes an Optimizer, not a float" in told[2] and lr == 2e-3


def test_states_of_another_layout(two, folder, tmp_path):
    told = same(two.run("rank_checks.other_layouts", folder, tmp_path))
    assert [
        t
        for t in told[:5]
        if not re.search(r"of the layout replicate=2, shard=1 \(.*\) was given to a backend of the layout shard=2", t)
    ] == []
    assert [
        t
        for t in told[5:10]
        if not re.search(r"held as whole tensors \(.*\) was given to a backend of the layout shard=2", t)
    ] == []
    says = r"LayoutError: a value of another layout or model \(model\..*\) was given to a local backend"
    assert [t for t in told[10:] if not re.search(says, t)] == [] and len(told) == 16


def test_a_model_without_layers_to_shard_by(two, folder):
    told = same(two.run("rank_checks.refused_model", folder))
    assert "ModelError" in told and "Qwen3ForCausalLM has no list of layers to shard by" in told


def test_updates_that_are_refused_cost_nothing(two, folder):
    says, gone = same(two.run("rank_checks.refused_updates", folder))
    wanted = ("differ in their names", "held as whole tensors", "is bfloat16", "frozen")
    assert [text for text, part in zip(says, wanted, strict=True) if part not in text] == []
    assert not any(gone)


def test_ranks_that_make_other_calls(two, folder):
    says = same(two.run("rank_checks.other_calls", folder))
    wanted = ("another state (step and key)", "another batch", "another needs")
    assert [text for text, part in zip(says, wanted, strict=True) if part not in text] == []


def test_optimizers_of_ones_own(two, folder):
    says, gap = same(two.run("rank_checks.own_optimizers", folder))
    assert "LayoutError" in says and "outside of Slots" in says
    assert gap < 1e-6


def test_gradients_come_to_where_the_parameters_are(two, folder):
    refused, devices = same(two.run("rank_checks.placed", folder))
    assert "parameters lie on meta, the optimizer on cpu; place them together" in refused
    assert devices == {"meta"}


def test_a_disk_that_fills_on_one_rank(two, folder, tmp_path):
    told = same(two.run("rank_checks.full_disk", folder, tmp_path / "a", 12))
    assert [t for t in told if t != "OSError: [Errno 28] No space left on device"] == []


def test_a_folder_that_cannot_be_made(two, folder, tmp_path):
    (tmp_path / "file").write_text("")
    told = same(two.run("rank_checks.no_folder", folder, tmp_path / "file" / "a"))
    assert told.startswith("NotADirectoryError") and str(tmp_path) in told


def test_memory_that_runs_out_on_one_process(folder, monkeypatch):
    backend, batch = Local(folder, frozen(), max_tokens=24), tiny_batch()
    params = backend.load_pretrained().params
    skeleton, count = type(backend._built()), len(batch)
    hidden_states, calls = skeleton.hidden_states, []

    def full(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return hidden_states(self, *args)

    monkeypatch.setattr(skeleton, "hidden_states", full)
    with pytest.raises(
        OutOfMemory, match=r"micro-batch 2 of 3, with \d+ rows and \d+ tokens, .* lower ppo_max_token"
    ):
        backend.forward(params, batch)
    assert issubclass(OutOfMemory, torch.OutOfMemoryError) and count


def test_memory_that_runs_out_on_one_rank(warm, folder):
    """The rank is told which micro-batch; the others wait in a collective until somebody ends them: the driver."""
    ranks = Ranks(2)
    try:
        for pipe in ranks.pipes:
            pipe.send(("rank_checks", "out_of_memory", (folder,)))
        _, fine, report = ranks.pipes[1].recv()
        assert fine and "OutOfMemory: micro-batch 2 of" in report and "2.00 GiB." in report and "More" not in report
        assert not ranks.pipes[0].poll(1.0)
    finally:
        ranks.kill()
