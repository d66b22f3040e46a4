"""How large a model is and what its passes need, without its weights."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from verl_fn.backends.hf.config import read_config
from verl_fn.backends.hf.logits import CUDA_CHUNK
from verl_fn.backends.hf.skeleton import DTYPES
from verl_fn.state import Key

from .folder import hollow
from .lora import Lora, target_layers

FLOAT32 = 4


def parameter_counts(folder: str | Path, head: str, lora: Lora | None = None) -> tuple[int, int]:
    """Counts the elements of a model, adapters included, and those that training changes.

    Args:
        folder: a Hugging Face model folder; its weights are not read.
        head: ``lm``, or ``value`` for a scalar head.
        lora: the adapters that are trained alone.
    """
    config = Path(folder, "config.json")
    return _counts(folder, head, lora, config.read_bytes() if config.is_file() else b"")


@functools.lru_cache(maxsize=64)
def _counts(folder: str | Path, head: str, lora: Lora | None, config: bytes) -> tuple[int, int]:
    """Counts as ``parameter_counts`` does; to make a model without weights takes long, and a run asks several times.

    Args:
        folder: the model folder.
        head: ``lm``, or ``value``.
        lora: the adapters.
        config: the contents of the folder's config.json, on which alone the counts depend.
    """
    skeleton = hollow(folder, head, key=Key.from_seed(0)).skeleton
    model, output = skeleton.model, skeleton.output_layer
    total = sum(p.numel() for p in model.parameters())
    if lora is None:
        return total, total
    trained = sum(p.numel() for p in output.parameters()) if head == "value" else 0
    layers = target_layers(model, lora, output, folder)
    adapters = sum(lora.rank * sum(model.get_submodule(name).weight.shape) for name in layers)
    return total + adapters, adapters + trained


_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.")


@attrs.frozen
class Stage:
    """The elements of the pipeline stage that has most, of a model that ranks share as Megatron does.

    Attributes:
        whole: of the stage.
        held: those that each of its ranks computes with.
        ends: those of ``held`` in embeddings, the output layer and the last norm.

    Example:
        >>> shapes = {"embed.weight": (50, 4), "layers.0.w": (8, 4), "layers.1.w": (8, 4)}
        >>> Stage.of(shapes, tied=True, tp=2, pp=2, ep=1)
        Stage(whole=232, held=116, ends=100)
    """

    whole: int
    held: int
    ends: int

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], *, tied: bool, tp: int, pp: int, ep: int) -> Stage:
        """Counts the elements of a stage: an equal part of the layers, and the larger of both ends of the model.

        Args:
            shapes: of all parameters, by canonical name.
            tied: whether the output layer is the embedding, of which the last of several stages has a copy.
            tp: ranks that share each matrix; other parameters are held by all of them.
            pp: the number of stages.
            ep: ranks that share the experts.
        """
        layers, experts, first, last = [0, 0], 0, [0, 0], [0, 0]
        for name, shape in shapes.items():
            count = math.prod(shape)
            if _EXPERT.search(name):
                experts += count
                continue
            part = layers if _LAYER.search(name) else first if "embed" in name else last
            part[0] += count
            part[1] += count // tp if len(shape) > 1 else count
        if pp == 1:
            first = [first[0] + last[0], first[1] + last[1]]
        else:
            first = max(first, [last[0] + first[0], last[1] + first[1]] if tied else last)
        whole = (layers[0] + experts) // pp + first[0]
        return cls(whole, (layers[1] + experts // ep) // pp + first[1], first[1])


def stage_of(folder: str | Path, head: str, *, tp: int, pp: int, ep: int) -> Stage:
    """Counts the elements of a folder's model without adapters; see ``Stage.of``."""
    skeleton = hollow(folder, head, key=Key.from_seed(0)).skeleton
    shapes = {name: tuple(p.shape) for name, p in skeleton.model.named_parameters()}
    tied = head == "lm" and bool(getattr(skeleton.model.config, "tie_word_embeddings", False))
    return Stage.of(shapes, tied=tied, tp=tp, pp=pp, ep=ep)


@attrs.frozen
class Footprint:
    """The sizes of a decoder that decide how many bytes its passes take on a GPU.

    A layer keeps for its backward pass, per token, the inputs and outputs of its two norms, queries, keys, values
    and the output of attention, and the gate, the input and the output of its MLP. FlashAttention keeps no scores.
    The peaks that were measured on an H200 are those of these counts within 6 %
    (``benchmarks/results/throughput_megatron_h200_*_fused.json``).

    Attributes:
        layers, hidden, vocab: sizes of the model.
        query, key_value: the widths of the queries, and of keys or values, of all heads.
        inner: the width of the MLP, summed over the experts of a token.

    Source:
        Korthikanti et al. 2022, arXiv 2205.05198, section 4, counts the same for another MLP.

    Example:
        >>> small = Footprint(layers=2, hidden=64, query=64, key_value=32, inner=192, vocab=50)
        >>> small.kept(10, width=2, checkpointing=False), small.kept(10, width=2, checkpointing=True)
        (40960, 23040)
    """

    layers: int
    hidden: int
    query: int
    key_value: int
    inner: int
    vocab: int

    @classmethod
    def of(cls, folder: str | Path) -> Footprint:
        """Reads the sizes from the config of a model folder."""
        text = read_config(folder).get_text_config()
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        if (experts := getattr(text, "num_experts_per_tok", None)) is not None:
            inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            query=heads * width,
            key_value=(getattr(text, "num_key_value_heads", None) or heads) * width,
            inner=inner,
            vocab=text.vocab_size,
        )

    def layer(self, tokens: int, width: int) -> int:
        """Returns the bytes that a layer keeps for its backward pass, with elements of ``width`` bytes."""
        return tokens * width * (4 * self.hidden + 2 * self.query + 2 * self.key_value + 3 * self.inner)

    def kept(self, tokens: int, width: int, *, checkpointing: bool) -> int:
        """Returns the bytes that all layers keep; with checkpointing their inputs alone, and all of one layer."""
        if checkpointing:
            return self.layers * tokens * width * self.hidden + self.layer(tokens, width)
        return self.layers * self.layer(tokens, width)

    def logits(self, tokens: int, width: int) -> int:
        """Returns the bytes of the largest part of the logits that exists at a time, on a GPU."""
        return min(tokens, max(16, CUDA_CHUNK // self.vocab)) * self.vocab * width

    def cache(self, tokens: int, width: int) -> int:
        """Returns the bytes of the keys and values of so many tokens."""
        return tokens * width * 2 * self.layers * self.key_value


def width_of(dtype: str) -> int:
    """Returns the bytes of an element.

    Example:
        >>> width_of("bfloat16")
        2
    """
    return DTYPES[dtype].itemsize
