"""The first step of a model on any list of backend layouts, beside ``local`` in fp32.

One state with non-zero moments, one ragged batch whose old log-probs are perturbed so that at least a fifth of the
tokens clip, and three losses. A layout is ``local``, ``local:bf16``, ``fsdp:2``, ``fsdp:4,sp=2``, ``fsdp:2,bf16`` and
so on: the backend, its number of ranks, its dtype, and options that its class takes. Every rank is a process.

The applied update is compared twice: end to end, and from the reference's gradients, since a wrong optimizer step
hides behind a right gradient norm. A PPO loss is near zero and has no relative error, so errors of losses are relative
to the sum of |weight x per-token loss|.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file

from verl_fn.backends.local import Local
from verl_fn.models import new_model
from verl_fn.state import Batch, Grads, Key, Params
from verl_fn.steps import (
    Loss,
    adamw,
    aggregate,
    chain,
    clip_by_global_norm,
    constant,
    cross_entropy,
    ppo_clip,
    value_clip,
)

from . import measure

LR = 1e-3
LOSSES: dict[str, tuple[str, Callable[[], Loss]]] = {
    "sft": ("lm", cross_entropy),
    "ppo": ("lm", ppo_clip),
    "value": ("value", value_clip),
}
BARS = {
    "float32": {"loss": 1e-6, "grad_norm": 1e-6, "gradient": 1e-5, "update_from_reference": 1e-5},
    "bfloat16": {"loss": 1e-3, "grad_norm": 5e-3},
}
SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},
    "0.5b": {
        "arch": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
    },
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
}


@attrs.frozen
class Layout:
    """A backend, its ranks and its options.

    >>> Layout.parse("fsdp:4,sp=2,bf16")
    Layout(name='fsdp', ranks=4, dtype='bfloat16', options={'sp': 2})
    """

    name: str
    ranks: int
    dtype: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Layout:
        name, _, rest = text.partition(":")
        if name not in BACKENDS:
            raise ValueError(f"layout {text!r}: there is no backend {name!r}; there are {', '.join(BACKENDS)}")
        ranks, dtype, options = 1, "float32", {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if equals:
                options[key] = int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)
            elif part.isdigit():
                ranks = int(part)
            elif part == "bf16":
                dtype = "bfloat16"
            else:
                raise ValueError(f"layout {text!r}: {part!r} is no number of ranks, bf16 or key=value")
        return cls(name, ranks, dtype, options)


def _fsdp(*args: Any, **kwargs: Any) -> Any:
    from verl_fn.backends.fsdp import Fsdp

    return Fsdp(*args, **kwargs)


BACKENDS: dict[str, Callable[..., Any]] = {"local": Local, "fsdp": _fsdp}


def optimizer() -> Any:
    return chain(clip_by_global_norm(1.0), adamw(constant(LR), weight_decay=0.01))


def _budget(batch: Batch) -> int:
    """Tokens a micro-batch: several of them, whatever the lengths."""
    return max(256, 4 * int(batch.lengths.max()))


def ragged_batch(vocab: int, rows: int, longest: int) -> Batch:
    """Rows of 4 to ``longest`` tokens, half prompt, with everything that the losses read."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high, n: torch.randint(low, high, (n,), generator=generator)  # noqa: E731
    lengths = draw(4, longest + 1, rows).tolist()
    tokens = [draw(4, vocab, n) for n in lengths]
    mask = [[0.0] * max(1, n // 3) + [1.0] * (n - max(1, n // 3)) for n in lengths]
    normal = lambda n: torch.randn(n, generator=generator)  # noqa: E731
    fields = {"advantages": [normal(n) for n in lengths], "returns": [normal(n) for n in lengths]}
    batch = Batch.from_rows(tokens, {"response_mask": mask, **fields})
    return aggregate(batch, "token-mean")


def prepare(folder: Path, shape: str, losses: Sequence[str], rows: int, longest: int, device: str) -> None:
    """Model, batch, and for each head a state with moments, all made by ``local`` in fp32."""
    model = new_model(folder / "model", chars="".join(map(chr, range(33, 93))), **SHAPES[shape])
    batch = ragged_batch(60, rows, longest)
    for head in {LOSSES[name][0] for name in losses}:
        backend = Local(model, optimizer(), head=head, max_tokens=_budget(batch), device=device)
        state = backend.init(Key.from_seed(0))
        warm = cross_entropy() if head == "lm" else value_clip()
        noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
        data = batch.with_tokens(values=noise) if head == "value" else batch
        for _ in range(3):
            grads, _ = backend.forward_backward(state, data, warm)
            state, _ = backend.apply_update(state, grads)
        need = "values" if head == "value" else "logprobs"
        told = backend.forward(state.params, batch, [need]).by_name[need]
        # Ratios on both sides of the clip's bounds, and values off by about its range.
        name, scale = ("values", 0.5) if head == "value" else ("old_log_probs", 0.4)
        batch = batch.with_tokens(**{name: told + scale * noise * batch["response_mask"]})
        backend.save(state, folder / f"state_{head}")
    torch.save(batch, folder / "batch.pt")


def one_layout(folder: Path, layout: Layout, loss_name: str, out: Path, device: str) -> None:
    """What a layout makes of the first step; run by each of its ranks, written by the first."""
    head, make_loss = LOSSES[loss_name]
    options = dict(layout.options)
    placed = options.pop("place", None)
    batch: Batch = torch.load(folder / "batch.pt", weights_only=False)
    backend = BACKENDS[layout.name](
        folder / "model", optimizer(), head=head, compute_dtype=layout.dtype, max_tokens=_budget(batch), device=device,
        deterministic=True, **options,
    )  # fmt: skip
    loss, rank = make_loss(), int(os.environ.get("RANK", "0"))
    state = backend.restore(folder / f"state_{head}")
    state = backend.place(state, params=placed, optimizer=placed) if placed else state
    before = _whole(state.params)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    grads, found = backend.forward_backward(state, batch, loss)
    seconds = time.perf_counter() - began
    told: dict[str, Any] = {"loss": found["loss"].value, "seconds": seconds}
    tensors = {f"gradient.{n}": t for n, t in _whole(grads).items()}
    shares = folder / f"gradient_{loss_name}.safetensors"
    reference = load_file(shares) if shares.exists() else _whole(grads)
    if placed:
        grads = backend.place(attrs.evolve(state, params=Params(dict(grads))), params=placed).params
        grads = Grads(dict(grads))
    from_reference, _ = backend.apply_update(state, _as_given(backend, reference, state), donate=False)
    tensors |= {f"from_reference.{n}": t - before[n] for n, t in _whole(from_reference.params).items()}
    del from_reference
    state, updated = backend.apply_update(state, grads)
    told |= {"grad_norm": updated["grad_norm"].value, "copies": updated["perf/residency_copies"].value}
    tensors |= {f"update.{n}": t - before[n] for n, t in _whole(state.params).items()}
    told["second_loss"] = backend.forward_backward(state, batch, loss)[1]["loss"].value
    told["clipped"] = found["actor/pg_clipfrac"].value if "actor/pg_clipfrac" in found else None
    if device == "cuda":
        told["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if rank == 0:
        per_token = _per_token(folder, head, batch, loss, device)
        told["scale"] = float((batch["loss_weight"] * per_token).abs().sum())
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, out.with_suffix(".safetensors"))
        out.with_suffix(".json").write_text(json.dumps(told))


def _whole(tree: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu() for n, t in tree.items()}


def _as_given(backend: Any, gradient: dict[str, torch.Tensor], state: Any) -> Grads:
    """The reference's gradients in the backend's own layout."""
    if hasattr(backend, "layout"):
        return Grads(
            {n: backend.layout.shard(gradient[n], next(iter(state.params.values())).device) for n in state.params}
        )
    return Grads({n: gradient[n].to(t.device, copy=True) for n, t in state.params.items()})


def _per_token(folder: Path, head: str, batch: Batch, loss: Loss, device: str) -> torch.Tensor:
    backend = Local(folder / "model", optimizer(), head=head, max_tokens=_budget(batch), device=device)
    state = backend.restore(folder / f"state_{head}")
    return loss(backend.forward(state.params, batch, loss.needs), batch)[0]


def run_layout(folder: Path, text: str, loss: str, device: str) -> dict[str, Any]:
    """Start a layout's ranks, wait, and read what the first one wrote.

    Raises:
        RuntimeError: a rank failed; its own output is in the message.
    """
    layout, out = Layout.parse(text), folder / f"{text.replace(':', '_').replace(',', '_').replace('=', '')}_{loss}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "verl_fn.benchmarks.first_step", str(folder), text, loss, str(out), device]
    ranks = []
    for rank in range(layout.ranks):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }  # fmt: skip
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    told = [rank.communicate()[0] for rank in ranks]
    for rank, (process, output) in enumerate(zip(ranks, told, strict=True)):
        if process.returncode:
            raise RuntimeError(f"{text}, {loss}: rank {rank} failed\n{output[-3000:]}")
    tensors = load_file(out.with_suffix(".safetensors"))
    return json.loads(out.with_suffix(".json").read_text()) | {"tensors": tensors}


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Errors of a layout against the reference."""
    scale = wanted["scale"]
    errors = {
        "loss": abs(found["loss"] - wanted["loss"]) / scale,
        "grad_norm": abs(found["grad_norm"] / wanted["grad_norm"] - 1),
        "second_loss": abs(found["second_loss"] - wanted["second_loss"]) / scale,
    }
    for kind, name in (("gradient", "gradient"), ("update", "update"), ("from_reference", "update_from_reference")):
        ours, theirs = (
            {n: t.double() for n, t in run["tensors"].items() if n.startswith(f"{kind}.")} for run in (found, wanted)
        )
        # A parameter whose gradient is rounding alone has no relative error of its own.
        floor = 1e-6 * float(sum(t.square().sum() for t in theirs.values())) ** 0.5
        errors[name] = max(float((ours[n] - t).norm()) / max(float(t.norm()), floor) for n, t in theirs.items())
        if kind == "gradient":
            errors["cosine"] = min(
                float((ours[n] * t).sum() / (ours[n].norm() * t.norm()))
                for n, t in theirs.items()
                if float(t.norm()) > floor
            )
    return errors


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench first-step``: a table; exit status 1 where a bar is missed."""
    parser = measure.parser("first-step", __doc__)
    parser.add_argument("--layouts", nargs="+", default=["local", "fsdp:2", "fsdp:2,sp=2"])
    parser.add_argument("--losses", nargs="+", choices=tuple(LOSSES), default=list(LOSSES))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--png", metavar="F", help="also draw the errors")
    args = parser.parse_args(argv)
    for text in args.layouts:
        Layout.parse(text)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.shape, args.losses, args.rows, args.longest, args.device)
        print(f"{'layout':<24}{'loss':<7}{'loss':>9}{'grad norm':>11}{'gradient':>10}{'cosine':>12}{'update':>10}"
              f"{'from ref.':>11}{'2nd loss':>10}{'time':>9}   bars")  # fmt: skip
        for loss in args.losses:
            wanted = run_layout(folder, "local", loss, args.device)
            gradient = {
                n.removeprefix("gradient."): t for n, t in wanted["tensors"].items() if n.startswith("gradient.")
            }
            save_file({n: t.clone() for n, t in gradient.items()}, folder / f"gradient_{loss}.safetensors")
            if loss == "ppo" and wanted["clipped"] < 0.2:
                raise RuntimeError(f"only {wanted['clipped']:.2f} of the tokens clip: the batch is too tame")
            for text in args.layouts:
                found = run_layout(folder, text, loss, args.device)
                errors = compare(found, wanted)
                missed = [k for k, bar in BARS[Layout.parse(text).dtype].items() if not errors[k] <= bar]
                told = {k: v for k, v in found.items() if k not in ("tensors", "scale")}
                results.append({"layout": text, "loss": loss, "errors": errors, "found": told, "missed": missed})
                print(
                    f"{text:<24}{loss:<7}{errors['loss']:9.1e}{errors['grad_norm']:11.1e}{errors['gradient']:10.1e}"
                    f"{1 - errors['cosine']:12.1e}{errors['update']:10.1e}{errors['update_from_reference']:11.1e}"
                    f"{errors['second_loss']:10.1e}{found['seconds']:8.2f}s   {'MISSED ' + ', '.join(missed) if missed else 'held'}",
                    flush=True,
                )
    about = {"lr": LR, "shape": args.shape, "rows": args.rows, "bars": BARS}
    measure.write(args.json, "first-step", args.device, {**about, "results": results})
    if args.png:
        draw(results, Path(args.png))
    return 1 if any(r["missed"] for r in results) else 0


