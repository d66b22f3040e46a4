"""Forward kernels whose result for a token does not depend on the other tokens of a call.

Trainer and rollout engine that compute with them give log-probs that are equal in every bit, although one computes
whole micro-batches and the other a token of each row at a time. ``adopt`` makes a model compute with them.

* A matrix product adds in one order, whatever the number of rows. On a CPU it is computed in tiles of so many rows,
  since a product of one shape rounds each row the same; on CUDA by a Triton kernel that never splits the sum, or by
  the library's if it adds in the same order.
* Attention reads keys in blocks of one size from the start of a row on, in order. A block that is hidden from a
  query adds exact zeros, so neither padding nor the length of a cache matters.
* Norms, activations and log-probs are reduced row by row.

Only forward passes need it: backward passes are torch's own. ``Activations`` has the activations of every module by
token, to find where two computations of the same rows part.

Source:
    He et al. 2025, "Defeating Nondeterminism in LLM Inference" (Thinking Machines).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from verl_fn.backends.hf import attention as packed
from verl_fn.backends.hf import logprobs
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.outputs import Staged, token_outputs
from verl_fn.backends.hf.skeleton import Skeleton

NAME = "verl_fn_exact"
# The rows of a product, the queries of a tile and the keys of a block; a block is a multiple of a tile.
ROWS, QUERIES, KEYS = 32, 8, 32
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Kinds of rotary embeddings whose frequencies are the same for every length.
ROPES = ("default", "linear", "llama3", "yarn")
ALIGNMENT = 64  # bytes

LOG_PROBS = "log_probs"


class ExactError(ModelError):
    """Log-probs of trainer and engine cannot be equal in every bit, or are not."""


def check(skeleton: Skeleton, dtype: torch.dtype, device: torch.device, folder: object) -> None:
    """Raises ExactError for a model without kernels of this module for all that it computes."""
    reason = misfit(skeleton.config)
    if reason is None and device.type == "cpu" and dtype != torch.float32:
        reason = (
            f"on a CPU it computes in {str(dtype).removeprefix('torch.')}; set actor.dtype and rollout.dtype=float32"
        )
    if reason is None and skeleton.head != "lm":
        reason = "it is no language model"
    if reason is not None:
        raise ExactError(
            f"{folder}: rollout.exact has kernels for {', '.join(FAMILIES)} only, and {reason}; set rollout.exact=off"
        )


def misfit(config: Any) -> str | None:
    """Returns why a model is not computed as Llama is; None if it is.

    Example:
        >>> from transformers import GPT2Config
        >>> misfit(GPT2Config())
        'the model type is gpt2'
    """
    if config.model_type not in FAMILIES:
        return f"the model type is {config.model_type}"
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}"
    rope = config.rope_parameters
    if rope.get("rope_type") not in ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"the rotary embedding is {rope}"
    return None


# Matrix products


def linear(
    x: Float[Tensor, "*T K"], weight: Float[Tensor, "N K"], bias: Tensor | None = None
) -> Float[Tensor, "*T N"]:
    """Returns ``x @ weight.T + bias``; each row of the result depends on its row of ``x`` only, in every bit.

    Raises:
        ExactError: this machine rounds a row by its place among others.

    Example:
        >>> x, w = torch.randn(40, 8), torch.randn(5, 8)
        >>> torch.equal(linear(x, w)[33], linear(x[33:34], w)[0])
        True
    """
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = _aligned(x.reshape(-1, x.shape[-1]))
        out = logprobs.on_cuda().product(rows, weight, bias) if x.is_cuda else _by_tiles(rows, weight, bias)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            grad @ weight if for_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _by_tiles(x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"], bias: Tensor | None) -> Float[Tensor, "T N"]:
    _check_product(*weight.shape, torch.get_num_threads())
    out, turned = x.new_empty(len(x), len(weight)), weight.t()
    whole = len(x) // ROWS * ROWS
    for start in range(0, whole, ROWS):
        torch.mm(x[start : start + ROWS], turned, out=out[start : start + ROWS])
    if whole < len(x):
        last = pad(x[whole:], (0, 0, 0, ROWS - len(x) + whole))
        out[whole:] = torch.mm(last, turned)[: len(x) - whole]
    return out if bias is None else out.add_(bias)


@functools.cache
def _check_product(N: int, K: int, threads: int) -> None:
    """Checks that the product of a tile rounds a row the same at every place; no library promises it."""
    generator = torch.Generator().manual_seed(N * K)
    weight = torch.randn(min(N, 4096), K, generator=generator).t()
    tile = torch.randn(ROWS, K, generator=generator)
    order = torch.randperm(ROWS, generator=generator)
    if not torch.equal(torch.mm(tile[order], weight), torch.mm(tile, weight)[order]):
        raise ExactError(
            f"the matrix product of this CPU rounds a row of [{ROWS}, {K}] x [{K}, {N}] by its place among the "
            "others, so rollout.exact is impossible here; set rollout.exact=off"
        )


def _aligned(rows: Tensor) -> Tensor:
    """Returns contiguous rows; kernels may round differently where memory is not aligned."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


