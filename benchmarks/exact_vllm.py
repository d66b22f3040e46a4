"""Where vLLM with ``VLLM_BATCH_INVARIANT=1`` and the kernels of a trainer part.

``verl-fn bench exact-vllm FOLDER`` runs vLLM in this process on one prompt and keeps what each module was given and
what it returned. Each module is computed again from vLLM's own inputs, by the exact kernels and as transformers
computes it, and the elements that differ in any bit are counted, so a difference is the module's own. vLLM's modules
also compute the last rows by themselves, as a step of its decoding does. Then vLLM draws responses. Their log-probs
are compared with what vLLM's own prefill, an exact trainer and another trainer compute.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verl_fn.backends.hf import attention, exact
from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.logprobs import on_cuda
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.local import Local
from verl_fn.backends.serving import model_of
from verl_fn.state import Batch
from verl_fn.steps import adamw

from . import measure

# The room of vLLM's cache on the GPU, in bytes, and the share that has to be free.
CACHE, SHARE = 4 << 30, 0.1
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    # The engine's core in this process, so that its modules can be read.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# The rows of vLLM's prefill that its modules compute by themselves, too.
ROWS = (1, 16, 128)
Call = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
Compute = Callable[[str, Call], Iterator[tuple[Tensor, Tensor]]]


def started(folder: str, length: int, attend: str) -> Any:
    """vLLM with its batch-invariant kernels, without graphs."""
    os.environ |= ENVIRONMENT
    from vllm import LLM

    return LLM(
        folder, dtype="bfloat16", enforce_eager=True, max_model_len=length, kv_cache_memory_bytes=CACHE,
        gpu_memory_utilization=SHARE, enable_prefix_caching=False, skip_tokenizer_init=True,
        attention_config={"backend": attend},
    )  # fmt: skip


def computed(llm: Any, prompt: Sequence[int], steps: int = 1) -> tuple[dict[str, Call], list[int]]:
    """Each module of vLLM's model with what it was given and returned in the last of some steps, and the tokens."""
    kept: dict[str, Call] = {}
    given: dict[str, tuple[Any, ...]] = {}
    handles: list[Any] = []

    def copied(values: Any) -> tuple[Any, ...]:
        values = values if isinstance(values, tuple) else (values,)
        return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)

    def watch(model: Any) -> None:
        def before(name: str, args: Any) -> None:
            given[name] = copied(args)

        def after(name: str, module: Any, out: Any) -> None:
            kept[name] = module, given[name], copied(out)

        for name, module in model.named_modules():
            # A rotation has a module of its own for the last part of its work.
            if name and (name.endswith("rotary_emb") or next(module.children(), None) is None):
                handles.append(module.register_forward_pre_hook(lambda _, args, n=name: before(n, args)))
                handles.append(module.register_forward_hook(lambda m, _, out, n=name: after(n, m, out)))

    llm.apply_model(watch)
    (output,) = _generate(llm, [prompt], max_tokens=steps)
    for handle in handles:
        handle.remove()
    return kept, list(output.outputs[0].token_ids)


def _generate(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(seed=0, ignore_eos=True, detokenize=False, **sampling)
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def _plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float, window: None) -> Tensor:
    return attention.chosen(q, packing)(q, k, v, packing, scaling, window, None, None)


# The norm, product, activation and attention of each way to compute a model.
WAYS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "exact": (exact.rms_norm, exact.linear, lambda gate, up: on_cuda().gated(gate, up), exact.packed_attention),
    "transformers": (_plain_norm, F.linear, lambda gate, up: F.silu(gate) * up, _plain_attention),
}


