"""Hugging Face folders as values: a skeleton that owns nothing, and its parameters by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from verl_fn.state import Batch, Key, Params, TokenOutputs

from . import attention
from .attention import Packing
from .logprobs import logprobs_and_entropy
from .lora import Adapters, Lora, canonical, inject
from .ulysses import Sequence

SUPPORTED_NEEDS = {"lm": frozenset({"logprobs", "entropy"}), "value": frozenset({"values"})}

# What transformers calls the output layers of language models, and those of classifiers.
HEADS = frozenset({"lm_head", "embed_out", "output_projection", "score", "classifier"})

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_of(name: str, option: str) -> torch.dtype:
    """The dtype that a backend's ``option`` names.

    >>> dtype_of("bfloat16", "compute_dtype")
    torch.bfloat16
    """
    if name not in DTYPES:
        raise ValueError(f"{option} is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextlib.contextmanager
def repeatable(asked: bool) -> Iterator[None]:
    """Deterministic kernels inside, if asked for or on already; outside as before."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class ModelError(ValueError):
    """A folder that cannot be loaded or a model that cannot be run, with what to do."""


class Skeleton(nn.Module):
    """A model whose parameters lie on the meta device; the real ones come in with every call.

    ``run`` holds the swapped parameters for as long as ``fn`` runs, so a backward pass inside ``fn``
    recomputes checkpointed layers with the right ones.

    Attributes:
        model: the transformers model.
        head: ``lm`` for a language model, ``value`` for a scalar a token.
        adapters: of LoRA, if it has any.
        longest: the most tokens of a row.
    """

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.adapters = Adapters()
        self.longest = _longest(model.config)
        self._inside: dict[str, str] = {}

    def forward(self, fn: Callable[[Skeleton], Any]) -> Any:
        return fn(self)

    def run(self, tensors: dict[str, Tensor], fn: Callable[[Skeleton], Any]) -> Any:
        """``fn(skeleton)`` with the model's parameters and buffers replaced by ``tensors``."""
        renamed = {f"model.{self._inside.get(name, name)}": tensor for name, tensor in tensors.items()}
        return torch.func.functional_call(self, renamed, (fn,), tie_weights=True)

    def adapt(self, lora: Lora, key: Key, folder: str | Path) -> None:
        """Put adapters in, drawn from ``key``; parameters keep their names. ``folder`` is named in errors.

        Raises:
            LoraError: this model cannot have them.
        """
        self.adapters = inject(self.model, lora, self.output_layer, key, folder)
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        self._inside = {canonical(name): name for name in names}

    @property
    def trainable(self) -> frozenset[str] | None:
        """What is trained: the adapters and a value head, or None for all parameters."""
        if self.adapters.lora is None:
            return None
        head = set(self.output_layer.parameters()) if self.head == "value" else set()
        return frozenset(self.adapters.names()) | {n for n, p in self.model.named_parameters() if p in head}

    def move_buffers(self, device: torch.device) -> None:
        """Put the model's constants (rotary frequencies) where it computes."""
        for module in self.modules():
            for name, b in module._buffers.items():
                module._buffers[name] = None if b is None else b.to(device)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def constants(self) -> dict[str, Tensor]:
        """The buffers that belong into a model's file."""
        held = self.model.state_dict(keep_vars=True)
        return {name: b for name, b in self.model.named_buffers() if name in held}

    @property
    def output_layer(self) -> nn.Linear:
        """The language-model head or the value head."""
        if self.head == "lm":
            return self.model.get_output_embeddings()
        return next(getattr(self.model, name) for name in ("score", "classifier") if hasattr(self.model, name))

    def check_trained(self, params: Params) -> None:
        """Whether a checkpoint would come back with the same parameters trained: it does not say which are.

        Raises:
            ValueError: others are trained than in the states that the backend makes.
        """
        ours = set(params if self.trainable is None else self.trainable)
        if odd := sorted(ours.symmetric_difference(params.trained())):
            raise ValueError(
                f"this state was given another set of trainable parameters ({len(odd)} differ: {', '.join(odd[:3])}), "
                "which a checkpoint does not keep: save it with the backend's own set, attrs.evolve(state, "
                "params=attrs.evolve(state.params, trainable=...)), and choose again after restore"
            )

    def check_longest(self, tokens: int) -> None:
        """Whether rows of so many tokens can be computed.

        Raises:
            ValueError: they are longer than the model's frequencies are fixed for.
        """
        if tokens > self.longest:
            raise ValueError(
                f"a row has {tokens} tokens, more than the {self.longest} of this model's "
                f"original_max_position_embeddings: beyond it, longrope changes all rows of a micro-batch together"
            )

    def hidden_states(self, tokens: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        """The last hidden state of each packed token, ``[T, H]``.

        Raises:
            ValueError: a row is too long to be computed as it would be alone.
        """
        self.check_longest(packing.longest)
        found = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, packing=packing
        )
        return found.last_hidden_state[0]