# Norms and activations


def rms_norm(x: Float[Tensor, "*T H"], weight: Float[Tensor, " H"], eps: float) -> Float[Tensor, "*T H"]:
    """Returns transformers' RMS norm: in fp32, cast, and then times the weight.

    Example:
        >>> rms_norm(torch.full((1, 4), 2.0), torch.ones(4), 0.0)
        tensor([[1., 1., 1., 1.]])
    """
    if not x.is_cuda:
        return _norm(x, weight, eps)
    kernel = functools.partial(logprobs.on_cuda().norm, eps=eps)
    return _AsOther.apply(kernel, functools.partial(_norm, eps=eps), x, weight)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class _AsOther(torch.autograd.Function):
    """A kernel's result, with the gradients of another function that computes the same of the same tensors."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], other: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.other = other
        return kernel(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: a checkpointed layer computes them again.
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(need) for t, need in zip(saved, needed, strict=True)]
            of_needed = iter(torch.autograd.grad(ctx.other(*inputs), [t for t in inputs if t.requires_grad], grad))
        return None, None, *(next(of_needed) if need else None for need in needed)


def silu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(x); torch's own rounds the last elements of a tensor otherwise on a CPU.

    Example:
        >>> silu(torch.zeros(1))
        tensor([0.])
    """
    return nn.functional.silu(x) if x.is_cuda else x / (1.0 + torch.exp(-x))


# Attention