def again(way: str, skeleton: Skeleton, packing: Packing, name: str, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """What a way computes from a module's inputs, and what vLLM's module returned."""
    yield from zip(_again(way, name, *call[:2], skeleton, packing), call[2], strict=False)


def _again(
    way: str, name: str, module: Any, given: tuple[Any, ...], skeleton: Skeleton, packing: Packing
) -> tuple[Tensor, ...]:
    norm, linear, gated, attend = WAYS[way]
    config = skeleton.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    leaf = name.rpartition(".")[2]
    if leaf.endswith("norm"):
        total = given[0] + given[1] if len(given) > 1 and given[1] is not None else given[0]
        return norm(total, module.weight, config.rms_norm_eps), total
    if leaf.endswith("_proj"):
        return (linear(given[0], module.weight, getattr(module, "bias", None)),)
    if leaf == "rotary_emb":
        body: Any = skeleton.model.base_model
        positions, *heads = given
        cos, sin = (t[0, :, None] for t in body.rotary_emb(heads[0][None], positions[None]))
        return tuple(_rotated(t.view(len(t), -1, dim), cos, sin).flatten(1) for t in heads)
    if leaf == "attn":
        q, k, v = (t.view(len(t), -1, dim) for t in given[:3])
        return (attend(q, k, v, packing, dim**-0.5, None).flatten(1),)
    if leaf == "act_fn":
        return (gated(*given[0].chunk(2, -1)),)
    if leaf == "logits_processor":
        return (linear(given[1], given[0].weight, None),)
    return ()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def by_kind(calls: dict[str, Call], compute: Compute) -> dict[str, Any]:
    """For each kind of module, over all layers: how many elements differ of how many, and the largest difference."""
    found: dict[str, Any] = {}
    for name, call in calls.items():
        for ours, theirs in compute(name, call):
            apart = (ours.float() - theirs.reshape(ours.shape).float()).abs()
            kind = found.setdefault(name.rpartition(".")[2], {"differing": 0, "elements": 0, "largest": 0.0})
            kind["differing"] += int((apart != 0).sum())
            kind["elements"] += apart.numel()
            kind["largest"] = max(kind["largest"], float(apart.max()))
    return found


def last_rows(rows: int, name: str, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """What vLLM's own module computes from the last rows by themselves, and what it computed of them among all."""
    module, given, returned = call
    if name.endswith(("norm", "_proj", "act_fn")):
        out = module(*(x[-rows:].clone() if isinstance(x, Tensor) else x for x in given))
        for ours, theirs in zip(out if isinstance(out, tuple) else (out,), returned, strict=True):
            if isinstance(ours, Tensor):
                yield ours, theirs[-rows:]


def decoding_parts(llm: Any, prompt: Sequence[int]) -> dict[str, Any]:
    """How many modules give a token other values in decoding than in a prefill, with equal inputs, and the first."""
    decoded, tokens = computed(llm, prompt, 2)
    prefilled, _ = computed(llm, [*prompt, tokens[0]])

    def equal(ones: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
        pairs = [(a, b) for a, b in zip(ones, others, strict=True) if isinstance(a, Tensor)]
        return all(torch.equal(a[-1], b[-1]) for a, b in pairs)

    apart = [
        name for name, (_, given, returned) in decoded.items()
        if equal(given, prefilled[name][1]) and not equal(returned, prefilled[name][2])
    ]  # fmt: skip
    return {"modules": len(apart), "of": len(decoded), "first": apart[:1]}


def drawn(llm: Any, prompts: Sequence[Sequence[int]], length: int) -> tuple[Batch, Tensor]:
    """Responses of vLLM's own sampler, and its log-probs of their tokens."""
    rows, masks, found = [], [], []
    for prompt, output in zip(prompts, _generate(llm, prompts, max_tokens=length, logprobs=0), strict=True):
        (one,) = output.outputs
        rows.append([*prompt, *one.token_ids])
        masks.append([0.0] * len(prompt) + [1.0] * len(one.token_ids))
        found += [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
    return Batch.from_rows(rows, {"response_mask": masks}), torch.tensor(found)


def _prefilled(llm: Any, batch: Batch) -> Iterator[float]:
    """vLLM's log-probs of the responses, all tokens of a row in one step."""
    ends = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        row, mask = batch.tokens[start:end].tolist(), batch["response_mask"][start:end].tolist()
        (output,) = _generate(llm, [row], max_tokens=1, prompt_logprobs=0)
        for token, step, counts in zip(row, output.prompt_logprobs, mask, strict=True):
            if counts:
                yield step[token].logprob


def gap(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """How many log-probs differ, and by how much.

    Example:
        >>> gap(torch.tensor([0.5, 1.0]), torch.tensor([0.5, 0.0]))
        {'tokens': 2, 'differing': 1, 'mean': 0.5, 'largest': 1.0}
    """
    apart = (ours - theirs).abs()
    return {
        "tokens": len(apart), "differing": int((apart != 0).sum()), "mean": float(apart.mean()),
        "largest": float(apart.max()),
    }  # fmt: skip


def _trainers_log_probs(folder: str, batch: Batch, on: bool) -> Tensor:
    trainer = Local(folder, adamw(1e-4), dtype="bfloat16", device="cuda", exact=on)
    found = trainer.forward(trainer.load_pretrained().params, batch, ("logprobs",)).logprobs
    return found[batch["response_mask"] != 0].cpu()


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench exact-vllm``: a line for each kind of module and way, and one for each source of log-probs."""
    parser = argparse.ArgumentParser("verl-fn bench exact-vllm", description=__doc__)
    parser.add_argument("folder", help="a Hugging Face model folder of the Qwen2, Qwen3 or Llama shape")
    parser.add_argument("--attention", default="FLASH_ATTN", help="vLLM's name of its attention (default FLASH_ATTN)")
    parser.add_argument("--tokens", type=measure.count, default=256, help="of the prompt whose modules are compared")
    parser.add_argument("--prompts", type=measure.count, default=128, help="that are drawn from")
    parser.add_argument("--response-tokens", type=measure.count, default=128)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args(argv)
    llm = started(args.folder, args.tokens + args.response_tokens + 2, args.attention)
    skeleton, _ = model_of(args.folder, device="cuda")
    skeleton.move_buffers(torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, skeleton.config.vocab_size, (args.prompts, args.tokens), generator=generator).tolist()
    with torch.inference_mode():
        calls, _ = computed(llm, prompts[0])
        packing = Packing.of(Batch.from_rows([prompts[0]]), torch.device("cuda"))
        modules = {way: by_kind(calls, functools.partial(again, way, skeleton, packing)) for way in WAYS}
        for rows in ROWS:
            modules[f"vLLM, {rows} rows"] = by_kind(calls, functools.partial(last_rows, rows))
        decoding = decoding_parts(llm, prompts[0])
    print("decoding against prefill", decoding, flush=True)
    for way, kinds in modules.items():
        for kind, found in kinds.items():
            print(way, kind, found, flush=True)
    batch, theirs = drawn(llm, prompts, args.response_tokens)
    log_probs = {"vLLM's prefill": gap(torch.tensor(list(_prefilled(llm, batch))), theirs)}
    for name, on in (("exact", True), ("transformers", False)):
        log_probs[name] = gap(_trainers_log_probs(args.folder, batch, on), theirs)
    for name, found in log_probs.items():
        print("log-probs", name, found, flush=True)
    measure.write(args.json, "exact-vllm", "cuda", {"modules": modules, "decoding": decoding, "log_probs": log_probs})
    return 0
