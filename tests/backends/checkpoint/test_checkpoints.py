"""Folders of states: the same bytes for every layout, readable by transformers, and errors that name what differs."""

import errno
import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from rank_cases import KEY, optimizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl_fn.backends import tensor_file
from verl_fn.backends.checkpoint import MODEL, TENSORS, CheckpointError, export_model
from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.folder import ModelError
from verl_fn.backends.hf.lora import ADAPTERS, Lora, LoraError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.tensor_file import Span
from verl_fn.state import Key, snapshot, tree
from verl_fn.steps import ppo_clip, sgd
from verl_fn.testing import tiny_batch

LORA = Lora(rank=3, alpha=6.0)  # a rank that four ranks do not divide
MOE = {"arch": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("options", "start", "later"),
    [
        ({}, "init", False),
        ({"replicate": 2}, "init", True),
        ({"head": "value", "sp": 2}, "init", False),
        ({"lora": LORA}, "load_pretrained", False),
        ({"lora": LORA, "head": "value", "replicate": 2}, "load_pretrained", True),
    ],
    ids=str,
)
def test_the_same_bytes_whoever_writes(four, folder, tmp_path, options, start, later):
    """Four ranks and one process write the same files, and safetensors itself would write these."""
    digests = four.run("save", folder, tmp_path / "four", options, start, later)
    local = Local(folder, optimizer(), head=options.get("head", "lm"), lora=options.get("lora"))
    state = local.restore(tmp_path / "four")
    assert digests == [tree.digest(state)] * 4
    local.save(state, tmp_path / "one")
    written = contents(tmp_path / "four")
    assert written == contents(tmp_path / "one")
    model = ADAPTERS if start == "load_pretrained" else MODEL
    assert {model, TENSORS, "train_state.json", "config.json", "tokenizer.json"} <= written.keys()
    for name in (model, TENSORS):
        save_file(load_file(tmp_path / "four" / name), tmp_path / "again", metadata={"format": "pt"})
        assert (tmp_path / "again").read_bytes() == written[name]


