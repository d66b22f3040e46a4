"""The fast decoder: models of the Llama shape with as few operations for each token as possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Complex64, Float, Int
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from verl_fn.backends.hf import exact
from verl_fn.backends.hf.attention import packed_attention
from verl_fn.backends.hf.config import head_dim
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.protocol import Chunk
from verl_fn.backends.sampler.decoder import Where, attend
from verl_fn.state import Batch

# The size of weights from which oneDNN's packed product is faster on CPUs; on AMD's, 2.5 times from 2**17 on.
PACKED_FROM = 2**16


def misfit(config: Any, shapes: Mapping[str, torch.Size]) -> str | None:
    """Returns why ``LlamaDecoder`` cannot run a model; None where it can.

    Example:
        >>> from transformers import GPT2Config
        >>> misfit(GPT2Config(), {})
        'the model type is gpt2'
    """
    if (reason := exact.misfit(config)) is not None:
        return reason
    expected = {name: torch.Size(shape) for name, shape in _llama_shapes(config, shapes).items()}
    misfits = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    return f"these parameters are not of the Llama shape: {', '.join(misfits)}" if misfits else None


def _llama_shapes(config: Any, actual: Mapping[str, torch.Size]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that a model must have, with biases of projections only where ``actual`` has them."""
    H, inner, V = config.hidden_size, config.intermediate_size, config.vocab_size
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
            if f"{layer}self_attn.{together[0]}_proj.bias" in actual:
                shapes |= {f"{layer}self_attn.{p}_proj.bias": projections[p][:1] for p in together}
        if config.model_type == "qwen3":
            shapes |= {f"{layer}self_attn.{p}_norm.weight": (dim,) for p in "qk"}
        shapes |= {f"{layer}mlp.{p}_proj.weight": (inner, H) for p in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (H, inner)
        shapes |= {f"{layer}{p}_layernorm.weight": (H,) for p in ("input", "post_attention")}
    return shapes


def window_of(config: Any, layer: int) -> int | None:
    """Returns the sliding window of a layer of the Llama shape."""
    if config.model_type == "mistral":
        return config.sliding_window
    kinds = getattr(config, "layer_types", None)
    return config.sliding_window if kinds and kinds[layer] == "sliding_attention" else None


Product: TypeAlias = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """A layer's fused weights; the norms before its projections are multiplied into them."""

    qkv: Product
    head_norm: Tensor | None
    out: Product
    gate_up: Product
    down: Product
    window: int | None


class LlamaWeights(NamedTuple):
    """All weights of a model of the Llama shape, with its layers and its head as a decoder wants them."""

    embed: Tensor
    layers: list[Any]
    norm: Tensor
    head: Any


class Places:
    """The fused tensors of a model of the Llama shape, into whose rows its weights are written.

    Args:
        shapes: of the weights.
        paired: whether to change the order of rows, see ``_pair_rows``.

    Attributes:
        tensors: by name; ``qkv`` and ``gate_up`` of a layer are fused, the others are the model's own.
    """

    def __init__(
        self, config: Any, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device, *, paired: bool
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._where: dict[str, tuple[Tensor, Tensor | None]] = {}
        dim = head_dim(config)
        q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim

        def fused(name: str, parts: Mapping[str, Tensor | None], rows: Sequence[int]) -> None:
            rest = shapes[next(iter(parts))][1:]
            self.tensors[name] = whole = torch.empty(sum(rows), *rest, dtype=dtype, device=device)
            for part, place in zip(parts, whole.split(list(rows)), strict=True):
                self._where[part] = place, parts[part]

        turned = {count: _pair_rows(count, dim, device) if paired else None for count in (q, kv, dim)}
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            for kind in ("weight", "bias"):
                names = [f"{layer}self_attn.{p}_proj.{kind}" for p in "qkv"]
                if names[0] in shapes:
                    order = dict(zip(names, (turned[q], turned[kv], None), strict=True))
                    fused(f"{layer}qkv.{kind}", order, (q, kv, kv))
            for p in "qk":
                if f"{layer}self_attn.{p}_norm.weight" in shapes:
                    fused(f"{layer}{p}_norm", {f"{layer}self_attn.{p}_norm.weight": turned[dim]}, (dim,))
            both = [f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up")]
            fused(f"{layer}gate_up", dict.fromkeys(both), [config.intermediate_size] * 2)
        for name in shapes:
            if name not in self._where:
                fused(name, {name: None}, (shapes[name][0],))

    def write(self, chunk: Chunk) -> None:
        """Copies rows of a weight into its place."""
        place, order = self._where[chunk.name]
        rows = slice(chunk.start, chunk.start + len(chunk.values))
        if order is None:
            place[rows].copy_(chunk.values)
        else:
            place.index_copy_(0, order[rows], chunk.values.to(place.device, place.dtype))

    def views(self) -> dict[str, Tensor]:
        """Returns the weights by their own names; their rows have the model's order only without ``paired``."""
        return {name: place for name, (place, _) in self._where.items()}


def _pair_rows(count: int, dim: int, device: torch.device) -> Int[Tensor, " rows"]:
    """Returns the new place of each row of a projection, so that the two halves of each head form pairs.

    transformers rotates element i together with element i + dim/2. As neighbours they are one complex number that
    takes one operation to rotate. Scores do not change, since queries and keys have the same order.

    Example:
        >>> _pair_rows(8, 4, torch.device("cpu")).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    rows = torch.arange(count, device=device).view(-1, dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


class LlamaDecoder:
    """Runs Llama, Mistral, Qwen2 and Qwen3 in about fifteen operations a layer, without modules.

    Its methods are the same as ``GeneralDecoder``'s.
    """

    # Whether the two halves of a head lie as pairs in the fused weights.
    paired = True
    keeps_prompts = True
    intact = True  # it computes with copies

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shapes, self.device, self.dtype, self.model = shapes, device, dtype, skeleton.model
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
        self._weights: LlamaWeights | None = None
        self._places: Places | None = None

    def begin(self, frozen: Collection[str] = (), kept: Collection[str] = ()) -> None:
        self._weights = None
        if not self._places:
            self._places = Places(self.config, self.shapes, self.dtype, self.device, paired=self.paired)

    def write(self, chunk: Chunk) -> None:
        assert self._places is not None, "begin comes first"
        self._places.write(chunk)

    def finish(self) -> None:
        assert self._places is not None, "begin comes first"
        places, tensors = self._places, self._places.tensors
        layers = [self._layer(places, i) for i in range(self.config.num_hidden_layers)]
        embed, head = tensors["model.embed_tokens.weight"], tensors.get("lm_head.weight")
        product = _product(embed, pack=False) if head is None else _product(head)
        self._weights = LlamaWeights(embed, layers, tensors["model.norm.weight"] * self._root, product)
        if self.device.type == "cpu" and self.dtype == torch.float32:
            # Packed weights are copies, so the places would be a second set of weights.
            self._places = None

    def reserve(self, slots: int, length: int) -> None:
        if slots > self._cache.shape[2] or length > self._cache.shape[4]:
            self.drop_cache()
            # Zeros, since hidden places are multiplied by zero, and zero times NaN is NaN.
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
        self._weights = self._places = None

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
                attended = attend(q, cache[0], cache[1], where, scaling=1.0, window=layer.window)
            else:
                q, k, v = (part.transpose(0, 1)[None] for part in (q, kv[:, :kv_heads], kv[:, kv_heads:]))
                attended, _ = packed_attention(
                    self._rotary, q, k, v, None, packing=where.packing, scaling=1.0, sliding_window=layer.window
                )
            x = layer.out(attended.reshape(T, heads * dim)).add_(x)
            gate, up = layer.gate_up(_normed(x, eps)).chunk(2, -1)
            x = layer.down(silu(gate).mul_(up)).add_(x)
        return x

    def _logits(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        weights = self._loaded()
        return weights.head(_normed(hidden, self._eps) * weights.norm).float()

    def _loaded(self) -> LlamaWeights:
        assert self._weights is not None, "load comes first"
        return self._weights

    def _layer(self, places: Places, index: int) -> Layer:
        """Returns a layer of the written weights, with its norms and the scale of scores in its projections."""
        tensors, prefix = places.tensors, f"model.layers.{index}."
        before, after = (tensors[f"{prefix}{p}_layernorm.weight"] * self._root for p in ("input", "post_attention"))
        qkv, bias = tensors[prefix + "qkv.weight"], tensors.get(prefix + "qkv.bias")
        queries = self.heads * self.dim
        if prefix + "q_norm" in tensors:
            q_norm, k_norm = tensors[prefix + "q_norm"], tensors[prefix + "k_norm"]
            # The factors sqrt(dim), of a norm without it and of the scale, are each other's inverse.
            head_norm = torch.cat([q_norm.expand(self.heads, -1), (k_norm * self.dim**0.5).expand(self.kv_heads, -1)])
        else:
            head_norm = None
            for fused in (qkv, bias) if bias is not None else (qkv,):
                fused[:queries].mul_(self.dim**-0.5)
        return Layer(
            _product(qkv.mul_(before), bias),
            head_norm,
            _product(tensors[prefix + "self_attn.o_proj.weight"], tensors.get(prefix + "self_attn.o_proj.bias")),
            _product(tensors[prefix + "gate_up"].mul_(after)),
            _product(tensors[prefix + "mlp.down_proj.weight"]),
            window_of(self.config, index),
        )

    def _turns_to(self, length: int) -> Complex64[Tensor, "length 1 half"]:
        places = torch.arange(length, device=self.device)[None]
        cos, sin = self._rotary(torch.zeros(1, device=self.device), places)
        return torch.complex(cos[0, :, None, : self.dim // 2], sin[0, :, None, : self.dim // 2])


def _normed(x: Float[Tensor, "n H"], eps: Float[Tensor, ""]) -> Float[Tensor, "n H"]:
    """Returns the RMS norm without a factor sqrt(H); the weights after it contain the factor."""
    return (x / _size(x, eps)).to(x.dtype)


def _size(x: Float[Tensor, "*n H"], eps: Float[Tensor, ""]) -> Float[Tensor, "*n 1"]:
    """Returns sqrt(sum of squares + eps H), given sqrt(eps H), in two operations; torch's rms_norm takes ten."""
    return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32), eps)


def _turn(qk: Float[Tensor, "T heads dim"], turns: Complex64[Tensor, "T 1 half"]) -> None:
    """Applies the rotary embedding in place."""
    numbers = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))).mul_(turns)
    if qk.dtype != torch.float32:
        qk.copy_(torch.view_as_real(numbers).flatten(-2))


def _product(weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> Callable[[Tensor], Tensor]:
    """Returns ``x -> x @ weight.T + bias``; with oneDNN for large weights in fp32 on a CPU, where it beats MKL."""
    large = weight.numel() >= PACKED_FROM and torch.backends.mkldnn.is_available()
    if not large or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return lambda x: linear(x, weight, bias)
    tensors = torch.ops.mkldnn._reorder_linear_weight(weight) if pack else weight
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, tensors, bias, "none", [], "")
