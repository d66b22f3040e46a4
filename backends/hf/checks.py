"""Finds, on a small random model, how an architecture has to be run so that each row is computed as if by itself.

A model that keeps rows apart in its attention is run on rows that are packed end to end. Any other causal model is
run as it is on rows that are padded on the right: what comes after a token cannot change it. Both are compared with
transformers' own forward of each row, and so is what the model does to its logits after the output layer.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from verl_fn.backends.hf import attention
from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.config import EXPERTS, ModelError, fingerprint, longest_row, quiet, reason, refused
from verl_fn.backends.hf.past import Past
from verl_fn.backends.hf.skeleton import LAYER_INDEX, PACKED, PADDED, Fit, Skeleton
from verl_fn.backends.hf.vision import attentions, family_of
from verl_fn.errors import installed_version
from verl_fn.state import Batch, one_thread
from verl_fn.state.guards import with_attributes

LAYOUTS = ("auto", PACKED, PADDED)
# Sizes that only make a model large; smaller ones do not change the results of the checks.
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim")
# Numbers of the experts that a token is sent to.
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
# Limits of what a token attends to, and of what is computed at a time; rows of the checks exceed smaller ones.
WINDOWS = ("sliding_window", "attention_chunk_size")
CHUNKS = ("chunk_size", "mamba_chunk_size")
VOCABULARY, WIDTH, WINDOW = 64, 64, 4
# The lengths of the rows of each batch that is compared; linear attention has chunks of 64 tokens.
LENGTHS = ((12, 8, 9, 2), (3,), (1, 3), (9, 10), (150, 70))
# Names of the projections of queries and keys.
QUERIES_AND_KEYS = re.compile(r"(?:^|\.)(?:q|k|qk|qkv|query|key|query_key_value|c_attn)(?:_proj)?\.weight$|Wqkv")
_MIXED = "rows are not computed as each one by itself"
# Fields that name the kind of each layer.
KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "hybrid_override_pattern")
# Names of the factor of the logits in configs, and of the bound of soft-capped ones.
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
SCALES, DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
# The largest difference from transformers' own logits, relative to the largest logit. Rounding is a tenth of it.
TOLERANCE = 3e-5
# A state that takes in a token at a time rounds otherwise than one that takes in chunks of tokens.
ROUNDING = 1e-3
_fits: dict[str, Fit] = {}


def fit_of(auto: Any, config: Any, head: str, folder: str | Path, layout: str = "auto") -> Fit:
    """Returns how to run the models of a config; each config is checked once in a process, whatever its folder.

    Args:
        auto: transformers' class that makes the model.
        layout: ``packed`` or ``padded`` for this layout only; ``auto`` for the first one that is right.

    Raises:
        ModelError: the model is not causal, or no layout computes what transformers' own forward does.
    """
    if layout not in LAYOUTS:
        raise ModelError(f"model.layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    checked = fingerprint(config, auto.__name__, head, layout)
    if checked not in _fits:
        attention.register()
        failure = "it has no sizes"
        with refused(f"{folder}: a small model of this config cannot be run"):
            for small in smaller(auto, config):
                try:
                    with quiet(), torch.no_grad(), one_thread():
                        _fits[checked] = _with_chunks(auto, small, config, head, folder, layout)
                    break
                except ModelError:
                    raise
                except Exception as error:
                    # This architecture does not allow these sizes together; the next ones are closer to its own.
                    failure = reason(error)
            else:
                raise ModelError(f"{folder}: a small model of this config cannot be run: {failure}")
    return _fits[checked]


def smaller(auto: Any, config: Any) -> Iterator[Any]:
    """Yields the config with small sizes: first all sizes, then only independent ones, then the config as it is.

    Example:
        >>> from transformers import AutoModelForCausalLM, Qwen2Config
        >>> config = Qwen2Config(num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2)
        >>> first = next(smaller(AutoModelForCausalLM, config))
        >>> first.num_hidden_layers, first.num_attention_heads, first.num_key_value_heads, first.vocab_size
        (2, 12, 2, 64)
    """
    shallow = copy.deepcopy(config)
    depth = _cut_layers(auto, shallow)
    if family_of(shallow) is not None:
        _cut_tower(shallow.vision_config)
    text = shallow.get_text_config()
    _lower(text, "vocab_size", VOCABULARY)
    _lower(text, "vocab_size_per_layer_input", VOCABULARY)
    for name in (*WINDOWS, *CHUNKS):
        _lower(text, name, WINDOW)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    narrow = copy.deepcopy(shallow)
    if _cut_widths(narrow.get_text_config()):
        yield narrow
    if depth:
        yield shallow
    yield config


def _cut_layers(auto: Any, config: Any) -> bool:
    """Removes layers of kinds that the model has already."""
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return False
    wanted = max(2, (getattr(text, "first_k_dense_replace", None) or 0) + 1)
    for name in KINDS:
        kinds = list(getattr(text, name, None) or ())
        wanted = max([wanted, *(kinds.index(kind) + 1 for kind in set(kinds))])
    kinds_of_all = _modules(auto, config)
    for depth in range(min(layers, wanted), layers):
        short = copy.deepcopy(config)
        _set_depth(short.get_text_config(), depth)
        if _modules(auto, short) == kinds_of_all:
            _set_depth(text, depth)
            return True
    return True


def _set_depth(config: Any, depth: int) -> None:
    layers = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, (list, str)) and len(value) == layers:
            setattr(config, name, value[:depth])
    config.num_hidden_layers = depth


def _modules(auto: Any, config: Any) -> frozenset[str] | None:
    """Returns the classes of a model's modules; None if it cannot be made on the meta device."""
    try:
        with quiet(), torch.device("meta"):
            return frozenset(
                type(module).__name__
                for module in auto.from_config(copy.deepcopy(config), trust_remote_code=False).modules()
            )
    except Exception:
        return None


