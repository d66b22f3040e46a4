"""The fast decoder: models of the Llama shape with as few operations a token as it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Complex64, Float, Int
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from verl_fn.backends.hf.attention import packed_attention
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.sampler.decoder import Decoder, GeneralDecoder, Where, attend, model_of
from verl_fn.state import Batch

LLAMA_SHAPES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary frequencies that are the same at every length.
FIXED_ROPES = ("default", "linear", "llama3", "yarn")
# Elements from which oneDNN's packed product beats the plain one on CPUs; 2.5 times from 2**17 on, on AMD's.
PACKED_FROM = 2**16


def decoder_for(folder: str | Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The fastest decoder that fits the model of a Hugging Face folder, without weights.

    Raises:
        ModelError: the folder or the architecture cannot be used.
    """
    skeleton, shapes = model_of(folder)
    kind = LlamaDecoder if misfit(skeleton.config, shapes) is None else GeneralDecoder
    return kind(skeleton, shapes, device, dtype)


def misfit(config: Any, shapes: Mapping[str, torch.Size]) -> str | None:
    """Why ``LlamaDecoder`` cannot run a model; None where it can.

    >>> from transformers import GPT2Config
    >>> misfit(GPT2Config(), {})
    'the model type is gpt2'
    """
    if config.model_type not in LLAMA_SHAPES:
        return f"the model type is {config.model_type}"
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}"
    rope = config.rope_parameters
    if rope.get("rope_type") not in FIXED_ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"the rotary embedding is {rope}"
    expected = {name: torch.Size(shape) for name, shape in _llama_shapes(config, shapes).items()}
    odd = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    return f"these parameters are not of the Llama shape: {', '.join(odd)}" if odd else None