@attrs.frozen(eq=False)
class Staged:
    """A micro-batch on the device, with what the forward pass wants to know beforehand.

    Attributes:
        batch: the micro-batch.
        packing: its layout.
        targets: the tokens to speak of: those with ``response_mask``.
        temperature: for each of them, or None where all are 1.
    """

    batch: Batch
    packing: Packing
    targets: Tensor
    temperature: Tensor | None

    @classmethod
    def of(cls, batch: Batch, device: torch.device, group: Any = None) -> Staged:
        """Stage a batch that lies on the CPU; ``group`` is of the ranks that share its sequence, if any do.

        Raises:
            ValueError: as ``check_targets``.
        """
        targets = check_targets(batch)
        temperature = None
        if "temperature" in batch and bool((batch["temperature"] != 1.0).any()):
            temperature = batch.spread(batch["temperature"].float())[targets].to(device)
        sequence = None if group is None else Sequence(group, batch.num_tokens)
        packing = Packing.of(batch, device, sequence)
        return cls(batch.to(device), packing, targets.to(device, non_blocking=True), temperature)


def check_targets(batch: Batch) -> Tensor:
    """The tokens with ``response_mask``.

    Raises:
        ValueError: one of them is a row's first token, which nothing precedes, or ``temperature`` is not one positive
            number a row.
    """
    if "temperature" in batch:
        if "temperature" in batch.per_token or batch["temperature"].ndim != 1:
            raise ValueError("temperature must be one number a row, a per-row field")
        odd = ~(batch["temperature"].isfinite() & (batch["temperature"] > 0))
        if bool(odd.any()):
            row = int(odd.nonzero()[0])
            raise ValueError(
                f"row {row}: temperature is {batch['temperature'][row]:g}; it must be positive and finite"
            )
    targets = batch["response_mask"].nonzero()[:, 0]
    first = batch.positions[targets] == 0
    if bool(first.any()):
        row = int(batch.row_ids[targets[first][0]])
        raise ValueError(f"row {row}: response_mask is set on its first token, which has no log-probability")
    return targets


def token_outputs(skeleton: Skeleton, staged: Staged, needs: Iterable[str]) -> TokenOutputs:
    """Run the model over a micro-batch and say what ``needs`` asks of each target token."""
    batch, targets, temperature = staged.batch, staged.targets, staged.temperature
    tokens, positions, sequence = batch.tokens, batch.positions, staged.packing.sequence
    # What speaks of token t is read where the model has seen the tokens before t.
    seen = targets - 1
    if sequence is not None:
        tokens, positions = sequence.part(tokens), sequence.part(positions)
        mine = (seen >= sequence.start) & (seen < sequence.start + sequence.each)
        targets, seen = targets[mine], seen[mine] - sequence.start
        temperature = None if temperature is None else temperature[mine]
    hidden = skeleton.hidden_states(tokens, positions, staged.packing).index_select(0, seen)
    layer = skeleton.output_layer

    def spread(x: Tensor) -> Tensor:
        found = x.new_zeros(batch.num_tokens).index_copy(0, targets, x)
        return found if sequence is None else sequence.whole(found)

    if skeleton.head == "value":
        return TokenOutputs({"values": spread(layer(hidden).float()[:, 0])})
    logprobs, entropy = logprobs_and_entropy(
        hidden, layer.weight, layer.bias, batch.tokens[targets], temperature, entropy="entropy" in needs
    )
    found = {"logprobs": spread(logprobs)}
    if entropy is not None:
        found["entropy"] = spread(entropy)
    return TokenOutputs(found)


def check_head(head: str) -> str:
    """The head, if it is one.

    Raises:
        ValueError: it is not.

    >>> check_head("value")
    'value'
    """
    if head not in SUPPORTED_NEEDS:
        raise ValueError(f"head is {head!r}; it must be {' or '.join(SUPPORTED_NEEDS)}")
    return head


def check_needs(head: str, needs: Iterable[str]) -> frozenset[str]:
    """The needs as a set.

    Raises:
        ValueError: the head cannot provide one of them.

    >>> sorted(check_needs("lm", ["logprobs"]))
    ['logprobs']
    """
    wanted = frozenset(needs)
    if not wanted <= SUPPORTED_NEEDS[head]:
        raise ValueError(
            f"a {head} model gives {sorted(SUPPORTED_NEEDS[head])}, not {sorted(wanted - SUPPORTED_NEEDS[head])}"
        )
    return wanted


