"""What it costs that steps are functions of values: against the same arithmetic in place.

``apply_update`` (donated) against clipping and ``torch.optim.AdamW(fused=True)`` on the same tensors, and
``forward_backward`` against a plain module and ``.backward()`` with the identical attention, log-prob kernel,
micro-batches and dtypes. Each beside an A/A control, the baseline against a second copy of itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from verl_fn.backends.hf import attention
from verl_fn.backends.hf.config import LOCAL
from verl_fn.backends.hf.outputs import Staged, token_outputs
from verl_fn.backends.hf.skeleton import DTYPES, Skeleton
from verl_fn.backends.local import Local
from verl_fn.state import Batch, Grads, Key, split_by_tokens
from verl_fn.steps import adamw, aggregate, chain, clip_by_global_norm, constant, ppo_clip

from . import measure

LR, CLIP = 1e-5, 1.0


@attrs.frozen
class Shape:
    """A model and the batch that it is trained on.

    Attributes:
        config: fields of a Qwen2 config.
        prompt, response: tokens of a prompt, and the range of a response's.
        rows, budget: rows of the batch, and tokens a micro-batch.
        dtype: compute dtype, over fp32 masters.
    """

    config: dict[str, Any]
    prompt: int
    response: tuple[int, int]
    rows: int
    budget: int
    dtype: str


SHAPES = {
    "25m": Shape(
        {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 12, "num_attention_heads": 6,
         "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True},
        prompt=32, response=(16, 96), rows=16, budget=512, dtype="float32",
    ),
    "0.5b": Shape(
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        prompt=256, response=(128, 1792), rows=64, budget=16384, dtype="bfloat16",
    ),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench purity``: a table on the screen; exit status 1 where a bar is missed."""
    parser = measure.parser("purity", __doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="25m on a CPU, 0.5b on a GPU")
    parser.add_argument("--rounds", type=measure.count, default=40, help="interleaved pairs")
    args = parser.parse_args(argv)
    shape = args.shape or ("0.5b" if args.device == "cuda" else "25m")
    result = run(SHAPES[shape], args.device, args.rounds)
    measure.write(args.json, "purity", args.device, {"shape": shape, **result})

    print(f"{result['parameters'] / 1e6:.1f} M parameters, {result['tokens']} tokens, {SHAPES[shape].dtype}")
    print(f"{'':18}{'time':>8}{'95 % interval':>18}{'A/A':>8}{'memory':>9}   bars: time, memory")
    held = True
    for name, bars in (("apply_update", (1.05, 1.02)), ("forward_backward", (1.05, 1.05))):
        r = result[name]
        ok = r["time"]["median"] <= bars[0] and r["memory"] <= bars[1]
        held = held and ok
        interval = f"{r['time']['low']:.3f} to {r['time']['high']:.3f}"
        print(
            f"{name:18}{r['time']['median']:8.3f}{interval:>18}{r['control']['median']:8.3f}{r['memory']:9.3f}"
            f"   {bars[0]}, {bars[1]}: {'held' if ok else 'MISSED'}"
        )
    return 0 if held else 1


def run(shape: Shape, device: str, rounds: int) -> dict[str, Any]:
    """Measure both steps; ratios are ours over the baseline's."""
    with tempfile.TemporaryDirectory() as folder:
        _write_config(shape, folder)
        optimizer = chain(clip_by_global_norm(CLIP), adamw(constant(LR)))
        backend = Local(folder, optimizer, dtype=shape.dtype, max_tokens=shape.budget, device=device)
        state = backend.init(Key.from_seed(0))
        tensors = {name: t.clone() for name, t in state.params.items()}
        batch = ragged_batch(shape, backend, state)
        return {
            "parameters": sum(t.numel() for t in tensors.values()),
            "tokens": batch.num_tokens,
            "forward_backward": _forward_backward(shape, folder, device, rounds, backend, state, batch),
            "apply_update": _apply_update(device, rounds, backend, tensors),
        }


def ragged_batch(shape: Shape, backend: Local, state: Any) -> Batch:
    """Random rows with old log-probs near the policy's own, so that the ratio differs from 1."""
    rng = torch.Generator().manual_seed(0)
    low, high = shape.response
    lengths = torch.randint(low, high + 1, (shape.rows,), generator=rng).tolist()
    vocab = shape.config["vocab_size"]
    rows = [torch.randint(0, vocab, (shape.prompt + n,), generator=rng) for n in lengths]
    mask = [[0.0] * shape.prompt + [1.0] * n for n in lengths]
    batch = Batch.from_rows(rows, {"response_mask": mask})
    logprobs = backend.forward(state.params, batch, ["logprobs"]).logprobs
    noise = torch.randn(batch.num_tokens, generator=rng)
    return aggregate(batch.with_tokens(old_log_probs=logprobs + 0.2 * noise, advantages=noise.flip(0)))