def draw(results: list[dict[str, Any]], out: Path) -> None:
    """The errors of every layout and loss on a log axis, with the fp32 bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(BARS["float32"])
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(3.2 * len(kinds), 0.35 * len(results) + 1.6), dpi=150,
                                   layout="constrained", sharey=True)  # fmt: skip
    names = [f"{r['layout']}  {r['loss']}" for r in results]
    for axis, kind in zip(axes, kinds, strict=True):
        axis.barh(names, [max(r["errors"][kind], 1e-12) for r in results], color="C0")
        axis.axvline(BARS["float32"][kind], color="C3", lw=1)
        axis.set(xscale="log", xlim=(1e-12, 1), title=kind.replace("_", " "))
        axis.grid(axis="x", alpha=0.25)
    axes[0].invert_yaxis()
    figure.savefig(out)
    pyplot.close(figure)


def rank_main(arguments: Sequence[str]) -> None:
    """One rank of one layout."""
    folder, text, loss, out, device = arguments
    layout = Layout.parse(text)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if layout.name != "local":
        import torch.distributed as dist

        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    one_layout(Path(folder), layout, loss, Path(out), device)
    if layout.name != "local":
        dist.barrier()
        dist.destroy_process_group()
    # A process group's threads may still run; there is nothing left to do for them.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    rank_main(sys.argv[1:])
