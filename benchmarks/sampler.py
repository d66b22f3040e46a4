"""The embedded sampler against ``transformers.generate``: useful tokens a second on responses of mixed lengths.

The models count down: after the token for k comes the one for k - 1, and the end token after the one for 0. So the
last token of a prompt sets the length of its response, all responses end by the end token, and both engines do
the same work; sampling is real, its outcome all but certain. Embeddings and head are made so; all else is random.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from . import measure

PAD, BOS, EOS, ZERO = 0, 1, 2, 3
LONGEST, SHORTEST, PROMPTS = 96, 4, 64
PROMPT_LENGTHS = (8, 32)
ARCH = "qwen3"


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


# Widths of linear attention, as small as the other ones.
LINEAR = {**dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
          **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)}  # fmt: skip


def counting_model(size: Size, folder: Path, arch: str, seed: int = 0) -> Any:
    """A transformers model that counts down, saved into ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        arch, vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=2,
        head_dim=size.hidden // size.heads, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, **({} if arch == ARCH else LINEAR),
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
    from verl_fn.backends.weight_sync import Weights
    from verl_fn.state import Key, pack, requests_for

    sampler = Sampler(folder, slots=len(prompts))
    sampler.publish(0, Weights.of(dict(model.named_parameters())))

    def generate(seed: int) -> list[int]:
        batch = pack(sampler.generate(requests_for(prompts, Sampling(max_tokens=LONGEST), Key.from_seed(seed))))
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
        # Without top_k=0 transformers would cut to 50 tokens: more work, and another distribution.
        responses: Tensor = model.generate(
            padded, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=LONGEST,
            eos_token_id=EOS, pad_token_id=PAD,
        )[:, longest:]  # fmt: skip
        ended = responses == EOS
        assert bool(ended.any(1).all())
        return (ended.int().argmax(1) + 1).tolist()

    return generate


def compare(size: Size, pairs: int, arch: str = ARCH) -> dict[str, Any]:
    """Time both in interleaved pairs on the same responses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = counting_model(size, folder, arch)
        prompts = counting_prompts(size)
        ours, theirs = with_sampler(model, folder, prompts), with_transformers(model, prompts)
        lengths = ours(0)
        assert theirs(0) == lengths
        seconds = measure.interleave({"sampler": lambda: ours(1), "generate": lambda: theirs(1)}, pairs, "cpu")
    speedup = measure.ratio(seconds["generate"], seconds["sampler"])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "speedup": speedup,
        "bar": size.bar,
        "tokens_per_s": {name: sum(lengths) / statistics.median(calls) for name, calls in seconds.items()},
        "lengths": {"mean": statistics.mean(lengths), "min": min(lengths), "max": max(lengths)},
    }


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench sampler``: a table on the screen; exit status 1 where a bar is missed."""
    from verl_fn.backends.hf.folder import quiet

    parser = measure.parser("sampler", __doc__)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--pairs", type=measure.count, help="interleaved pairs; by default each size's own number")
    parser.add_argument("--arch", default=ARCH, help="transformers model type; the bars are of %(default)s")
    args = parser.parse_args(argv)
    with quiet():
        results = {name: compare(SIZES[name], args.pairs or SIZES[name].pairs, args.arch) for name in args.sizes}
    measure.write(args.json, "sampler", "cpu", {"prompts": PROMPTS, "arch": args.arch, "results": results})
    print(f"{'size':>6}{'sampler':>10}{'generate':>10} tok/s{'ratio':>8}{'95 % interval':>16}   bar")
    for name, r in results.items():
        rates, ratio = r["tokens_per_s"], r["speedup"]
        interval = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
        verdict = "held" if ratio["median"] >= r["bar"] else "MISSED"
        print(
            f"{name:>6}{rates['sampler']:10,.0f}{rates['generate']:10,.0f}      {ratio['median']:8.2f}"
            f"{interval:>16}   {r['bar']}: {verdict}"
        )
    return 0 if all(r["speedup"]["median"] >= r["bar"] for r in results.values()) else 1