def rows_attention(
    q: Float[Tensor, "R heads L dim"],
    k: Float[Tensor, "R kv L dim"],
    v: Float[Tensor, "R kv L dim"],
    scaling: float,
    window: int | None,
) -> Float[Tensor, "R heads L dim"]:
    """Returns causal attention of rows that all begin at place 0; rows may be padded at their end.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 40, 4)
        >>> torch.equal(rows_attention(q, k, v, 0.5, None)[:, :, :9], rows_attention(q[:, :, :9], k, v, 0.5, None))
        True
    """
    rows, heads, length, dim = q.shape
    kv, group = k.shape[1], heads // k.shape[1]
    tiles = -(-length // QUERIES)
    q = pad(q, (0, 0, 0, tiles * QUERIES - length)).view(rows, kv, group, tiles, QUERIES, dim)
    q = q.permute(0, 1, 3, 4, 2, 5).reshape(rows * kv, tiles, QUERIES * group, dim)
    places = torch.arange(tiles * QUERIES, device=q.device).view(1, tiles, QUERIES)
    k, v = (pad(x.flatten(0, 1), (0, 0, 0, -length % KEYS)) for x in (k, v))
    out = _over_blocks(q, k, v, places.repeat_interleave(group, -1), scaling, window)
    out = out.view(rows, kv, tiles, QUERIES, group, dim).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(rows, heads, tiles * QUERIES, dim)[:, :, :length]


def step_attention(
    q: Float[Tensor, "n heads dim"],
    keys: Float[Tensor, "n kv places dim"],
    values: Float[Tensor, "n kv places dim"],
    positions: Int[Tensor, " n"],
    scaling: float,
    window: int | None,
) -> Float[Tensor, "n heads dim"]:
    """Returns the attention of one token of each row over a cache; its places are a multiple of ``KEYS``.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 40, 4)
        >>> cache = [torch.nn.functional.pad(x, (0, 0, 0, 24)) for x in (k, v)]
        >>> step = step_attention(q[:, :, 9], *cache, torch.tensor([9]), 0.5, None)
        >>> torch.equal(step, rows_attention(q, k, v, 0.5, None)[:, :, 9])
        True
    """
    if q.is_cuda:
        slots = torch.arange(len(q), device=q.device)
        lanes = slots, slots, torch.zeros_like(slots)
        return logprobs.on_cuda().step_attention(q, keys, values, positions, lanes, scaling, window)
    n, heads, dim = q.shape
    kv = keys.shape[1]
    group = heads // kv
    tile = pad(q.reshape(n * kv, 1, group, dim), (0, 0, 0, (QUERIES - 1) * group))
    places = positions.repeat_interleave(kv)[:, None, None]
    out = _over_blocks(tile, keys.flatten(0, 1), values.flatten(0, 1), places, scaling, window)
    return out[:, 0, :group].reshape(n, heads, dim)


def _over_blocks(
    q: Float[Tensor, "N tiles W dim"],
    keys: Float[Tensor, "N places dim"],
    values: Float[Tensor, "N places dim"],
    places: Int[Tensor, "N tiles W"],
    scaling: float,
    window: int | None,
) -> Float[Tensor, "N tiles W dim"]:
    """Adds the blocks of keys in order. Tiles that lie before a block see nothing of it, and skip it."""
    N, tiles, W, dim = q.shape
    top = q.new_full((N, tiles, W, 1), -torch.inf)
    mass, total = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, keys.shape[1], KEYS):
        first = start // QUERIES if tiles > 1 else 0
        if first >= tiles:
            break
        at = places[:, first:, :, None]
        block = torch.arange(start, start + KEYS, device=q.device)
        seen = block <= at if window is None else (block <= at) & (block > at - window)
        k, v = (
            x[:, None, start : start + KEYS].expand(-1, tiles - first, -1, -1).reshape(-1, KEYS, dim)
            for x in (keys, values)
        )
        scores = torch.bmm(q[:, first:].reshape(-1, W, dim), k.mT).view(N, tiles - first, W, KEYS)
        scores = (scores * scaling).masked_fill(~seen, -torch.inf)
        new = torch.maximum(top[:, first:], scores.amax(-1, keepdim=True))
        # A query that has seen no key has no finite maximum to subtract.
        base = new.masked_fill(new == -torch.inf, 0.0)
        shares, shrink = torch.exp(scores - base), torch.exp(top[:, first:] - base)
        added = torch.bmm(shares.view(-1, W, KEYS), v).view(N, tiles - first, W, dim)
        mass[:, first:] = mass[:, first:] * shrink + shares.sum(-1, keepdim=True)
        total[:, first:] = total[:, first:] * shrink + added
        top[:, first:] = new
    return total / mass


