"""Trainer and embedded engine with exact kernels: how many log-probs differ, where, and what exactness costs.

``verl-fn bench exact FOLDER`` draws responses to random prompts of mixed lengths, computes their log-probs by the
trainer, for several budgets of tokens and for rows by themselves, and counts the log-probs that differ in any bit;
then it updates the model, publishes it and does it again. If some differ, it compares the activations of every module
and names the first one that differs. The same rows with other kernels (``exact`` off) show the difference that
exactness removes. ``--cost`` measures rollout, forward pass and update of both in turns.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from verl_fn.backends.hf.exact import first_parting
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.state import Batch, Key, Request, Sampling, pack, requests_for
from verl_fn.steps import adamw, aggregate, cross_entropy, exact_gap

from . import measure

SHORTEST = 4
# The most tokens whose activations are compared.
TRACED = 400


@attrs.define(eq=False)
class Pair:
    """A trainer and an engine of one folder, and the trainer's state."""

    trainer: Local
    engine: Sampler
    state: Any
    version: int = -1

    @classmethod
    def of(cls, args: Any, exact: bool) -> Pair:
        trainer = Local(
            args.folder, adamw(args.lr), dtype=args.dtype, max_tokens=args.budgets[0], device=args.device,
            lora=Lora(args.lora_rank) if args.lora_rank else None, row_layout=args.layout,
            checkpointing=args.checkpointing, exact=exact,
        )  # fmt: skip
        engine = Sampler(args.folder, device=args.device, dtype=args.dtype, slots=args.slots, exact=exact)
        return cls(trainer, engine, trainer.load_pretrained())

    def publish(self) -> None:
        self.version += 1
        self.engine.publish(self.version, self.trainer.weights(self.state.params))

    def draw(self, requests: Sequence[Request]) -> Batch:
        return pack(self.engine.generate(requests, version=self.version))

    def log_probs(self, batch: Batch) -> torch.Tensor:
        return self.trainer.forward(self.state.params, batch, ("logprobs",)).logprobs

    def update(self, batch: Batch) -> None:
        weighted = aggregate(batch)
        grads, _ = self.trainer.forward_backward(self.state, weighted, cross_entropy())
        self.state, _ = self.trainer.apply_update(self.state, grads)


def asked(args: Any, vocab: int, version: int) -> list[Request]:
    """Requests for random prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(version)
    lengths = torch.randint(SHORTEST, args.prompt_tokens + 1, (args.prompts,), generator=generator).tolist()
    prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
    sampling = Sampling(args.response_tokens, n=args.n, temperature=args.temperature, top_k=args.top_k)
    return requests_for(prompts, sampling, Key.from_seed(version))


def compared(pair: Pair, batch: Batch, budgets: Sequence[int]) -> dict[str, Any]:
    """How many log-probs of a batch differ from the engine's, with each budget and for single rows."""
    differing, largest, tokens = 0, 0.0, 0
    parts = [(budget, batch) for budget in budgets] + [(budgets[0], batch.take([row])) for row in (0, len(batch) - 1)]
    for budget, part in parts:
        pair.trainer.max_tokens = budget
        count, most = (metric.value for metric in exact_gap(part, pair.log_probs(part)).values())
        differing, largest = differing + int(count), max(largest, most)
        tokens += int((part["response_mask"] != 0).sum())
    pair.trainer.max_tokens = budgets[0]
    gap = (pair.log_probs(batch) - batch[_engine(batch)])[batch["response_mask"] != 0].abs().mean()
    return {"tokens": tokens, "differing": differing, "largest": largest, "mean": float(gap)}


def _engine(batch: Batch) -> str:
    return "rollout_full_log_probs" if "rollout_full_log_probs" in batch else "rollout_log_probs"


def parting(pair: Pair, batch: Batch) -> str:
    """The first module in which the two part, on the shortest rows."""
    order = batch.lengths.argsort()
    chosen = order[: max(1, int((batch.lengths[order].cumsum(0) <= TRACED).sum()))]
    part = batch.take(chosen)
    found = first_parting(pair.trainer.activations(pair.state.params, part), pair.engine.activations(part))
    if found is None:
        return "nowhere on the shortest rows"
    return f"{found.name}: {found.tokens} of {found.compared} tokens, by up to {found.largest:.3g}"


def exactness(pair: Pair, args: Any) -> list[dict[str, Any]]:
    """Compares before and after each update; prints a line for each version."""
    rows: list[dict[str, Any]] = []
    for version in range(args.updates + 1):
        pair.publish()
        batch = pair.draw(asked(args, pair.engine.vocab, version))
        rows.append({"version": version, **compared(pair, batch, args.budgets)})
        if rows[-1]["differing"]:
            rows[-1]["first"] = parting(pair, batch)
        print(rows[-1], flush=True)
        if version < args.updates:
            pair.update(batch)
    return rows


def cost(pairs: dict[str, Pair], args: Any) -> dict[str, Any]:
    """Seconds of rollout, forward pass and update of each pair in turns, and their ratios."""
    requests = asked(args, pairs["exact"].engine.vocab, 0)
    for pair in pairs.values():
        pair.publish()
    batch = pairs["exact"].draw(requests)
    phases: dict[str, Any] = {
        "rollout": lambda pair: pair.draw(requests),
        "forward": lambda pair: pair.log_probs(batch),
        "update": lambda pair: pair.update(batch),
    }
    found = {}
    for phase, call in phases.items():
        variants: dict[str, Callable[[], Any]] = {name: functools.partial(call, pair) for name, pair in pairs.items()}
        seconds = measure.interleave(variants, args.rounds, args.device)
        medians = {name: statistics.median(of) for name, of in seconds.items()}
        found[phase] = {**medians, "ratio": medians["exact"] / medians["off"]}
        print(phase, {name: round(value, 3) for name, value in found[phase].items()}, flush=True)
    return found


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench exact``: a line for each version of the weights; exit status 1 if a log-prob differs."""
    parser = measure.parser("exact", __doc__)
    parser.add_argument("folder", help="a Hugging Face model folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default bfloat16 on a GPU")
    parser.add_argument("--prompts", type=measure.count, default=16)
    parser.add_argument("--n", type=measure.count, default=2, help="responses to each")
    parser.add_argument("--prompt-tokens", type=measure.count, default=48, help="of the longest prompt")
    parser.add_argument("--response-tokens", type=measure.count, default=32)
    parser.add_argument("--slots", type=measure.count, default=64)
    parser.add_argument("--budgets", type=measure.count, nargs="+", default=[4096, 16384], help="of micro-batches")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--layout", choices=("packed", "padded"), default="packed")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--rounds", type=measure.count, default=3)
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    pairs = {"exact": Pair.of(args, exact=True)}
    result: dict[str, Any] = {"exact": exactness(pairs["exact"], args)}
    if not args.cost:
        # Only the costs need both in memory.
        pairs.clear()
        gc.collect()
    pairs["off"] = Pair.of(args, exact=False)
    pairs["off"].publish()
    of_off = pairs["off"].draw(asked(args, pairs["off"].engine.vocab, 0))
    result["off"] = compared(pairs["off"], of_off, args.budgets)
    print("off", result["off"], flush=True)
    if args.cost:
        result["cost"] = cost(pairs, args)
    measure.write(args.json, "exact", args.device, result)
    held = not any(row["differing"] for row in result["exact"])
    print("equal in every bit" if held else "MISSED")
    return 0 if held else 1
