"""The embedded sampler against ``transformers.generate``: useful tokens a second on responses of mixed lengths.

``python -m verl_fn.benchmarks.sampler --json out.json``

The models count down: after the token for k comes the one for k - 1, and the end token after the one for 0. So the
last token of a prompt sets the length of its response, all responses end by the end token, and both engines do
the same work; sampling is real, its outcome all but certain. Embeddings and head are made so; all else is random.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

PAD, BOS, EOS, ZERO = 0, 1, 2, 3
LONGEST, SHORTEST, PROMPTS = 96, 4, 64
PROMPT_LENGTHS = (8, 32)


@attrs.frozen
class Size:
    """A model to measure, how many pairs to time, and the ratio that it must reach."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    pairs: int
    bar: float


SIZES = {
    "0.1M": Size(layers=2, hidden=64, heads=4, vocab=128, pairs=20, bar=1.5),
    "25M": Size(layers=12, hidden=384, heads=6, vocab=5120, pairs=8, bar=1.2),
}


def counting_model(size: Size, folder: Path, arch: str, seed: int = 0) -> Any:
    """A transformers model that counts down, saved into ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        arch, vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=2,
        head_dim=size.hidden // size.heads, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        embed, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
        embed.normal_()
    for k in range(LONGEST):
        head[EOS if k == 0 else ZERO + k - 1] = embed[ZERO + k] * (40.0 / size.hidden)
    model.save_pretrained(folder)
    return model


def counting_prompts(size: Size, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths whose responses have lengths spread evenly from ``SHORTEST`` to ``LONGEST``."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.linspace(SHORTEST, LONGEST, PROMPTS).round().astype(int))
    filler = [rng.integers(ZERO + LONGEST, size.vocab, n) for n in rng.integers(*PROMPT_LENGTHS, PROMPTS)]
    return [[BOS, *row.tolist(), ZERO + int(n) - 1] for row, n in zip(filler, lengths, strict=True)]


def with_sampler(model: Any, folder: Path, prompts: Sequence[Sequence[int]]) -> Callable[[int], list[int]]:
    """A function from a seed to response lengths."""
    from verl_fn.backends.protocol import Sampling
    from verl_fn.backends.sampler import Sampler
    from verl_fn.state import Key

    sampler = Sampler(folder, slots=len(prompts))
    sampler.publish(0, model.named_parameters())

    def generate(seed: int) -> list[int]:
        batch = sampler.generate(prompts, Sampling(max_tokens=LONGEST), Key.from_seed(seed))
        assert bool(batch["finished"].all())
        return (batch.lengths - batch["prompt_length"]).tolist()

    return generate


def with_transformers(model: Any, prompts: Sequence[Sequence[int]]) -> Callable[[int], list[int]]:
    """The same with ``generate`` as it is plainly used: one batch padded on the left."""
    longest = max(len(p) for p in prompts)
    padded = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in prompts])
    mask = (padded != PAD).long()

    def generate(seed: int) -> list[int]:
        torch.manual_seed(seed)
        # Without top_k=0 transformers would cut to 50 tokens, which is more work and another distribution.
        found: Tensor = model.generate(
            padded, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=LONGEST,
            eos_token_id=EOS, pad_token_id=PAD,
        )[:, longest:]  # fmt: skip
        ended = found == EOS
        assert bool(ended.any(1).all())
        return (ended.int().argmax(1) + 1).tolist()

    return generate


def compare(size: Size, arch: str, pairs: int | None = None) -> dict[str, Any]:
    """Time both in interleaved pairs, each pair in the other order than the last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = counting_model(size, folder, arch)
        prompts = counting_prompts(size)
        engines = {"sampler": with_sampler(model, folder, prompts), "transformers": with_transformers(model, prompts)}
        rates: dict[str, list[float]] = {engine: [] for engine in engines}
        lengths: dict[str, list[int]] = {engine: generate(0) for engine, generate in engines.items()}
        for pair in range(pairs or size.pairs):
            for engine in sorted(engines, reverse=pair % 2 == 1):
                start = time.perf_counter()
                lengths[engine] = engines[engine](pair)
                rates[engine].append(sum(lengths[engine]) / (time.perf_counter() - start))
    ratios = np.array(rates["sampler"]) / np.array(rates["transformers"])
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **attrs.asdict(size),
        "pairs": len(ratios),
        "ratio": float(np.median(ratios)),
        "interval_95": [float(low), float(high)],
        "passes": bool(np.median(ratios) >= size.bar),
        "tokens_per_s": {engine: float(np.median(found)) for engine, found in rates.items()},
        "response_lengths": {
            engine: {"mean": float(np.mean(found)), "min": min(found), "max": max(found)}
            for engine, found in lengths.items()
        },
        "ratios": ratios.round(3).tolist(),
    }


def run(sizes: Sequence[str] = tuple(SIZES), *, arch: str = "qwen3", pairs: int | None = None) -> dict[str, Any]:
    """Measure these sizes with as many threads as torch now has.

    Args:
        arch: the architecture, one that both run.
        pairs: how many; by default each size's own number.
    """
    import transformers

    from verl_fn.backends.model import quiet

    with quiet():
        results = {name: compare(SIZES[name], arch, pairs) for name in sizes}
    return {
        "benchmark": "sampler",
        "arch": arch,
        "prompts": PROMPTS,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "results": results,
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"useful tokens/s, {report['prompts']} prompts, {report['arch']}, {report['threads']} threads",
        f"{'size':>6} {'sampler':>9} {'generate':>9} {'ratio':>6} {'95 %':>13} {'bar':>5}  lengths",
    ]
    for name, r in report["results"].items():
        low, high = r["interval_95"]
        rates, lengths = r["tokens_per_s"], r["response_lengths"]["sampler"]
        lines.append(
            f"{name:>6} {rates['sampler']:9.0f} {rates['transformers']:9.0f} {r['ratio']:6.2f} "
            f"{f'{low:.2f} to {high:.2f}':>13} {r['bar']:5.1f}  "
            f"{lengths['min']} to {lengths['max']}, mean {lengths['mean']:.1f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="The embedded sampler against transformers.generate.")
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--arch", default="qwen3")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    report = run(args.sizes, arch=args.arch, pairs=args.pairs)
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(r["passes"] for r in report["results"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
