"""Tokens a second of an update with rows of 16k and 65k tokens, in the setting that prime-rl publishes figures of.

The setting: Qwen3-0.6B's shape, random weights and data, two rows of one length in micro-batches of one row, bf16
compute with fp32 masters, compiled layers, every layer recomputed in the backward pass, one GPU. prime-rl's figures
are from an H100. Operations are counted as prime-rl counts them, 6 N + 6 L h S a token for N parameters, L layers,
heads of h dimensions together and rows of S tokens, and MFU is their share of 989 TFLOP/s.

With ``--options``, the same update with options that save memory: inputs of layers in host memory, and AdamW's
averages in bf16.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn.state import Batch
from verl_fn.steps import adamw, aggregate, chain, clip_by_global_norm, constant, ppo_clip

from . import measure, workload

ROWS = 2
WARM_UPS = 4
# Tokens a second and MFU that prime-rl publishes for one H100, by the tokens of a row.
PRIME_RL = {16384: {"tokens_a_second": 11_900, "mfu": 0.111}, 65536: {"tokens_a_second": 10_150, "mfu": 0.268}}
BAR = 1.3
# What each option changes: of the backend, and of AdamW.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "offload": ({"checkpointing": "offload"}, {}),
    "moments": ({}, {"moments": torch.bfloat16}),
    "both": ({"checkpointing": "offload"}, {"moments": torch.bfloat16}),
}


def operations(config: Any, parameters: int, tokens: int) -> int:
    """Returns the operations for each token of a row of ``tokens`` tokens, forward and backward.

    Example:
        >>> import types
        >>> config = types.SimpleNamespace(num_hidden_layers=28, num_attention_heads=16, head_dim=128)
        >>> qwen3 = 596_049_920
        >>> [round(operations(config, qwen3, length) * speed / 989e12, 3)
        ...  for length, speed in ((16384, 11900), (65536, 10150))]
        [0.111, 0.268]
    """
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 6 * (parameters + config.num_hidden_layers * width * tokens)


def measured(folder: str, vocabulary: int, tokens: int, rounds: int, device: str, option: str) -> dict[str, Any]:
    """Seconds of each update after the first ones, and the peak of memory."""
    from verl_fn.backends.fsdp import Fsdp

    cuda = device == "cuda"
    of_backend, of_adamw = OPTIONS[option]
    settings: dict[str, Any] = {"checkpointing": True, "reshard_after_forward": False, "compile": cuda} | of_backend
    backend = Fsdp(
        folder, chain(clip_by_global_norm(1.0), adamw(constant(1e-6), **of_adamw)), max_tokens=tokens, device=device,
        dtype="bfloat16" if cuda else "float32", **settings,
    )  # fmt: skip
    state = backend.load_pretrained()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (ROWS, tokens), generator=generator)
    batch = aggregate(
        Batch.from_rows(list(ids), {
            "response_mask": [[0.0] + [1.0] * (tokens - 1)] * ROWS,
            "advantages": list(torch.randn(ROWS, tokens, generator=generator)),
            "old_log_probs": [[-math.log(vocabulary)] * tokens] * ROWS,
        }),
        "token-mean",
    )  # fmt: skip

    def update() -> None:
        nonlocal state
        grads, _ = backend.forward_backward(state, batch, ppo_clip())
        state, _ = backend.apply_update(state, grads)

    for _ in range(WARM_UPS - 1):
        update()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    # One more call that is not measured.
    seconds = measure.interleave({"update": update}, rounds, device)["update"]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"seconds": seconds, "peak_gib": peak, "parameters": sum(t.numel() for t in state.params.values())}


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench long-rows``: a line a length; exit status 1 where a bar is missed."""
    import torch.distributed as dist
    from transformers import AutoConfig

    parser = measure.parser("long-rows", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", nargs="+", type=measure.count, default=list(PRIME_RL))
    parser.add_argument("--rounds", type=measure.count, default=4)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=["plain"])
    args = parser.parse_args(argv)
    results, held = {}, True
    with tempfile.TemporaryDirectory() as folder:
        workload.write_model(Path(folder), args.shape, args.device)
        config = AutoConfig.from_pretrained(folder)
        exchange = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(exchange, f"file://{folder}/store", rank=0, world_size=1)
        for tokens, option in itertools.product(args.tokens, args.options):
            result = measured(folder, config.vocab_size, tokens, args.rounds, args.device, option)
            speed = ROWS * tokens / statistics.median(result["seconds"])
            mfu = operations(config, result["parameters"], tokens) * speed / workload.H200_FLOPS
            result |= {"tokens_a_second": speed, "mfu": mfu}
            line = f"{tokens:>6} tokens a row: {speed:>8,.0f} tok/s, MFU {mfu:.1%}, peak {result['peak_gib']:.1f} GiB"
            line += f", {option}" if args.options != ["plain"] else ""
            if args.shape == "qwen3-0.6b" and tokens in PRIME_RL and option == "plain":
                result["ratio"] = speed / PRIME_RL[tokens]["tokens_a_second"]
                held = held and result["ratio"] >= BAR
                line += f", {result['ratio']:.2f} of prime-rl's (bar {BAR})"
            print(line, flush=True)
            results[str(tokens) if option == "plain" else f"{tokens} {option}"] = result
        dist.destroy_process_group()
    about = {"shape": args.shape, "rows": ROWS, "bar": BAR, "prime_rl": PRIME_RL, "results": results}
    measure.write(args.json, "long-rows", args.device, about)
    return 0 if held else 1