def _write_config(shape: Shape, folder: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen2", **shape.config)
    config.save_pretrained(folder)


def _apply_update(device: str, rounds: int, backend: Local, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Three sets of the same tensors take the same gradients: ours, the baseline and its control."""
    rng = torch.Generator(device=device).manual_seed(1)
    gradient = {n: 1e-3 * torch.randn(t.shape, generator=rng, device=device) for n, t in tensors.items()}

    def ours() -> tuple[Callable[[], None], Callable[[], None]]:
        held: dict[str, Any] = {"state": backend.init(Key.from_seed(0))}

        def step() -> None:
            held["state"], metrics = backend.apply_update(held["state"], held["grads"])
            assert metrics["perf/residency_copies"].value == 0

        def refill() -> None:
            held["grads"] = Grads({n: g.clone() for n, g in gradient.items()})

        return step, refill

    def plain() -> tuple[Callable[[], None], Callable[[], None]]:
        params = [nn.Parameter(t.clone()) for t in tensors.values()]
        optimizer = torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.999), weight_decay=0.01, fused=True)

        def step() -> None:
            nn.utils.clip_grad_norm_(params, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def refill() -> None:
            for p, g in zip(params, gradient.values(), strict=True):
                p.grad = g.clone()

        return step, refill

    memory = {}
    for name, make in (("ours", ours), ("plain", plain)):
        step, refill = make()
        refill()
        step()
        refill()
        # Parameters, gradients and two moments lie there before the step.
        memory[name] = 4 * _bytes(tensors) + measure.peak_bytes(step, device)
        del step, refill
    made = {name: make() for name, make in (("ours", ours), ("plain", plain), ("control", plain))}
    seconds = measure.interleave(
        {n: m[0] for n, m in made.items()}, rounds, device, {n: m[1] for n, m in made.items()}
    )
    return _result(seconds, memory)


def _forward_backward(
    shape: Shape, folder: str, device: str, rounds: int, backend: Local, state: Any, batch: Batch
) -> dict[str, Any]:
    loss = ppo_clip()
    plain_model = _plain_module(shape, folder, device, state)

    def ours() -> None:
        # As after an update: the copies in compute dtype have to be made anew.
        backend._cast_from.clear()
        backend.forward_backward(state, batch, loss)

    def plain() -> None:
        with torch.no_grad():
            if shape.dtype != "float32":
                torch._foreach_copy_(list(plain_model.model.parameters()), list(state.params.values()))
        for part in split_by_tokens(batch, shape.budget):
            staged = Staged.of(part, torch.device(device))
            per_token, _ = loss(token_outputs(plain_model, staged, loss.needs), staged.batch)
            (staged.batch["loss_weight"] * per_token).sum().backward()
        plain_model.zero_grad(set_to_none=True)

    resident = _bytes(state.params) * (1.5 if shape.dtype != "float32" else 1.0)
    memory = {}
    for name, fn in (("ours", ours), ("plain", plain)):
        fn()
        memory[name] = resident + measure.peak_bytes(fn, device)
    return _result(measure.interleave({"ours": ours, "plain": plain, "control": plain}, rounds, device), memory)


def _plain_module(shape: Shape, folder: str, device: str, state: Any) -> Skeleton:
    """The same model with parameters of its own, used as any PyTorch module is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **LOCAL)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, trust_remote_code=False)
    module.config.use_cache = False
    module = module.to(device, DTYPES[shape.dtype]).eval()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(state.params[name])
            if p.dtype != torch.float32:
                p.grad_dtype = torch.float32
    return Skeleton(module, "lm")


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _result(seconds: dict[str, list[float]], memory: Mapping[str, float]) -> dict[str, Any]:
    return {
        "time": measure.ratio(seconds["ours"], seconds["plain"]),
        "control": measure.ratio(seconds["control"], seconds["plain"]),
        "memory": memory["ours"] / memory["plain"],
        "memory_mib": {name: round(value / 2**20, 1) for name, value in memory.items()},
        "median_ms": {name: 1e3 * sorted(calls)[len(calls) // 2] for name, calls in seconds.items()},
    }
