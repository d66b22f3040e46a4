"""The workload of the GPU benchmarks: Qwen's shapes with random weights, and one ragged PPO batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.state import Batch
from verl_fn.steps import aggregate

BUDGET = 16384  # tokens a micro-batch
PROMPT, SHORTEST, LONGEST, ROWS = 256, 128, 1792, 64
H200_FLOPS = 989e12  # dense bf16, a second

_QWEN2 = {
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # vLLM's attention on CPUs needs heads of 32.
    "small": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "0.5b": _QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": _QWEN2
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": _QWEN2
    | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 65536, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "vocab_size": 248320, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
}  # fmt: skip


def write_config(folder: Path, shape: str) -> Any:
    """The config of a shape, with a tokenizer of the printable characters; returns the config."""
    from transformers import AutoConfig

    tokenizer = char_tokenizer("".join(map(chr, range(33, 127))))
    fields = {"vocab_size": len(tokenizer)} | SHAPES[shape]
    kind = fields.pop("model_type", "qwen2")
    config = AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=2, pad_token_id=0, **fields)
    config.architectures = {"qwen2": ["Qwen2ForCausalLM"], "qwen3": ["Qwen3ForCausalLM"]}.get(kind)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


def write_model(folder: Path, shape: str, device: str) -> Path:
    """A random model of a shape, drawn where that is fast; see ``write_config``."""
    from transformers import AutoModelForCausalLM

    config = write_config(folder, shape)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def vocabulary(shape: str) -> int:
    """Token ids that rows are drawn from."""
    return SHAPES[shape].get("vocab_size", 64)


def rows(vocab: int) -> tuple[list[int], list[torch.Tensor]]:
    """Lengths of the responses and the rows: 64 prompts of 256 tokens with 128 to 1792 of response.

    No token is padding, whose embedding has a gradient in Megatron and none in transformers.
    """
    lengths = np.random.RandomState(0).randint(SHORTEST, LONGEST + 1, size=ROWS).tolist()
    generator = torch.Generator().manual_seed(0)
    return lengths, [torch.randint(0, vocab, (PROMPT + n,), generator=generator).clamp(min=1) for n in lengths]


def advantages(lengths: list[int]) -> torch.Tensor:
    """``[rows, longest response]``, standard normal."""
    return torch.randn(len(lengths), max(lengths), generator=torch.Generator().manual_seed(1))


def batch(vocab: int) -> Batch:
    """The rows with advantages, weighted by token-mean; ``old_log_probs`` are still to come."""
    lengths, tokens = rows(vocab)
    fields: dict[str, Sequence[Any]] = {
        "response_mask": [[0.0] * PROMPT + [1.0] * n for n in lengths],
        "advantages": [
            torch.cat([torch.zeros(PROMPT), a[:n]]) for a, n in zip(advantages(lengths), lengths, strict=True)
        ],
    }
    return aggregate(Batch.from_rows(tokens, fields), "token-mean")