def _llama_shapes(config: Any, found: Mapping[str, torch.Size]) -> dict[str, tuple[int, ...]]:
    """The parameters that a model must have; the biases of projections only where found."""
    H, I, V = config.hidden_size, config.intermediate_size, config.vocab_size
    dim = head_dim(config)
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, H)
    projections = {"q": (q, H), "k": (kv, H), "v": (kv, H), "o": (H, q)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{p}_proj.weight": shape for p, shape in projections.items()}
        for together in ("qkv", "o"):
            if f"{layer}self_attn.{together[0]}_proj.bias" in found:
                shapes |= {f"{layer}self_attn.{p}_proj.bias": projections[p][:1] for p in together}
        if config.model_type == "qwen3":
            shapes |= {f"{layer}self_attn.{p}_norm.weight": (dim,) for p in "qk"}
        shapes |= {f"{layer}mlp.{p}_proj.weight": (I, H) for p in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (H, I)
        shapes |= {f"{layer}{p}_layernorm.weight": (H,) for p in ("input", "post_attention")}
    return shapes


def head_dim(config: Any) -> int:
    """The size of an attention head, which some configs leave to be derived."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer of the Llama shape."""
    if config.model_type == "mistral":
        return config.sliding_window
    kinds = getattr(config, "layer_types", None)
    return config.sliding_window if kinds and kinds[layer] == "sliding_attention" else None


Product: TypeAlias = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """A layer's weights, fused, with the norms before its projections multiplied into them."""

    qkv: Product
    head_norm: Tensor | None
    out: Product
    gate_up: Product
    down: Product
    window: int | None


class Weights(NamedTuple):
    """All weights of a model of the Llama shape."""

    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Product


class LlamaDecoder:
    """Llama, Mistral, Qwen2 and Qwen3 without their modules: some fifteen operations a layer; see ``Decoder``."""

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shapes, self.device, self.dtype = shapes, device, dtype
        self.config = config = skeleton.config
        self.vocab = config.vocab_size
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
        self._root = config.hidden_size**0.5
        self._eps, self._head_eps = (
            torch.tensor((config.rms_norm_eps * size) ** 0.5, dtype=torch.float32, device=device)
            for size in (config.hidden_size, self.dim)
        )
        skeleton.move_buffers(device)
        body: Any = skeleton.model.base_model
        self._rotary = body.rotary_emb
        self._turns: Tensor = torch.empty(0, 1, self.dim // 2, dtype=torch.complex64, device=device)
        # [layers, keys and values, slots, kv_heads, places, dim]
        self._cache = torch.zeros(
            config.num_hidden_layers, 2, 0, self.kv_heads, 0, self.dim, dtype=dtype, device=device
        )
        self._weights: Weights | None = None

    def load(self, tensors: dict[str, Tensor]) -> None:
        # A layer's own tensors go as soon as they are fused, so no third set of weights ever exists.
        layers = [self._fused(tensors, i) for i in range(self.config.num_hidden_layers)]
        embed, head = tensors["model.embed_tokens.weight"], tensors.get("lm_head.weight")
        product = _product(embed, pack=False) if head is None else _product(head)
        self._weights = Weights(embed, layers, tensors["model.norm.weight"] * self._root, product)

    def reserve(self, slots: int, length: int) -> None:
        if slots > self._cache.shape[2] or length > self._cache.shape[4]:
            self.drop_cache()
            # Zeros, since a place that is hidden still meets a weight of zero, and zero times NaN is NaN.
            self._cache = self._cache.new_zeros(len(self._cache), 2, slots, self.kv_heads, length, self.dim)
        if length > len(self._turns):
            self._turns = self._turns_to(length)

    def prefill(self, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        where = Where.of_rows(rows, slots, self.device)
        return self._logits(self._hidden(rows.tokens.to(self.device), where)[rows.last.to(self.device)])

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        slots = torch.arange(len(tokens), device=self.device)
        return self._logits(self._hidden(tokens, Where(slots, positions, None, longest)))

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        self._cache[:, :, targets, :, :length] = self._cache[:, :, sources, :, :length]

    def drop_cache(self) -> None:
        self._cache = self._cache[:, :, :0, :, :0].clone()

    def drop_weights(self) -> None:
        self._weights = None

    def _hidden(self, tokens: Int[Tensor, " T"], where: Where) -> Float[Tensor, "T H"]:
        T, heads, kv_heads, dim = len(tokens), self.heads, self.kv_heads, self.dim
        eps, head_eps = self._eps, self._head_eps
        weights = self._loaded()
        x = embedding(tokens, weights.embed)
        turns = self._turns.index_select(0, where.positions)
        for layer, cache in zip(weights.layers, self._cache, strict=True):
            qkv = layer.qkv(_normed(x, eps)).view(T, heads + 2 * kv_heads, dim)
            q, qk, kv = qkv[:, :heads], qkv[:, : heads + kv_heads], qkv[:, heads:]
            if layer.head_norm is not None:
                qk.div_(_size(qk, head_eps)).mul_(layer.head_norm)
            _turn(qk, turns)
            cache.permute(1, 3, 0, 2, 4).index_put_((where.slots, where.positions), kv.view(T, 2, kv_heads, dim))
            if where.packing is None:
                found = attend(q, cache[0], cache[1], where, scaling=1.0, window=layer.window)
            else:
                q, k, v = (part.transpose(0, 1)[None] for part in (q, kv[:, :kv_heads], kv[:, kv_heads:]))
                found, _ = packed_attention(
                    self._rotary, q, k, v, None, packing=where.packing, scaling=1.0, sliding_window=layer.window
                )
            x = layer.out(found.reshape(T, heads * dim)).add_(x)
            gate, up = layer.gate_up(_normed(x, eps)).chunk(2, -1)
            x = layer.down(silu(gate).mul_(up)).add_(x)
        return x

    def _logits(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        weights = self._loaded()
        return weights.head(_normed(hidden, self._eps) * weights.norm).float()

    def _loaded(self) -> Weights:
        assert self._weights is not None, "load comes first"
        return self._weights

    def _fused(self, tensors: dict[str, Tensor], index: int) -> Layer:
        prefix = f"model.layers.{index}."
        take = lambda name: tensors.pop(prefix + name)  # noqa: E731
        before, after = (take(f"{p}_layernorm.weight") * self._root for p in ("input", "post_attention"))
        # The scale of scores goes into the queries: into their norm where they have one, else into their weights.
        scale, head_norm = self.dim**-0.5, None
        if prefix + "self_attn.q_norm.weight" in tensors:
            q_norm, k_norm = (_pairs(take(f"self_attn.{p}_norm.weight"), self.dim) for p in "qk")
            # The factors sqrt(dim), of a norm without it and of the scale, are each other's inverse.
            k_norm = k_norm * self.dim**0.5
            head_norm, scale = torch.cat([q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)]), 1.0

        def joined(kind: str) -> Tensor:
            q, k, v = (take(f"self_attn.{p}_proj.{kind}") for p in "qkv")
            return torch.cat([_pairs(q, self.dim) * scale, _pairs(k, self.dim), v])

        return Layer(
            _product(
                joined("weight") * before, joined("bias") if prefix + "self_attn.q_proj.bias" in tensors else None
            ),
            head_norm,
            _product(take("self_attn.o_proj.weight"), tensors.pop(prefix + "self_attn.o_proj.bias", None)),
            _product(torch.cat([take("mlp.gate_proj.weight"), take("mlp.up_proj.weight")]) * after),
            _product(take("mlp.down_proj.weight")),
            window_of(self.config, index),
        )

    def _turns_to(self, length: int) -> Complex64[Tensor, "length 1 half"]:
        places = torch.arange(length, device=self.device)[None]
        cos, sin = self._rotary(torch.zeros(1, device=self.device), places)
        return torch.complex(cos[0, :, None, : self.dim // 2], sin[0, :, None, : self.dim // 2])


def _pairs(t: Tensor, dim: int) -> Tensor:
    """Bring the two halves of each head together in pairs, along the first axis.

    transformers turns element i with element i + dim/2. As neighbours they are one complex number, turned in one
    operation; scores do not change where queries and keys are ordered alike.
    """
    return t.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2)


def _normed(x: Float[Tensor, "n H"], eps: Float[Tensor, ""]) -> Float[Tensor, "n H"]:
    """RMS norm but for a factor sqrt(H), which the weights behind it hold."""
    return (x / _size(x, eps)).to(x.dtype)


def _size(x: Float[Tensor, "*n H"], eps: Float[Tensor, ""]) -> Float[Tensor, "*n 1"]:
    """sqrt(sum of squares + eps H), of ``eps`` = sqrt(eps H); two operations, where torch's rms_norm takes ten."""
    return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32), eps)


def _turn(qk: Float[Tensor, "T heads dim"], turns: Complex64[Tensor, "T 1 half"]) -> None:
    """Apply the rotary embedding in place."""
    numbers = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))).mul_(turns)
    if qk.dtype != torch.float32:
        qk.copy_(torch.view_as_real(numbers).flatten(-2))


def _product(weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> Callable[[Tensor], Tensor]:
    """``x -> x @ weight.T + bias``; large ones in fp32 on a CPU through oneDNN, which is faster than MKL there."""
    large = weight.numel() >= PACKED_FROM and torch.backends.mkldnn.is_available()
    if not large or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return lambda x: linear(x, weight, bias)
    held = torch.ops.mkldnn._reorder_linear_weight(weight) if pack else weight
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, held, bias, "none", [], "")