def build(
    folder: str | Path,
    head: str,
    *,
    pretrained: bool,
    key: Key,
    checkpointing: bool = False,
    lora: Lora | None = None,
) -> tuple[Skeleton, dict[str, Tensor]]:
    """The skeleton and the parameters of a Hugging Face folder, fp32, on the CPU; adapters come last.

    Args:
        head: ``lm``, or ``value`` for a scalar head; a folder without one gets a head of zeros.
        pretrained: read the weights; otherwise draw them from ``key``.
        checkpointing: recompute each layer in the backward pass.
        lora: adapters to put in, drawn from ``key``.

    Raises:
        ModelError: the folder, the architecture or one of its settings cannot be used.
        LoraError: the model cannot have such adapters.
    """
    import transformers

    attention.register()
    config = read_config(folder)
    unfit = "does not let its attention be chosen"
    auto: Any = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForTokenClassification
    options: dict[str, Any] = {"attn_implementation": attention.NAME, "dtype": torch.float32}
    has_value_head = any("TokenClassification" in name for name in config.architectures or ())
    if head == "value":
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(key.seed())
        try:
            if pretrained:
                # What does not fit is told of below, all of it by name.
                model, loaded = auto.from_pretrained(
                    folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
                )
            else:
                model, loaded = auto.from_config(config, **options), None
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            # Some architectures look their attention up among their own.
            if error.args == (attention.NAME,):
                raise ModelError(f"{folder}: {config.model_type} {unfit}") from error
            raise ModelError(f"{folder}: {error}") from error
        except RuntimeError as error:
            # The report that it speaks of is not shown.
            told = str(error).partition(" For details")[0]
            raise ModelError(f"{folder}: its weights cannot be put together: {told}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{folder}: {type(model).__name__} {unfit}")
    model.config.use_cache = False
    model.train(checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    skeleton = Skeleton(model, head)
    new_head = head == "value" and not has_value_head
    if loaded is not None:
        _check_loaded(skeleton, loaded, new_head, folder)
    if new_head:
        nn.init.zeros_(skeleton.output_layer.weight)
        if skeleton.output_layer.bias is not None:
            nn.init.zeros_(skeleton.output_layer.bias)
    try:
        _check(skeleton, folder)
    except NotImplementedError as error:
        raise ModelError(f"{folder}: {error}") from error
    params = {name: p.detach() for name, p in model.named_parameters()}
    if lora is not None:
        skeleton.adapt(lora, key.fold_in("lora"), folder)
        held = {canonical(name): p.detach() for name, p in model.named_parameters()}
        params |= {name: held[name] for name in skeleton.adapters.names()}
    _to_meta(model)
    return skeleton, params


def _check_loaded(skeleton: Skeleton, loaded: dict[str, Any], new_head: bool, folder: str | Path) -> None:
    """Refuse a folder without a weight of the model, which transformers draws at random, or with others.

    Args:
        loaded: what transformers tells of the weights.
        new_head: the output layer is made anew, so the folder need not have it.
    """
    layer = skeleton.output_layer
    own = next(name for name, module in skeleton.model.named_modules() if module is layer)
    needed = lambda name: not (new_head and name.startswith(f"{own}."))  # noqa: E731
    odd = {
        "missing": filter(needed, loaded["missing_keys"]),
        "of another shape": filter(needed, (name for name, *_ in loaded["mismatched_keys"])),
        "not of this model": (n for n in loaded["unexpected_keys"] if n.partition(".")[0] not in HEADS - {own}),
    }
    told = []
    for what, found in odd.items():
        if names := sorted(found):
            told.append(f"{len(names)} {what} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})")
    if told:
        raise ModelError(
            f"{folder} does not hold the weights of {type(skeleton.model).__name__}: {'; '.join(told)}; copy the "
            f"folder anew, or give it the config.json of its weights"
        )


def check_same_config(mine: Skeleton, folder: str | Path) -> None:
    """Whether the config in ``folder`` is that of a skeleton, but for what names it.

    Raises:
        ModelError: it is another, or there is none.
    """
    ours, theirs = (_meaningful(config.to_dict()) for config in (mine.config, read_config(folder)))
    if odd := sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)):
        raise ModelError(f"{folder} holds another model than the one this backend was made for: {odd[:4]} differ")


def check_same_model(mine: Skeleton, other: Skeleton, folder: str | Path) -> None:
    """Whether ``other``, of ``folder``, computes what ``mine`` does with the same parameters.

    Raises:
        ModelError: their configs or their constants differ.
    """
    check_same_config(mine, folder)
    constants = dict(mine.named_buffers())
    for name, b in other.named_buffers():
        if not torch.equal(b.cpu(), constants[name].cpu()):
            raise ModelError(f"{folder} holds another {name} than the model this backend was made for")


