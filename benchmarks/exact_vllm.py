"""Where vLLM's batch-invariant kernels and the exact kernels of trainer and embedded engine part.

``verl-fn bench exact-vllm FOLDER`` runs vLLM with ``VLLM_BATCH_INVARIANT=1``, eagerly and in this process, on one
prompt. Each module is computed again from vLLM's own inputs with the exact kernels, and the elements that differ in
any bit are counted, so a difference is the module's own. Then vLLM draws responses, whose log-probs are compared with
the ones of an exact trainer and of another.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf import exact
from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.logprobs import on_cuda
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.local import Local
from verl_fn.backends.serving import model_of
from verl_fn.state import Batch
from verl_fn.steps import adamw

from . import measure

# The room of vLLM on the GPU, for its weights and cache.
SHARE = 0.3


def started(folder: str, length: int) -> Any:
    """vLLM with its batch-invariant kernels, in this process and without graphs, so that its modules can be read."""
    os.environ |= {
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    from vllm import LLM

    return LLM(
        folder, dtype="bfloat16", enforce_eager=True, max_model_len=length, gpu_memory_utilization=SHARE,
        enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip


def computed(llm: Any, prompt: Sequence[int]) -> dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
    """Each module of vLLM's model with what it was given for the prompt, and what it returned, in order."""
    from vllm import SamplingParams

    kept: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
    given: dict[str, tuple[Any, ...]] = {}
    handles: list[Any] = []

    def copied(values: Any) -> tuple[Any, ...]:
        values = values if isinstance(values, tuple) else (values,)
        return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)

    def watch(model: Any) -> None:
        for name, module in model.named_modules():
            if not name or next(module.children(), None) is not None:
                continue
            handles.append(module.register_forward_pre_hook(lambda _, args, n=name: given.update({n: copied(args)})))
            handles.append(
                module.register_forward_hook(lambda m, _, out, n=name: kept.update({n: (m, given[n], copied(out))}))
            )

    llm.apply_model(watch)
    llm.generate([{"prompt_token_ids": list(prompt)}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    for handle in handles:
        handle.remove()
    return kept


def again(name: str, module: Any, given: tuple[Any, ...], skeleton: Skeleton, packing: Packing) -> tuple[Tensor, ...]:
    """What the exact kernels compute from a module's inputs; nothing for modules without a kernel of theirs."""
    kernels, config = on_cuda(), skeleton.config
    dim = config.hidden_size // config.num_attention_heads
    leaf = name.rpartition(".")[2]
    if leaf.endswith("norm"):
        x, residual = given[0], given[1] if len(given) > 1 else None
        if residual is None:
            return (kernels.norm(x, module.weight, config.rms_norm_eps),)
        total = residual.clone()
        return kernels.add_norm(total, x, module.weight, config.rms_norm_eps), total
    if leaf.endswith("_proj"):
        return (kernels.product(given[0], module.weight, getattr(module, "bias", None)),)
    if leaf == "rotary_emb":
        body: Any = skeleton.model.base_model
        positions, *parts = given
        cos, sin = (t[0, :, None] for t in body.rotary_emb(parts[0][None], positions[None]))
        return tuple(_rotated(t.view(len(t), -1, dim), cos, sin).flatten(1) for t in parts)
    if leaf == "attn":
        q, k, v = (t.view(len(t), -1, dim) for t in given[:3])
        return (exact.packed_attention(q, k, v, packing, dim**-0.5, None).flatten(1),)
    if leaf == "act_fn":
        return (kernels.gated(*given[0].chunk(2, -1)),)
    if leaf == "logits_processor":
        return (kernels.product(given[1], given[0].weight),)
    return ()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def parts(llm: Any, skeleton: Skeleton, prompt: Sequence[int]) -> Iterator[tuple[str, int, int, float]]:
    """For each module its name, how many elements differ of how many, and the largest difference."""
    skeleton.move_buffers(torch.device("cuda"))
    packing = Packing.of(Batch.from_rows([prompt]), torch.device("cuda"))
    for name, (module, given, returned) in computed(llm, prompt).items():
        for ours, theirs in zip(again(name, module, given, skeleton, packing), returned, strict=False):
            theirs = theirs.reshape(ours.shape)
            differs = int((ours != theirs).sum())
            yield name, differs, ours.numel(), float((ours.float() - theirs.float()).abs().max())


def by_kind(rows: Sequence[tuple[str, int, int, float]]) -> dict[str, dict[str, Any]]:
    """Sums over the modules of the same name in every layer."""
    found: dict[str, dict[str, Any]] = {}
    for name, differing, count, largest in rows:
        kind = found.setdefault(name.rpartition(".")[2], {"differing": 0, "elements": 0, "largest": 0.0})
        kind["differing"] += differing
        kind["elements"] += count
        kind["largest"] = max(kind["largest"], largest)
    return found


def drawn(llm: Any, prompts: Sequence[Sequence[int]], length: int) -> tuple[Batch, Tensor]:
    """Responses of vLLM's own sampler, and its log-probs of their tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=length, logprobs=0, seed=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    rows, masks, found = [], [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        one = output.outputs[0]
        rows.append([*prompt, *one.token_ids])
        masks.append([0.0] * len(prompt) + [1.0] * len(one.token_ids))
        found += [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
    return Batch.from_rows(rows, {"response_mask": masks}), torch.tensor(found)


def compared(trainer: Local, batch: Batch, theirs: Tensor) -> dict[str, Any]:
    """How many log-probs of the responses differ from the trainer's, and by how much."""
    state = trainer.load_pretrained()
    ours = trainer.forward(state.params, batch, ("logprobs",)).logprobs[batch["response_mask"] != 0].cpu()
    gap = (ours - theirs).abs()
    return {
        "tokens": len(gap), "differing": int((gap != 0).sum()), "mean": float(gap.mean()), "largest": float(gap.max())
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench exact-vllm``: a line for each kind of module, and one for each trainer."""
    parser = argparse.ArgumentParser("verl-fn bench exact-vllm", description=__doc__)
    parser.add_argument("folder", help="a Hugging Face model folder of the Qwen2 or Llama shape")
    parser.add_argument("--tokens", type=measure.count, default=256, help="of the prompt whose modules are compared")
    parser.add_argument("--prompts", type=measure.count, default=128, help="that are drawn from")
    parser.add_argument("--response-tokens", type=measure.count, default=128)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args(argv)
    llm = started(args.folder, 2 * args.tokens + args.response_tokens)

    def trainer(on: bool) -> Local:
        return Local(args.folder, adamw(1e-4), dtype="bfloat16", device="cuda", exact=on)

    skeleton, _ = model_of(args.folder, device="cuda")
    generator = torch.Generator().manual_seed(0)
    size = args.prompts, args.tokens
    prompts = torch.randint(3, skeleton.config.vocab_size, size, generator=generator).tolist()
    with torch.inference_mode():
        rows = list(parts(llm, skeleton, prompts[0]))
    kinds = by_kind(rows)
    for kind, found in kinds.items():
        print(kind, found, flush=True)
    batch, theirs = drawn(llm, prompts, args.response_tokens)
    names: dict[str, Callable[[], Local]] = {"exact": lambda: trainer(True), "off": lambda: trainer(False)}
    log_probs = {name: compared(make(), batch, theirs) for name, make in names.items()}
    first = next((name for name, differing, *_ in rows if differing), None)
    print("log-probs", log_probs, "first module", first, flush=True)
    measure.write(args.json, "exact-vllm", "cuda", {"first": first, "modules": kinds, "log_probs": log_probs})
    return 0
