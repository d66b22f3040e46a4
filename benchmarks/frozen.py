"""Bytes of the frozen parameters of a LoRA run: in the state, in a copy that computes, in a reference, in an engine.

Ranks of torchrun measure a sharded backend together; the numbers are of the first one.
"""

from __future__ import annotations

import argparse
import os
import runpy
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.fsdp.torch_private import local_of
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.state import Batch, Params, TrainState
from verl_fn.steps import adamw, aggregate, chain, cross_entropy

from . import measure

EXPERTS = {
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"qwen2": {"arch": "qwen2"}, "qwen3_moe": {"arch": "qwen3_moe", **EXPERTS}}


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the bytes of each storage of some tensors, by its address; of a sharded one, of this rank's part."""
    held = [local_of(t).untyped_storage() for t in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


def beyond(tensors: Iterable[Tensor], known: Mapping[int, int]) -> int:
    """Returns the bytes of the storages of some tensors that are not among the known ones."""
    return sum(nbytes for place, nbytes in storages(tensors).items() if place not in known)


def measured(backend: Any, folder: Path) -> dict[str, int]:
    """Returns bytes by use, after a step: what each use takes beside the state's own frozen parameters.

    Args:
        backend: the training backend.
        folder: its folder, for the engine of a backend of one process.
    """
    batch = aggregate(Batch.from_rows([[1, 4, 5, 2], [1, 6, 2]], {"response_mask": [[0, 0, 1, 1], [0, 1, 1]]}))
    state: TrainState = backend.load_pretrained()
    state, _ = backend.apply_update(state, backend.forward_backward(state, batch, cross_entropy())[0])
    base = state.params.base
    backend.forward(base, batch)
    known = storages(base.leaves.values())
    found = {
        "elements": sum(local_of(t).numel() for t in base.leaves.values()),
        "state": sum(known.values()),
        "reference": beyond(state.params.base.leaves.values(), known),
        "copy that computes": beyond(_computing(backend, base), known),
    }
    if type(backend).__name__ == "Local":
        from verl_fn.backends.sampler import Sampler

        engine = Sampler(folder, dtype=str(backend.dtype).removeprefix("torch."))
        engine.publish(0, backend.weights(state.params))
        general = getattr(engine.decoder, "_weights", None)
        if isinstance(general, dict):
            found["engine, merged"] = beyond((general[f"{n}.weight"] for n in _adapted(backend)), known)
            rest = [t for name, t in general.items() if name.removesuffix(".weight") not in _adapted(backend)]
            found["engine, the rest"] = beyond(rest, known)
    return found


def _adapted(backend: Any) -> Sequence[str]:
    names: Sequence[str] = backend._built().adapters.layers
    return names


def _computing(backend: Any, base: Params) -> list[Tensor]:
    """Returns the tensors of frozen parameters that a backend keeps to compute with, between calls."""
    if type(backend).__name__ == "Megatron":
        pieces = backend._built().pieces
        return [piece.param.data for name, piece in pieces.items() if name in base]
    if type(backend).__name__ == "Local":
        return [t for name, t in backend._cast.items() if name in base]
    # FSDP's modules point at the shards of the state, and gather a layer while it computes.
    return []


def made(kind: str, folder: Path, dtype: str, device: str) -> Any:
    """Returns a backend with adapters for every linear layer."""
    options: dict[str, Any] = {"dtype": dtype, "lora": Lora(rank=4, alpha=8.0), "device": device}
    optimizer = chain(adamw(1e-3))
    if kind == "local":
        from verl_fn.backends.local import Local

        return Local(folder, optimizer, **options)
    if kind == "fsdp":
        from verl_fn.backends.fsdp import Fsdp

        return Fsdp(folder, optimizer, **options)
    if device == "cpu":
        helpers = Path(__file__).resolve().parents[1] / "tests/backends/helpers"
        runpy.run_path(str(helpers / "megatron_on_cpu.py"))["install"]()
    from verl_fn.backends.megatron import Megatron

    return Megatron(folder, optimizer, **options)


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench frozen``: a line for each backend, dtype and model."""
    parser = measure.parser("frozen", __doc__)
    parser.add_argument("--backends", nargs="+", default=["local", "fsdp", "megatron"])
    parser.add_argument("--hidden", type=measure.count, default=256)
    args: argparse.Namespace = parser.parse_args(argv)
    one_rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in one_rank.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    result: dict[str, Any] = {"ranks": dist.get_world_size(), "bytes": {}}
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        for model, settings in MODELS.items():
            folder = Path(names[0]) / model
            if dist.get_rank() == 0:
                new_model(folder, chars="abcd", hidden_size=args.hidden, **settings)
            dist.barrier()
            for kind in args.backends:
                for dtype in ("float32", "bfloat16"):
                    found = measured(made(kind, folder, dtype, args.device), folder)
                    result["bytes"][f"{model}, {kind}, {dtype}"] = found
                    if dist.get_rank() == 0:
                        print(f"{model}, {kind}, {dtype}: {found}", flush=True)
        dist.barrier()
    if dist.get_rank() == 0:
        measure.write(args.json, "frozen", args.device, result)
    dist.destroy_process_group()
    return 0