@pytest.mark.parametrize("options", [{}, {"head": "value"}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_ranks_wrote(two, tmp_path, options, tied):
    model = new_model(tmp_path / "model", chars="abcd", hidden_size=16, tie_word_embeddings=tied)
    two.run("save", model, tmp_path / "saved", options)
    auto = AutoModelForTokenClassification if options else AutoModelForCausalLM
    found, told = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    state = Local(model, optimizer(), **options).restore(tmp_path / "saved")
    assert all(torch.equal(p, state.params[name]) for name, p in found.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("abcd")
    if not options:
        assert found.generation_config.eos_token_id == AutoModelForCausalLM.from_pretrained(model).config.eos_token_id


@pytest.mark.parametrize("options", [{}, {"replicate": 2}], ids=str)
def test_no_rank_holds_a_whole_tensor(four, folder, tmp_path, options):
    written = four.run("rank_checks.gathers_nothing", folder, tmp_path / "a", options)
    data = sum(4 * t.numel() for name in (MODEL, TENSORS) for t in load_file(tmp_path / "a" / name).values())
    assert sum(written) == data
    assert max(written) < data / 2


def test_mixtures_of_experts(two, tmp_path):
    """In the layout that transformers computes with; an export has the files that others know."""
    model = new_model(tmp_path / "model", chars="abcd", hidden_size=32, **MOE)
    backend = Local(model, optimizer())
    state = backend.load_pretrained()
    backend.save(state, tmp_path / "saved")
    assert tree.equal(backend.restore(tmp_path / "saved"), state)
    assert tree.equal(Local(tmp_path / "saved", optimizer()).load_pretrained(), state)
    assert two.run("rank_checks.restored", model, tmp_path / "saved") == [None, None]
    export_model(tmp_path / "saved", tmp_path / "out")
    assert load_file(tmp_path / "out" / MODEL).keys() == load_file(model / MODEL).keys()


def edited(source, folder, file, change):
    """A copy of a checkpoint with the tensors of one file changed."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    backend = Local(folder, optimizer(), max_tokens=24)
    state = backend.init(Key.from_seed(0))
    grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
    backend.save(backend.apply_update(state, grads)[0], tmp_path_factory.mktemp("saved"))
    return tmp_path_factory.getbasetemp() / "saved0"


NORM, MOMENT = "model.norm.weight", ".optimizer[1].exp_avg['model.norm.weight']"


@pytest.mark.parametrize(
    ("file", "name", "change", "says"),
    [
        (MODEL, NORM, lambda t: t.pop(NORM), "lacks 1 of"),
        (MODEL, NORM, lambda t: t.update({"more": torch.ones(1)}), "has 1 tensors too many, such as ['more']"),
        (MODEL, NORM, lambda t: t.update({NORM: torch.ones(3)}), "as F32(3,), not F32(16,)"),
        (MODEL, NORM, lambda t: t.update({NORM: t[NORM].bfloat16()}), "as BF16(16,), not F32(16,)"),
        (TENSORS, MOMENT, lambda t: t.pop(MOMENT), "lacks 1 of"),
        (TENSORS, MOMENT, lambda t: t.update({"more": torch.ones(1)}), "has 1 tensors too many, such as ['more']"),
        (TENSORS, MOMENT, lambda t: t.update({MOMENT: torch.ones(3)}), "as F32(3,), not F32(16,)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(two, folder, saved, tmp_path, file, name, change, says):
    odd = edited(saved, tmp_path / "odd", file, change)
    with pytest.raises(CheckpointError) as error:
        Local(folder, optimizer()).restore(odd)
    told = str(error.value)
    assert told.startswith(f"{odd} does not hold this training state: {file}") and says in told
    assert "more" in says or name in told
    assert two.run("rank_checks.restored", folder, odd) == [f"CheckpointError: {told}"] * 2


@pytest.mark.parametrize("file", [MODEL, TENSORS, "train_state.json"])
def test_files_that_are_cut_or_missing(two, folder, saved, tmp_path, file):
    whole = (saved / file).read_bytes()
    odd = edited(saved, tmp_path / "odd", MODEL, lambda t: None)
    for harm in (lambda p: p.write_bytes(whole[:-7]), lambda p: p.write_bytes(b""), lambda p: p.unlink()):
        harm(odd / file)
        with pytest.raises(CheckpointError, match="does not hold this training state"):
            Local(folder, optimizer()).restore(odd)
        told = two.run("rank_checks.restored", folder, odd)
        assert told[0].startswith("CheckpointError") and told[0] == told[1]


@pytest.mark.parametrize("content", [b"[]", b"null", b"7", b"[" * 100_000, b'{".step": null}', b"\xff"], ids=range(6))
def test_numbers_that_are_not_what_was_written(folder, saved, tmp_path, content):
    odd = edited(saved, tmp_path / "odd", MODEL, lambda t: None)
    (odd / "train_state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="does not hold this training state"):
        Local(folder, optimizer()).restore(odd)


def test_states_of_another_optimizer_or_run(folder, saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"train_state.safetensors has \d+ tensors too many"):
        Local(folder, sgd(lambda count: 0.1)).restore(saved)
    odd = edited(saved, tmp_path / "odd", MODEL, lambda t: None)
    scalars = json.loads((odd / "train_state.json").read_text())
    (odd / "train_state.json").write_text(json.dumps({k: v for k, v in scalars.items() if k != ".step"}))
    with pytest.raises(CheckpointError, match="lacks 1 of"):
        Local(folder, optimizer()).restore(odd)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WRITES, OTHERS = ("pwrite", "fsync", "replace"), ("mkdir", "unlink", "rmdir")
UNFINISHED = "has no train_state.json, so its save was not finished"


class Killed(BaseException):
    """What nothing catches; nothing that comes after it reaches the disk."""


class Calls:
    """Notes the calls that change the disk; the one numbered ``fail_at`` fails, and after a kill all others do."""

    def __init__(self, patch, names, error=None, fail_at=-1):
        self.told, self.error, self.fail_at = [], error, fail_at
        for name in names:
            patch.setattr(os, name, self.around(name, getattr(os, name)))

    def around(self, name, fn):
        def call(path, *args, **kwargs):
            now = len(self.told)
            self.told.append((name, os.path.basename(path) if name in ("replace", "unlink") else ""))
            if now == self.fail_at or (isinstance(self.error, Killed) and now > self.fail_at):
                raise self.error
            return fn(path, *args, **kwargs)

        return call


def two_states(folder, **options):
    backend = Local(folder, optimizer(), max_tokens=24, **options)
    old = backend.init(KEY)
    grads, _ = backend.forward_backward(old, tiny_batch(), ppo_clip())
    return backend, snapshot(old), backend.apply_update(old, grads)[0]


def noted(save, names, error=None, fail_at=-1):
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch, names, error, fail_at)
        save()
    return calls.told


def restored(backend, into):
    try:
        return backend.restore(into)
    except (CheckpointError, LoraError, ModelError) as error:
        return error


@pytest.mark.parametrize("over", ["nothing", "a save", "a save with adapters"])
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new_or_none(folder, tmp_path, over, monkeypatch):
    """Each call that changes the disk is the last one in turn; what is left can be saved over."""
    # A process that is killed leaves the same files, synced or not, and a hundred saves would wait for the disk.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    backend, held, new = two_states(folder)
    first = backend
    if over == "a save with adapters":
        first, held, _ = two_states(folder, lora=Lora(2))
    into, outcomes = tmp_path / "saved", []
    backend.save(new, tmp_path / "new")
    first.save(held, tmp_path / "old")
    models = [(tmp_path / name / MODEL).read_bytes() for name in ("old", "new")]

    def begin():
        shutil.rmtree(into, ignore_errors=True)
        if over != "nothing":
            shutil.copytree(tmp_path / "old", into)

    begin()
    told = noted(lambda: backend.save(new, into), WRITES + OTHERS)
    for fail_at in range(len(told)):
        begin()
        with pytest.raises(Killed):
            noted(lambda: backend.save(new, into), WRITES + OTHERS, Killed(), fail_at)
        by_first, by_backend = restored(first, into), restored(backend, into)
        if not isinstance(by_backend, Exception) and tree.equal(by_backend, new):
            outcomes.append("new")
        elif not isinstance(by_first, Exception):
            assert tree.equal(by_first, held), told[fail_at]
            outcomes.append("old")
        else:
            assert isinstance(by_backend, Exception)
            outcomes.append("none")
            if (into / "config.json").exists():
                assert UNFINISHED in str(by_first) or UNFINISHED in str(by_backend), told[fail_at]
        # What transformers would load is whole, too.
        assert not (into / MODEL).exists() or (into / MODEL).read_bytes() in models, told[fail_at]
        backend.save(new, into)
        assert contents(into) == contents(tmp_path / "new"), told[fail_at]
    assert outcomes == sorted(outcomes, key=["old", "none", "new"].index)
    assert set(outcomes) == {"none", "new"} | ({"old"} if over != "nothing" else set())


def test_files_of_a_killed_save_stay_out_of_the_next_one(folder, tmp_path):
    """The killed one may have been of another state, with files that this one has not."""
    backend, state, _ = two_states(folder)
    backend.save(state, tmp_path / "new")
    aside = tmp_path / "saved" / ".writing"
    aside.mkdir(parents=True)
    (aside / ADAPTERS).write_bytes(b"of the killed save")
    backend.save(state, tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(tmp_path / "new")


def test_a_disk_that_fills_costs_only_the_save(folder, tmp_path):
    """Each call that writes fails in turn; until the files get their names, nothing has changed."""
    backend, old, new = two_states(folder)
    into = tmp_path / "saved"
    backend.save(old, tmp_path / "old")
    before = contents(tmp_path / "old")
    told = noted(lambda: backend.save(new, into), (*WRITES, "unlink"))
    named = told.index(("unlink", "train_state.json"))
    for fail_at, (name, _) in enumerate(told):
        if name in WRITES:
            shutil.rmtree(into)
            shutil.copytree(tmp_path / "old", into)
            with pytest.raises(OSError, match="No space left"):
                noted(lambda: backend.save(new, into), (*WRITES, "unlink"), FULL, fail_at)
            if fail_at < named:
                assert contents(into) == before
            elif fail_at < len(told) - 1:  # all but the last fsync
                with pytest.raises(CheckpointError, match=UNFINISHED):
                    backend.restore(into)
            assert not (into / ".writing").exists()
    assert named > 20


def save_on_a_full_disk(folder, into, rank, fail_at):
    """The updated state, saved over the first, while one rank's disk is full; what the ranks wrote, or the error."""
    backend = Fsdp(folder, optimizer(), max_tokens=24)
    state = backend.init(KEY)
    backend.save(state, into)
    before = contents(into)
    grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
    state, _ = backend.apply_update(state, grads)
    dist.barrier()
    try:
        told = noted(lambda: backend.save(state, into), WRITES, FULL, fail_at if dist.get_rank() == rank else -1)
    except OSError as error:
        dist.barrier()
        return str(error), contents(into) == before
    return told, None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fills_on_one_rank_costs_all_of_them_only_the_save(two, folder, tmp_path, rank):
    told = two.run("test_checkpoints.save_on_a_full_disk", folder, tmp_path / "whole", rank, -1)[rank][0]
    writes = [i for i, (name, _) in enumerate(told) if name == "pwrite"]
    assert writes
    for fail_at in (writes[0], writes[-1]):
        found = two.run("test_checkpoints.save_on_a_full_disk", folder, tmp_path / f"at_{fail_at}", rank, fail_at)
        assert found == [(str(FULL), True)] * 2


def test_files_have_the_permissions_that_others_get(folder, tmp_path):
    """Over files that safetensors made for their owner alone, too."""
    backend = Local(folder, optimizer())
    shutil.copytree(folder, tmp_path / "saved")
    backend.save(backend.init(KEY), tmp_path / "saved")
    (tmp_path / "any").touch()
    assert {p.stat().st_mode for p in (tmp_path / "saved").iterdir()} == {(tmp_path / "any").stat().st_mode}


def test_a_model_alone_is_loaded_and_not_restored(folder):
    backend = Local(folder, optimizer())
    backend.load_pretrained()
    with pytest.raises(CheckpointError, match=f"{UNFINISHED}, or it is only a model"):
        backend.restore(folder)


def test_what_is_written_is_what_was_held(tmp_path, monkeypatch):
    """Of every dtype, in blocks that end within parts and in parts that end within blocks, whoever writes them."""
    monkeypatch.setattr(tensor_file, "BLOCK", 64)
    noise = torch.randint(256, (999,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {
        f"every {name}": noise[: 99 * t.itemsize].view(t) for t, name in tensor_file.NAMES.items() if name != "BOOL"
    }
    shared = torch.arange(600.0)
    tensors |= {
        "bool": noise > 99,
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
        "transposed": shared[:500].view(20, 25).T,
        "rows": shared[7:207].view(10, 20),
        "strided": shared[::2],
        "expanded": torch.tensor(3.0).expand(4, 50),
    }
    whole = {name: Span.whole(t) for name, t in tensors.items()}
    tensor_file.start(tmp_path / "ours", whole)
    for ends in ((0, 1 / 3), (1 / 3, 1)):
        parts = {}
        for name, span in whole.items():
            first, last = (round(end * span.elements.numel()) for end in ends)
            parts[name] = Span(span.elements[first:last], first, span.shape)
        tensor_file.fill(tmp_path / "ours", parts)
    read = load_file(tmp_path / "ours")
    assert read.keys() == tensors.keys()
    for name, t in tensors.items():
        assert read[name].dtype == t.dtype and read[name].shape == t.shape
        assert torch.equal(*(bits.contiguous().flatten().view(torch.uint8) for bits in (read[name], t))), name


def test_a_folder_that_vanishes_while_it_is_written(folder, tmp_path, monkeypatch):
    backend, old, new = two_states(folder)
    backend.save(old, tmp_path / "saved")
    before, write = contents(tmp_path / "saved"), os.pwrite

    def vanish(*args):
        shutil.rmtree(tmp_path / "saved/.writing", ignore_errors=True)
        return write(*args)

    monkeypatch.setattr(os, "pwrite", vanish)
    with pytest.raises(FileNotFoundError, match=r"saved/\.writing"):
        backend.save(new, tmp_path / "saved")
    assert contents(tmp_path / "saved") == before
