"""Stands for transformer-engine and flash-linear-attention on CPUs, for tests; refuses to where one is installed.

Layers of Megatron-Bridge's families are made of transformer-engine's classes. The classes here have the same names,
arguments and parameters, and compute the same with torch. Kernels that Megatron can do without have no stand-in.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import math
import sys
import types

import torch
from torch import nn
from torch.nn import functional as F

# Fields of a provider that ask for kernels without a stand-in.
KERNELS = (
    "moe_permute_fusion", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "moe_router_fusion",
    "persist_layer_norm", "cross_entropy_loss_fusion",
)  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, normalized_shape, eps, sequence_parallel, zero_centered_gamma, params_dtype, **options):
        super().__init__()
        self.eps, self.centred = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype))
        biased = isinstance(self, LayerNorm)
        self.bias = nn.Parameter(torch.zeros(normalized_shape, dtype=params_dtype)) if biased else None
        for p in self.parameters():
            p.sequence_parallel = sequence_parallel

    def forward(self, x):
        return normed(x, self.weight, self.bias, self.eps, self.centred)


class LayerNorm(RMSNorm):
    pass


def normed(x, weight, bias, eps, centred):
    scale = 1 + weight if centred else weight
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], scale, bias, eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


class Linear(nn.Module):
    def __init__(
        self, in_features, out_features, *, tp_size, tp_group, parallel_mode, bias, return_bias, params_dtype,
        sequence_parallel, eps=None, normalization=None, zero_centered_gamma=False, **options,
    ):  # fmt: skip
        super().__init__()
        column, row = parallel_mode == "column", parallel_mode == "row"
        rows = out_features // tp_size if column else out_features
        self.weight = nn.Parameter(torch.zeros(rows, in_features // tp_size if row else in_features))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None
        self.parallel_mode, self.group = parallel_mode, tp_group
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.shared, self.return_bias = tp_size > 1, return_bias
        for p in (self.weight, self.bias):
            if p is not None:
                p.tensor_model_parallel = column or (row and p is self.weight)
                p.partition_dim, p.partition_stride = int(row), 1
        if normalization is not None:
            self.eps, self.centred = eps, zero_centered_gamma
            self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features)) if normalization == "LayerNorm" else None
            for p in (self.layer_norm_weight, self.layer_norm_bias):
                if p is not None:
                    p.sequence_parallel = sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        if hasattr(self, "layer_norm_weight"):
            x = normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.centred)
        if self.shared and self.parallel_mode == "column":
            enter = mappings.copy_to_tensor_model_parallel_region
            if self.sequence_parallel:
                enter = mappings.gather_from_sequence_parallel_region
            x = enter(x, group=self.group)
        y = F.linear(x, self.weight)
        if self.shared and self.parallel_mode == "row":
            leave = mappings.reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                leave = mappings.reduce_scatter_to_sequence_parallel_region
            y = leave(y, group=self.group)
        if self.return_bias:
            return y, self.bias
        return y if self.bias is None else y + self.bias


class LayerNormLinear(Linear):
    pass


class GroupedLinear(nn.Module):
    def __init__(self, num_gemms, in_features, out_features, *, bias, return_bias, **options):
        super().__init__()
        self.num_gemms, self.return_bias, self.use_bias = num_gemms, return_bias, bias
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(out_features, in_features)))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(out_features)) if bias else None)
        for p in self.parameters():
            p.tensor_model_parallel, p.partition_dim, p.partition_stride = False, 0, 1

    def forward(self, x, m_splits, is_first_microbatch=None):
        weights, biases = (
            [getattr(self, f"{name}{i}") for i in range(self.num_gemms)] for name in ("weight", "bias")
        )
        parts = x.split([int(rows) for rows in m_splits])
        given = [None] * self.num_gemms if self.return_bias else biases
        y = torch.cat([F.linear(*three) for three in zip(parts, weights, given, strict=True)])
        return (y, biases) if self.return_bias else y


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, *, num_gqa_groups, attn_mask_type, tp_size, layer_number,
        window_size=None, attention_type="self", softmax_scale=None, softmax_type="vanilla", **options,
    ):  # fmt: skip
        super().__init__()
        keys, values = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = keys, values
        self.attn_mask_type, self.attention_type, self.layer_number = attn_mask_type, attention_type, layer_number
        self.window_size, self.softmax_type, self.cp_comm_type = window_size, softmax_type, "p2p"
        self.softmax_scale = softmax_scale or 1 / math.sqrt(keys)
        self.softmax_offset = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // tp_size))

    def set_context_parallel_group(self, *options):
        pass

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        qkv_format="sbhd",
        attn_mask_type=None,
        cu_seqlens_q=None,
        **options,
    ):
        assert attention_mask is None and "causal" in (attn_mask_type or self.attn_mask_type)
        if qkv_format == "thd":
            lengths = cu_seqlens_q.diff().tolist()
            rows = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self.of_rows(*(x[None] for x in row))[0] for row in rows]).flatten(-2)
        return self.of_rows(*(x.transpose(0, 1) for x in (query, key, value))).transpose(0, 1).flatten(-2)

    def of_rows(self, query, key, value):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * self.softmax_scale
        at = torch.arange(query.shape[2])
        distance = at[:, None] - at
        left = -1 if self.window_size is None else self.window_size[0]
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.softmax_offset is None:
            probs = scores.softmax(-1)
        else:
            sinks = self.softmax_offset.view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
            probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (probs @ value).transpose(1, 2)


class Tracker:
    def reset(self):
        pass


def convolution(x, weight, bias=None, activation=None, **options):
    """flash-linear-attention's convolution of each channel with what came before."""
    y = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    y = y[..., : x.shape[1]].transpose(1, 2)
    return F.silu(y) if activation in ("silu", "swish") else y, None