def _meaningful(config: dict[str, Any]) -> dict[str, Any]:
    """A config less what names it and what belongs to a head."""
    names = ("architectures", "transformers_version", "dtype", "use_cache", "id2label", "label2id", "num_labels")
    return {k: v for k, v in config.items() if k not in names and not k.startswith("_")}


def read_config(folder: str | Path) -> Any:
    """The transformers config of a folder.

    Raises:
        ModelError: there is none, it cannot be read, or it asks for what a pure step cannot have.
    """
    import transformers

    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        # transformers' advice on its own versions, on further lines, does not help here.
        raise ModelError(f"{folder}/config.json cannot be read: {str(error).splitlines()[0]}") from error
    # Dropout of heads that transformers would put on top is never run here.
    dropout = {
        name: rate
        for name, rate in config.to_dict().items()
        if isinstance(rate, (int, float)) and rate > 0 and ("dropout" in name or name.endswith("_pdrop"))
        if not name.startswith(("classifier", "summary"))
    }
    if dropout:
        raise ModelError(f"{folder}/config.json sets {dropout}: a pure step has no dropout; set it to 0.0")
    if any("dynamic" in _kind(rope) for rope in _ropes(config)):
        raise ModelError(
            f"{folder}/config.json sets rotary embeddings of kind 'dynamic', whose frequencies depend on the rows "
            f"before, which a pure step cannot have; set rope_type to 'default', which is the same up to "
            f"max_position_embeddings"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{folder} has layers of kind {sorted(odd)}, which would mix packed rows")
    return config


def _ropes(config: Any) -> list[dict[str, Any]]:
    """What a config says of rotary embeddings: of all layers, or of each kind of layers."""
    text = config.get_text_config()
    found = [getattr(text, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    return found + [kind for rope in found for kind in rope.values() if isinstance(kind, dict)]


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def _longest(config: Any) -> float:
    """The most tokens of a row for which rotary frequencies do not depend on the rows beside it."""
    limit = "original_max_position_embeddings"
    return min((r.get(limit, math.inf) for r in _ropes(config) if _kind(r) == "longrope"), default=math.inf)


@torch.no_grad()
def _check(skeleton: Skeleton, folder: str | Path) -> None:
    """Refuse a model whose rows see each other, or which changes its logits after the head."""
    vocab = skeleton.config.get_text_config().vocab_size
    rows = [[1 % vocab, 2 % vocab, 3 % vocab], [5 % vocab, 4 % vocab]]
    batch = Batch.from_rows(rows)

    def hidden(batch: Batch) -> Tensor:
        return skeleton.hidden_states(batch.tokens, batch.positions, Packing.of(batch, torch.device("cpu")))

    together = hidden(batch)
    apart = torch.cat([hidden(Batch.from_rows([row])) for row in rows])
    scale = together.abs().max().clamp(min=1.0)
    if (together - apart).abs().max() > 1e-3 * scale:
        raise ModelError(f"{folder}: rows packed together see each other in {type(skeleton.model).__name__}")
    if skeleton.head == "value":
        return
    logits = skeleton.model(
        input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False,
        packing=Packing.of(batch, torch.device("cpu")),
    ).logits[0]  # fmt: skip
    if (skeleton.output_layer(together) - logits).abs().max() > 1e-3 * logits.abs().max().clamp(min=1.0):
        raise ModelError(f"{folder}: {type(skeleton.model).__name__} changes its logits after the output layer")


def compile_layer(layer: nn.Module) -> None:
    """Let ``torch.compile`` make the kernels of a decoder layer, one set for all layers and all numbers of tokens."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            # Only caches ask for it, and compiled code would be of one layer alone.
            module.layer_idx = 0
    compiled = torch.compile(layer.forward)

    def forward(hidden: Tensor, *args: Any, packing: Packing, **kwargs: Any) -> Any:
        # Nothing else is to vary: kernels that divide by sizes of heads known only at run time are far slower.
        by_token = (hidden, kwargs.get("position_ids"), *(kwargs.get("position_embeddings") or ()))
        for t in by_token:
            if t is not None:
                torch._dynamo.maybe_mark_dynamic(t, 1)
        for t in (packing.slots, packing.cu_seqlens, packing.places):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        return compiled(hidden, *args, packing=packing, **kwargs)

    layer.forward = forward  # type: ignore[method-assign]


def _to_meta(model: nn.Module) -> None:
    """Drop the storage of all parameters; a tied weight stays one parameter."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if p not in made:
                    made[p] = nn.Parameter(torch.empty_like(p, device="meta"))
                module._parameters[name] = made[p]


class quiet:
    """Hold back transformers' progress bars and its warnings on newly made heads."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        logging.enable_progress_bar()