def packed_attention(
    q: Float[Tensor, "T heads dim"],
    k: Float[Tensor, "T kv dim"],
    v: Float[Tensor, "T kv dim"],
    packing: packed.Packing,
    scaling: float,
    window: int | None,
) -> Float[Tensor, "T heads dim"]:
    """Returns causal attention within each packed row, with the gradients of the attention that others use."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.is_cuda:
            return logprobs.on_cuda().packed_attention(q, k, v, packing, scaling, window)
        q, k, v = (packing.table(x).transpose(1, 2) for x in (q, k, v))
        return rows_attention(q, k, v, scaling, window).transpose(1, 2).flatten(0, 1)[packing.slots]

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed.chosen(q, packing)(q, k, v, packing, scaling, window, None, None)

    return _AsOther.apply(attend, other, q, k, v)


def model_attention(
    module: nn.Module,
    query: Float[Tensor, "B heads T dim"],
    key: Float[Tensor, "B kv T dim"],
    value: Float[Tensor, "B kv T dim"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: packed.Packing | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B T heads dim"], None]:
    """Computes transformers' attention: of packed rows, or without ``packing`` of a table of padded ones."""
    if packing is not None and packing.plain:
        plain = packed.packed_attention
        return plain(
            module, query, key, value, attention_mask, packing=packing, scaling=scaling, sliding_window=sliding_window
        )
    if packing is None:
        packing = packed.Packing.of_table(query.shape[0], query.shape[2], query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = packed_attention(q, k, v, packing, scaling, sliding_window)
    return out.view(len(query), -1, *out.shape[1:]), None


# Log-probs


def reduce_rows(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: Float[Tensor, " N"] | None,
    log_probs: Float[Tensor, " N"],
    log_z: Float[Tensor, " N"],
    entropies: Float[Tensor, " N"] | None,
    softcap: float | None = None,
) -> None:
    """Does what ``logprobs.reduce_rows`` does; on a CPU in tiles of so many rows."""
    if logits.is_cuda:
        logprobs.reduce_rows(logits, targets, temperature, log_probs, log_z, entropies, softcap)
        return
    outputs = [log_probs, log_z] if entropies is None else [log_probs, log_z, entropies]
    for part in logprobs.slices(len(logits), ROWS):
        short = ROWS - len(logits[part])
        tile = pad(logits[part], (0, 0, 0, short)) if short else logits[part]
        heat = None if temperature is None else pad(temperature[part], (0, short), value=1.0)
        results = [torch.empty(ROWS, dtype=torch.float32) for _ in outputs]
        of_entropy = None if entropies is None else results[2]
        ids = pad(targets[part], (0, short))
        logprobs.reduce_rows(tile, ids, heat, results[0], results[1], of_entropy, softcap)
        for output, result in zip(outputs, results, strict=True):
            output[part] = result[: ROWS - short]


def token_logprobs(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], temperature: float
) -> Float[Tensor, " N"]:
    """Returns log-probabilities as the trainer computes them from the same logits; these are overwritten.

    Example:
        >>> token_logprobs(torch.zeros(1, 4), torch.tensor([1]), 0.7)
        tensor([-1.3863])
    """
    found = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    heat = None if temperature == 1.0 else torch.full_like(found, temperature)
    reduce_rows(logits, targets, heat, found, torch.empty_like(found), None)
    return found


# Models

HEAD = logprobs.Kernels(linear, reduce_rows)


def adopt(skeleton: Skeleton, attend: str = NAME) -> None:
    """Makes a model compute with these kernels, with adapters merged into the weights at each use.

    Args:
        attend: the registered name of its attention.
    """
    model: Any = skeleton.model
    packed.register(NAME, model_attention)
    model.set_attn_implementation(attend)
    skeleton.head_kernels = HEAD
    for module in model.modules():
        if hasattr(module, "base_layer"):
            assert skeleton.adapters.lora is not None
            _replace(skeleton, module, functools.partial(_adapted, module, skeleton.adapters.lora.scale))
        elif isinstance(module, nn.Linear):
            _replace(skeleton, module, functools.partial(_of_linear, module))
        elif type(module).__name__.endswith("RMSNorm"):
            _replace(skeleton, module, functools.partial(_of_norm, module))
        if hasattr(module, "act_fn"):
            _replace(skeleton, module.act_fn, silu)
            _replace(skeleton, module, functools.partial(_of_mlp, module, module.forward))


def _replace(skeleton: Skeleton, module: Any, forward: Callable[[Tensor], Tensor]) -> None:
    """Replaces a module's forward pass, except inside of ``Skeleton.transformable``."""
    own = module.forward
    module.forward = lambda x: own(x) if skeleton.transformed else forward(x)