def delta_rule(q, k, v, **options):
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(q, k, v, **options)


def flex(query, key, value, score_mod, block_mask, scale, enable_gqa):
    """torch's flexible attention, whose backward pass does not run on CPUs."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    at = torch.arange(query.shape[2])
    scores = score_mod(query @ key.transpose(-1, -2) * scale, None, None, None, None)
    return scores.masked_fill(~block_mask.mask_mod(0, 0, at[:, None], at), -torch.inf).softmax(-1) @ value


def nothing(*args, **options):
    return contextlib.nullcontext()


def _modules():
    """Returns the modules by name, with what is in them."""
    state = type("FP8GlobalStateManager", (), {"is_fp8_enabled": staticmethod(lambda: False)})
    fp8 = {"FP8GlobalStateManager": state, "fp8_autocast": nothing, "fp8_model_init": nothing}
    fused = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    recomputed = ("is_fp8_activation_recompute_enabled", "in_fp8_activation_recompute_phase", "get_all_rng_states")
    layers = (RMSNorm, LayerNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
    te, fla = "transformer_engine", "fla"
    return {
        te: {"__version__": "2.20.2"},
        f"{te}.common": {},
        f"{te}.common.recipe": {"DelayedScaling": type("DelayedScaling", (), {})},
        f"{te}.pytorch": fp8 | {layer.__name__: layer for layer in layers},
        f"{te}.pytorch.fp8": fp8,
        f"{te}.pytorch.distributed": {"CudaRNGStatesTracker": Tracker, "activation_recompute_forward": nothing}
        | dict.fromkeys(recomputed, lambda: False),
        f"{te}.pytorch.ops": {"Sequential": type("Sequential", (), {})},
        f"{te}.pytorch.router": dict.fromkeys(fused),
        f"{te}.pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
        f"{te}.pytorch.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
        f"{te}.pytorch.module": {},
        f"{te}.pytorch.module.base": {"TransformerEngineBaseModule": type("TransformerEngineBaseModule", (), {})},
        fla: {},
        f"{fla}.modules": {},
        f"{fla}.modules.convolution": {"causal_conv1d": convolution},
        f"{fla}.modules.l2norm": {"l2norm": lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)},
        f"{fla}.ops": {},
        f"{fla}.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule},
    }


@functools.cache
def install():
    """Puts the modules in their places; nothing of Megatron is imported before. The second call does nothing."""
    if any(map(importlib.util.find_spec, ("transformer_engine", "fla"))):
        raise RuntimeError("transformer-engine or flash-linear-attention is installed here")
    if any(name.startswith("megatron.") for name in sys.modules):
        raise RuntimeError("Megatron was imported without transformer-engine")
    for name, content in _modules().items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.bridge.models.gemma import gemma2_provider

    gemma2_provider._flex_attn_func = flex
