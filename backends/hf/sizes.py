"""How large a model is and what its passes need, without its weights."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import attrs

from verl_fn.backends.hf.logprobs import CUDA_CHUNK
from verl_fn.backends.hf.skeleton import DTYPES
from verl_fn.state import Key

from .folder import hollow
from .lora import Lora, target_layers


@attrs.frozen
class ModelSizes:
    """The elements of a model, and an estimate of the bytes that its passes take on a GPU.

    A layer keeps for its backward pass, per token, the inputs and outputs of its two norms, queries, keys, values
    and the output of attention, and the gate, the input and the output of its MLP. FlashAttention keeps no scores.
    Peaks measured on an H200 are within 6 % of these counts
    (``benchmarks/results/throughput_megatron_h200_*_fused.json``).

    Attributes:
        total: elements of all parameters, adapters included.
        trained: elements that training changes, adapters included.
        experts: elements of the experts of all layers.
        ends: elements outside of layers: embeddings, output layer and last norm.
        adapted: elements of the weights that adapters are added to.
        buffers: elements of the buffers that a model's files contain.
        config: the config of the text model.

    Source:
        Korthikanti et al. 2022, arXiv 2205.05198, section 4, counts the same for another MLP.
    """

    total: int
    trained: int
    experts: int
    ends: int
    adapted: int
    buffers: int
    config: Any = attrs.field(repr=False, eq=False)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.config.num_hidden_layers)

    @property
    def key_value(self) -> int:
        """The width of the keys, or of the values, of all heads."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        return int(heads * self._head)

    @property
    def _head(self) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    def layer(self, tokens: int, width: int) -> int:
        """Returns the bytes that a layer keeps for its backward pass, with elements of ``width`` bytes."""
        text = self.config
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        if (experts := getattr(text, "num_experts_per_tok", None)) is not None:
            inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
        query = text.num_attention_heads * self._head
        return int(tokens * width * (4 * text.hidden_size + 2 * query + 2 * self.key_value + 3 * inner))

    def kept(self, tokens: int, width: int, *, checkpointing: bool, offload: bool = False) -> int:
        """Returns the bytes that all layers keep; with checkpointing their inputs only, and all of one layer.

        With ``offload`` the inputs are in host memory, but for the ones of two layers.
        """
        if checkpointing:
            inputs = min(2, self.layers) if offload else self.layers
            return inputs * tokens * width * int(self.config.hidden_size) + self.layer(tokens, width)
        return self.layers * self.layer(tokens, width)

    def logits(self, tokens: int, width: int) -> int:
        """Returns the bytes of the largest part of the logits that exists at a time, on a GPU."""
        vocab = int(self.config.vocab_size)
        return min(tokens, max(16, CUDA_CHUNK // vocab)) * vocab * width

    def cache(self, tokens: int, width: int) -> int:
        """Returns the bytes of the keys and values of ``tokens`` tokens."""
        return tokens * width * 2 * self.layers * self.key_value


def model_sizes(folder: str | Path, head: str, lora: Lora | None = None) -> ModelSizes:
    """Counts the elements of a model, adapters included.

    Args:
        folder: a Hugging Face model folder; its weights are not read.
        head: ``lm``, or ``value`` for a scalar head.
        lora: the adapters; training changes them and a value head only.
    """
    config = Path(folder, "config.json")
    return _model_sizes(folder, head, lora, config.read_bytes() if config.is_file() else b"")


# To make a model without weights takes long, and a run asks several times. `config`: the contents of config.json.
@functools.lru_cache(maxsize=64)
def _model_sizes(folder: str | Path, head: str, lora: Lora | None, config: bytes) -> ModelSizes:
    skeleton = hollow(folder, head, key=Key.from_seed(0)).skeleton
    model, output = skeleton.model, skeleton.output_layer
    counts = {name: p.numel() for name, p in model.named_parameters()}
    total = trained = sum(counts.values())
    adapted = 0
    if lora is not None:
        layers = target_layers(model, lora, output, folder)
        weights = [model.get_submodule(name).weight for name in layers]
        adapters, adapted = sum(lora.rank * sum(w.shape) for w in weights), sum(w.numel() for w in weights)
        total += adapters
        trained = adapters + (sum(p.numel() for p in output.parameters()) if head == "value" else 0)
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    ends = sum(count for name, count in counts.items() if not re.search(r"\.\d+\.", name))
    buffers = sum(b.numel() for b in skeleton.constants.values())
    return ModelSizes(total, trained, experts, ends, adapted, buffers, model.config.get_text_config())


def width_of(dtype: str) -> int:
    """Returns the bytes of an element.

    Example:
        >>> width_of("bfloat16")
        2
    """
    return DTYPES[dtype].itemsize