def _of_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _of_norm(norm: Any, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def _of_mlp(mlp: Any, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not x.is_cuda:
        return own(x)
    given = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(_AsOther.apply(logprobs.on_cuda().gated, lambda gate, up: silu(gate) * up, *given))


def _adapted(layer: Any, scale: float, x: Tensor) -> Tensor:
    """Computes an adapted layer with the weight that is published: the same product of the same adapters."""
    base = layer.base_layer
    a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
    weight = torch.addmm(base.weight.float(), b, a, alpha=scale)
    return linear(x, weight.to(x.dtype), base.bias)


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a leaf with the values that a trainer computes with in this dtype; publications merge adapters of them.

    Example:
        >>> rounded(torch.tensor([1.001]), torch.bfloat16)
        tensor([1.])
    """
    return t.to(dtype).to(t.dtype)


@attrs.frozen(eq=False)
class Activations:
    """What modules have computed for tokens of packed rows, on the CPU.

    Attributes:
        tokens: how many tokens the rows have.
        by_name: for each module, in the order in which they end, its output for each token; ``log_probs`` come last.
        filled: for each module the tokens that it has computed.
    """

    tokens: int
    by_name: dict[str, Tensor] = attrs.field(factory=dict)
    filled: dict[str, Bool[Tensor, " T"]] = attrs.field(factory=dict)

    def write(self, name: str, index: Int[Tensor, " n"], values: Tensor) -> None:
        """Writes what a module has computed for some tokens."""
        values = values.detach().cpu()
        if name not in self.by_name:
            self.by_name[name] = values.new_zeros(self.tokens, *values.shape[1:])
            self.filled[name] = torch.zeros(self.tokens, dtype=torch.bool)
        self.by_name[name][index] = values
        self.filled[name][index] = True


@attrs.frozen
class Parting:
    """The first module in which two computations part.

    Attributes:
        name: of the module, or ``log_probs``.
        tokens: how many tokens differ there.
        compared: of how many.
        largest: the largest difference.
    """

    name: str
    tokens: int
    compared: int
    largest: float


def first_parting(one: Activations, other: Activations) -> Parting | None:
    """Returns the first module whose outputs differ in a bit; None if there is none.

    Example:
        >>> one, other = Activations(2), Activations(2)
        >>> one.write("norm", torch.arange(2), torch.tensor([[1.0], [2.0]]))
        >>> other.write("norm", torch.arange(2), torch.tensor([[1.0], [2.5]]))
        >>> first_parting(one, other)
        Parting(name='norm', tokens=1, compared=2, largest=0.5)
    """
    for name in (name for name in one.by_name if name in other.by_name):
        both = one.filled[name] & other.filled[name]
        a, b = one.by_name[name][both], other.by_name[name][both]
        differs = (a != b).flatten(1).any(1) if a.ndim > 1 else a != b
        if bool(differs.any()):
            return Parting(name, int(differs.sum()), len(a), float((a.double() - b.double()).abs().max()))
    return None


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields a dict that the modules write the outputs of their last call into, each as [T, ...] or [B * L, ...]."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            outputs.pop(name, None)
            outputs[name] = first.flatten(0, 1) if first.ndim > 2 else first

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: keep(name, output))
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def of_trainer(skeleton: Skeleton, staged: Staged) -> Activations:
    """Returns the activations of a micro-batch as a trainer computes them."""
    batch, packing = staged.batch, staged.packing
    found, head = Activations(batch.num_tokens), skeleton.output_name
    every = torch.arange(batch.num_tokens)
    with recorded(skeleton.model) as outputs:
        hidden = skeleton.hidden_states(batch.tokens, batch.positions, packing)
        of_body = dict(outputs)
        skeleton.logits(hidden)
        logits = outputs[head]
    for name, output in of_body.items():
        if len(output) == packing.rows * packing.longest and skeleton.padded:
            output = output[packing.slots]
        if len(output) == batch.num_tokens:
            found.write(name, every, output)
    found.write(head, every, logits)
    log_probs = token_outputs(skeleton, staged, {"logprobs"}).logprobs[staged.targets]
    found.write(LOG_PROBS, staged.targets.cpu(), log_probs)
    return found