def _cut_tower(vision: Any) -> None:
    """Leaves one layer of a tower, since it is not run: rows without images tell how the language model is run."""
    for name in ("depth", "num_hidden_layers"):
        _lower(vision, name, 1)
    for name in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        if getattr(vision, name, None):
            setattr(vision, name, [0])


def _cut_widths(config: Any) -> bool:
    hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return False
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = 2 if shared % 2 == 0 else 1
    config.num_attention_heads = kv_heads * (heads // shared)
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = kv_heads
    config.hidden_size = config.num_attention_heads * width
    for name in WIDTHS:
        _lower(config, name, WIDTH)
    _cut_experts(config)
    return True


def _cut_experts(config: Any) -> None:
    """Leaves twice as many experts as a token is sent to, and at least two in each of their groups."""
    chosen = next((n for name in CHOSEN_EXPERTS if isinstance(n := getattr(config, name, None), int)), None)
    if chosen is not None:
        groups = getattr(config, "n_group", None) or 1
        for name in EXPERTS:
            _lower(config, name, groups * max(2, -(-2 * chosen // groups)))


def _lower(config: Any, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and value > most:
        setattr(config, name, most)


class NotCausalError(ModelError):
    """What comes after a token changes what a model computes for it."""


def _with_chunks(auto: Any, small: Any, config: Any, head: str, folder: str | Path, layout: str) -> Fit:
    """Returns the fit of a small config, or of one with chunks as long as the config's, and rows of one chunk only.

    Some families carry a state from chunk to chunk wrongly where kernels for it are missing.
    """
    try:
        return _fit(auto, small, head, folder, layout)
    except NotCausalError:
        text = config.get_text_config()
        chunks = {name: size for name in CHUNKS if isinstance(size := getattr(text, name, None), int)}
        if not chunks:
            raise
        whole = copy.deepcopy(small)
        for name, size in chunks.items():
            setattr(whole.get_text_config(), name, size)
        longest = min(chunks.values())
        fit = _fit(auto, whole, head, folder, layout, longest)
        return fit if importlib.util.find_spec("mamba_ssm") else attrs.evolve(fit, longest=longest)


def _fit(auto: Any, config: Any, head: str, folder: str | Path, layout: str, longest: float = math.inf) -> Fit:
    model = _random_model(auto, config, head, "eager")
    text = config.get_text_config()
    vocab = text.vocab_size
    longest = min(longest, longest_row(config), *(getattr(text, name, None) or math.inf for name in POSITIONS))
    lengths = [[int(min(n, longest)) for n in of_batch] for of_batch in LENGTHS]
    for length in (lengths[0][0], lengths[-1][0]):
        _check_causal(model, _row(length, vocab), vocab, folder)
    batches = [Batch.from_rows([_row(n, vocab) for n in of_batch]) for of_batch in lengths]
    expected = [torch.cat([_own(model, row.tolist()) for row in batch.rows()]) for batch in batches]
    reasons: dict[tuple[str, str], None] = {}
    for fit in _candidates(layout):
        try:
            skeleton = Skeleton(_random_model(auto, config, head, fit.attention), head, fit=fit)
            skeleton.fit = _with_head(skeleton, batches[0], expected[0])
            for batch, logits in zip(batches[1:], expected[1:], strict=True):
                if _apart(skeleton.logits(_hidden(skeleton, batch)), logits):
                    raise ValueError(_MIXED)
            unpacked = head == "lm" and (fit.layout == PADDED or skeleton.fit.repeats)
            cached = unpacked and all(_goes_on(skeleton, batch) for batch in (batches[0], batches[-1]))
            why = "; ".join(why for tried, why in reasons if tried == PACKED)
            return attrs.evolve(skeleton.fit, cached=cached, why=why)
        except Exception as error:
            reasons[fit.layout, reason(error)] = None
    tried = "; ".join(f"{rows} rows: {why}" for rows, why in reasons)
    raise ModelError(f"{folder}: {type(model).__name__} cannot be run ({tried})")


def _goes_on(skeleton: Skeleton, batch: Batch) -> bool:
    """Returns whether rows that go on from their past, begin at other times and change slots get the same logits."""
    rows, whole = list(batch.rows()), skeleton.logits(_hidden(skeleton, batch)).split(batch.lengths.tolist())
    # Of each slot the row's number, and how many of its tokens were read.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    *slots, late = [(i, max(1, len(rows[i]) // 2 - 1)) for i in order]

    def right(found: Tensor, slots: Sequence[tuple[int, int]]) -> bool:
        wanted = torch.stack([whole[i][end - 1] for i, end in slots])
        return not _apart(skeleton.logits(found), wanted, ROUNDING)

    try:
        past = Past(skeleton)
        # After a step, the first row moves to a new slot and goes on there; the last row begins in its old slot.
        prompts = Batch.from_rows([rows[i][:end] for i, end in slots])
        if not right(past.read(skeleton, prompts, torch.arange(len(slots))), slots):
            return False
        for moment in range(len(rows[order[0]])):
            if moment == 1:
                past.copy([0], [len(slots)])
                slots = [late, *slots[1:], slots[0]]
                prompt = Batch.from_rows([rows[late[0]][: late[1]]])
                if not right(past.read(skeleton, prompt, torch.tensor([0])), slots[:1]):
                    return False
            active = [k for k, (i, end) in enumerate(slots) if end < len(rows[i])]
            if not active:
                return True
            if len(active) < len(slots):
                past.copy(active, list(range(len(active))))
                slots = [slots[k] for k in active]
            tokens, ends = torch.stack([rows[i][end] for i, end in slots]), [end for _, end in slots]
            found = past.step(skeleton, tokens, torch.tensor(ends), max(ends) + 1)
            slots = [(i, end + 1) for i, end in slots]
            if not right(found, slots):
                return False
    except Exception:  # a family may lack a cache, or have one of another kind
        return False
    return True


def _check_causal(model: Any, row: list[int], vocab: int, folder: str | Path) -> None:
    """Raises NotCausalError if what comes after a token, or how much, changes what the model computes for it."""
    whole = _own(model, row)
    ends = range(1, len(row), 1 if len(row) <= 12 else 37)
    others = [[*row[:-2], *((token + 1) % vocab for token in row[-2:])], *(row[:end] for end in ends)]
    for other in others:
        same = max(0, min(len(other), len(row) - 2))
        if _apart(_own(model, other)[:same], whole[:same]):
            raise NotCausalError(
                f"{folder}: {type(model).__name__} is not causal, since what comes after a token changes what it "
                "computes for the token; it cannot be trained as a language model"
            )


def _row(length: int, vocab: int) -> list[int]:
    """Returns a row of so many tokens; rows of different lengths share no prefix."""
    return [(7 * length + 5 * n * n + 3 * n) % vocab for n in range(length)]


def _hidden(skeleton: Skeleton, batch: Batch) -> Tensor:
    return skeleton.hidden_states(batch.tokens, batch.positions, Packing.of(batch, torch.device("cpu")))


def _candidates(layout: str) -> Iterator[Fit]:
    if layout != PADDED:
        yield Fit(PACKED, attention.NAME)
    if layout != PACKED:
        yield from (Fit(PADDED, name) for name in ("sdpa", "eager"))


def _own(model: Any, row: Sequence[int]) -> Tensor:
    """Returns the logits of transformers' own forward of one row."""
    logits: Tensor = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits


def _apart(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Returns whether logits differ by more than rounding, or are not finite."""
    if not len(found):
        return False
    return not bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1.0))


def _with_head(skeleton: Skeleton, batch: Batch, expected: Tensor) -> Fit:
    """Returns the fit with what the model does to its logits.

    Raises:
        ValueError: hidden states or logits differ from each row's by itself.
    """
    calls: Counter[nn.Module] = Counter()
    hooks = [
        layer.register_forward_hook(lambda layer, *_: calls.update([layer]))
        for layer in skeleton.body.modules()
        if hasattr(layer, LAYER_INDEX)
    ]
    hidden = _hidden(skeleton, batch)
    for hook in hooks:
        hook.remove()
    fit = attrs.evolve(skeleton.fit, repeats=max(calls.values(), default=0) > 1)
    try:
        logits = skeleton.output_layer(hidden)
    except (AttributeError, TypeError, RuntimeError, StopIteration):
        logits = None
    if logits is not None and logits.shape == expected.shape:
        for scale, softcap in _changes(skeleton.config.get_text_config()):
            capped = logits * scale
            capped = capped if softcap is None else torch.tanh(capped / softcap) * softcap
            if not _apart(capped, expected):
                return attrs.evolve(fit, scale=scale, softcap=softcap)
    if skeleton.head == "lm" and not _apart(skeleton.own_logits(hidden), expected):
        return attrs.evolve(fit, own_head=True)
    raise ValueError(_MIXED)


def _changes(config: Any) -> Iterator[tuple[float, float | None]]:
    """Yields what a config may ask for after the output layer: a factor and a soft cap of the logits."""
    scales = [1.0, *(_number(config, name) for name in SCALES)]
    scales += [1.0 / divisor for name in DIVISORS if (divisor := _number(config, name))]
    softcaps = [None, *(_number(config, name) or None for name in SOFTCAPS)]
    yield from dict.fromkeys(itertools.product(filter(None, scales), softcaps))


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) else 0.0


def kernels_for(device: str | torch.device, auto: Any, config: Any) -> AbstractContextManager[None]:
    """Makes models take transformers' own code where flash-linear-attention's kernels fail or are wrong.

    Of linear attention they then take ``_rounded_once``.
    """
    module = sys.modules[auto._model_mapping[type(config)].__module__]
    names = vars(module)
    taken: dict[str, Any] = {}
    if torch.device(device).type != "cuda" or wrong_gradients():
        taken = {name: None for name, f in names.items() if str(getattr(f, "__module__", "")).startswith("fla.")}
    if "torch_chunk_gated_delta_rule" in names:
        taken |= _rounded_once(names, {name for name, f in (names | taken).items() if f is None})
    return with_attributes(module, **taken)


def _rounded_once(names: Mapping[str, Any], missing: Collection[str]) -> dict[str, Any]:
    """Returns functions for the kernels of linear attention that are missing in a module of transformers.

    They are transformers' own in float32, and round only their results, as kernels of engines do. Transformers' own
    also round between a convolution and its activation, after the normalization of queries and keys, and between a
    norm and its gate, by which bfloat16 is farther from float32, and from vLLM. Two things are rounded since vLLM
    rounds them: gates, and the products of a convolution. OLMo Hybrid's convolutions stay transformers' own.

    Args:
        names: the names of the module.
        missing: the ones that are None.
    """

    def of_float32(rule: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable  # a compiler would unroll its loops over the tokens of a chunk
        def call(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
            out, state = rule(query.float(), key.float(), value, **more)
            return out.to(value.dtype), state

        return call

    @torch.compiler.disable
    def updated(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        if x.dtype == torch.float32:
            return cast(Tensor, names["torch_causal_conv1d_update"](x, state, weight, bias, activation))
        whole = torch.cat([state, x], -1)
        state.copy_(whole[..., -state.shape[-1] :])
        return F.silu(_rounded_products(whole, weight, bias)[..., -x.shape[-1] :]).to(x.dtype)

    def gated(norm: Any, hidden: Tensor, gate: Tensor) -> Tensor:
        x = hidden.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return cast(Tensor, (norm.weight.float() * x * F.silu(gate.float())).to(hidden.dtype))

    own = {
        "chunk_gated_delta_rule": of_float32(names["torch_chunk_gated_delta_rule"]),
        "fused_recurrent_gated_delta_rule": of_float32(names["torch_recurrent_gated_delta_rule"]),
        "causal_conv1d_fn": torch.compiler.disable(_convolved),  # compiled code rounds no products
        "causal_conv1d_update": updated,
    }
    found: dict[str, Any] = {name: f for name, f in own.items() if name in missing}
    if (fused := "FusedRMSNormGated") in missing:
        name = next(name for name in names if name.endswith("RMSNormGated") and name != fused)
        found[name] = type(name, (names[name],), {"forward": gated})
    return found


def _convolved(
    x: Float[Tensor, "B C T"], weight: Float[Tensor, "C k"], bias: Float[Tensor, " C"] | None, **_: Any
) -> Float[Tensor, "B C T"]:
    before, wide = weight.shape[-1] - 1, None if bias is None else bias.float()
    rounds = x.dtype != torch.float32
    out = _rounded_products(F.pad(x, (before, 0)), weight, bias) if rounds else x
    if torch.is_grad_enabled() or not rounds:
        exact = F.conv1d(x.float(), weight.float()[:, None], wide, padding=before, groups=len(weight))
        exact = exact[..., : x.shape[-1]]
        # The gradient is the one of the convolution without roundings.
        out = out + (exact - exact.detach()) if rounds else exact
    return F.silu(out).to(x.dtype)


@torch.no_grad()
def _rounded_products(
    x: Float[Tensor, "B C T"], weight: Float[Tensor, "C k"], bias: Float[Tensor, " C"] | None
) -> Float[Tensor, "B C T_less_k_and_1"]:
    """Returns the convolution of whole windows: products in the dtype of ``x``, summed in float32 from the bias on.

    Source:
        ``_causal_conv1d_update_kernel`` of vLLM 0.24, in which Triton rounds a product of two bfloat16 numbers.
    """
    count = x.shape[-1] - weight.shape[-1] + 1
    total = torch.zeros((), device=x.device) if bias is None else bias.float()[:, None]
    for i, factor in enumerate(weight.unbind(-1)):
        total = total + (x[..., i : i + count] * factor[:, None]).float()
    return total


def wrong_gradients() -> bool:
    """Returns whether flash-linear-attention refuses gradients here, since Triton's compiler makes wrong ones.

    Source:
        https://github.com/fla-org/flash-linear-attention/issues/640
    """
    installed = {name for name in ("fla", "tilelang") if importlib.util.find_spec(name) is not None}
    if installed != {"fla"} or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    # A Triton under another name is left to the error of flash-linear-attention's own.
    version = TorchVersion(installed_version("triton") or "0")
    return TorchVersion("3.4") <= version < TorchVersion("3.7.1")


def _random_model(auto: Any, config: Any, head: str, implementation: str) -> Any:
    """Returns a model with activations and logits as large as trained ones, since soft caps change only large ones.

    Raises:
        ValueError: the architecture does not take this implementation of attention.
    """
    with torch.random.fork_rng(devices=[]), kernels_for("cpu", auto, config):
        torch.manual_seed(0)
        model = auto.from_config(
            copy.deepcopy(config),
            attn_implementation=attentions(config, implementation),
            dtype=torch.float32,
            trust_remote_code=False,
        )
        if implementation == attention.NAME and not getattr(model, "_supports_attention_backend", False):
            raise ValueError("the model does not let its attention be chosen")
        model.config.use_cache = False
        for name, p in model.named_parameters():
            if p.dim() > 1:
                # Scores of attention are as large as trained ones, too.
                nn.init.normal_(p, std=(2 if QUERIES_AND_KEYS.search(name) else 1) / math.sqrt(p.shape[-1]))
        output = model.get_output_embeddings() if head == "lm" else None
        if output is not None:
            output.weight *= 10.0
    return model.eval()
