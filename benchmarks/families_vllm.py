"""Which families of causal language models vLLM samples from as ``local`` computes them.

Each family gets small random weights, of sizes that vLLM's kernels take. The engine's log-probs of the tokens that it
draws are compared with the trainer's, before and after an update: in fp32 on a CPU; in bf16 on a GPU, with the error
that training in bf16 has there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.local import Local
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.steps import adamw, aggregate, ppo_clip

from .families_page import BAR, RIGHT, WRONG

# In nats, beside three times the trainer's own error.
BARS = {"float32": BAR, "bfloat16": 1e-3}
MOVED = 0.1  # an update must change log-probs by more, so that an engine with old weights would be noticed


def sampled(folder: Path, device: str) -> dict[str, Any]:
    """Returns how log-probs of vLLM's draws differ from the trainer's. The engine lives as long as this process.

    Returns:
        ``errors``, for each of two versions: by how much the engine's and the trainer's log-probs differ from
        training in fp32, in nats, the largest one on a CPU and the mean on a GPU. ``moved`` is the mean change by an
        update.
    """
    from verl_fn.backends.vllm import Vllm

    dtype = "float32" if device == "cpu" else "bfloat16"
    options: dict[str, Any] = {"device": device, "max_tokens": 4096}
    exact, own = (Local(folder, adamw(1e-2), dtype=each, **options) for each in ("float32", dtype))
    state = exact.load_pretrained(folder)
    more = {} if device == "cpu" else {"engine_kwargs": {"kv_cache_memory_bytes": 2**29}}
    memory: dict[str, Any] = {"slots": 32, "max_length": 256, "gpu_memory_utilization": 0.05, **more}
    engine = Vllm(folder, device=device, dtype=dtype, enforce_eager=True, **memory)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, engine.vocab, (n,), generator=generator).tolist() for n in (1, 7, 40, 100) * 4]
    errors: list[tuple[float, ...]] = []
    for version in range(2):
        engine.publish(version, own.weights(state.params))
        batch = pack(engine.generate(requests_for(prompts, Sampling(64), Key.from_seed(3)), version=version))
        want, ours = (one.forward(state.params, batch, ["logprobs"]).logprobs for one in (exact, own))
        mask = batch["response_mask"].bool()
        gaps = [(found - want)[mask].abs() for found in (batch["rollout_log_probs"], ours)]
        errors.append(tuple(float(gap.max() if dtype == "float32" else gap.mean()) for gap in gaps))
        advantages = torch.randn(len(want), generator=torch.Generator().manual_seed(version))
        ready = aggregate(batch.with_tokens(old_log_probs=want, advantages=advantages))
        grads, _ = exact.forward_backward(state, ready, ppo_clip())
        state, _ = exact.apply_update(state, grads)
    moved = float((exact.forward(state.params, batch, ["logprobs"]).logprobs - want)[mask].abs().mean())
    right = all(engines <= 3 * trainers + BARS[dtype] for engines, trainers in errors) and moved > MOVED
    return {"outcome": RIGHT if right else WRONG, "dtype": dtype, "errors": errors, "moved": moved}
