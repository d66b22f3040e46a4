"""Transformers models as functions of their parameters: skeletons that own none."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from verl_fn.backends.hf.attention import NAME, Packing
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.logprobs import Kernels
from verl_fn.backends.hf.lora import Adapters, Lora, canonical, inject
from verl_fn.backends.hf.vision import Family, Seen, check_images, family_of
from verl_fn.state import Batch, Buffers, Key, Params, SharedSetting
from verl_fn.state.guards import expect_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED, PADDED = "packed", "padded"
LAYER_INDEX = "layer_idx"  # transformers' attribute of attention modules
# The most forms in which torch compiles a layer: one for each kind of layer, for one row and for several, with
# gradients and without. Past the limit torch runs the layer uncompiled. A checkpointed layer may then save other
# tensors in its second forward pass than in its first one, and torch raises an error.
COMPILED_FORMS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_of(given: str | torch.dtype, option: str) -> torch.dtype:
    """Returns the dtype that a backend's ``option`` is or names.

    Raises:
        ValueError: no backend computes in it.

    Example:
        >>> dtype_of("bfloat16", "dtype"), dtype_of(torch.float32, "dtype")
        (torch.bfloat16, torch.float32)
    """
    dtype = given if isinstance(given, torch.dtype) else DTYPES.get(given)
    if dtype is None or dtype not in DTYPES.values():
        raise ValueError(f"{option} is {given!r}; it must be one of {', '.join(DTYPES)}")
    return dtype


# The module replaces itself by an object with a property; a type checker cannot see that.
_of_torch: Any = torch.utils.deterministic


def _use_deterministic(setting: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])


_deterministic = SharedSetting(
    lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    _use_deterministic,
)
_filling = SharedSetting(
    lambda: bool(_of_torch.fill_uninitialized_memory),
    lambda fills: setattr(_of_torch, "fill_uninitialized_memory", fills),
)


def unfilled() -> AbstractContextManager[None]:
    """Leaves memory that is allocated inside as it is; deterministic algorithms would write it, a kernel a tensor."""
    return _filling.set_to(False)


@contextlib.contextmanager
def repeatable(asked: bool) -> Iterator[None]:
    """Turns deterministic kernels on inside, if ``asked``; they stay on where they were on already."""
    with contextlib.ExitStack() as stack:
        if asked:
            stack.enter_context(_deterministic.set_to((True, False)))
            stack.enter_context(unfilled())
        yield


@attrs.frozen
class Fit:
    """How a model is run so that each row is computed as if by itself; ``checks.fit_of`` finds it.

    Attributes:
        layout: ``packed``, rows end to end in one sequence, or ``padded``, a table of rows with padding on the right.
        attention: transformers' name for the implementation of attention.
        scale: a factor of the logits.
        softcap: the bound c of logits c * tanh(logits / c), if any; the factor is applied before.
        own_head: logits are computed by the model's own code, since it is no output layer with factor and bound.
        repeats: a forward pass runs a layer more than once, so a cache with an entry for each layer is wrong.
        cached: rows that are not packed can go on from transformers' own cache (``hf.past``).
        longest: the most tokens of a row that transformers' own code computes right.
        why: why rows are not packed, if packing was tried.
    """

    layout: str = PACKED
    attention: str = NAME
    scale: float = 1.0
    softcap: float | None = None
    own_head: bool = False
    repeats: bool = False
    cached: bool = False
    longest: float = math.inf
    why: str = attrs.field(default="", eq=False)

    def heat(self, temperature: Tensor | None, hidden: Tensor) -> tuple[Tensor | None, float | None]:
        """Returns the temperature and the soft cap that make the output layer's products the model's logits.

        A factor of the logits is the inverse of a temperature.

        Args:
            temperature: one for each hidden state; None stands for 1.

        Example:
            >>> Fit(scale=0.5, softcap=4.0).heat(None, torch.zeros(1, 8))
            (tensor([2.]), 8.0)
        """
        if self.scale == 1.0:
            return temperature, self.softcap
        whole = torch.ones(len(hidden), device=hidden.device) if temperature is None else temperature
        return whole / self.scale, self.softcap and self.softcap / self.scale


class Skeleton(nn.Module):
    """A model whose parameters are on the meta device; every call is given the real ones.

    ``run`` replaces the parameters while ``fn`` runs, so a backward pass inside ``fn`` recomputes checkpointed layers
    with the same parameters.

    Attributes:
        head: ``lm`` for a language model, ``value`` for a scalar for each token.
        trained: whether a model without adapters is trained.
        frozen_tower: whether the module that sees images is not trained.
        longest: the most tokens of a row.
        files: the contents of the other files of the model's folder; a checkpoint holds them too.
        head_kernels: the kernels of log-probs; None for the default ones.
        transformed: whether this is inside of ``transformable``.
    """

    def __init__(self, model: PreTrainedModel, head: str, longest: float = math.inf, fit: Fit | None = None) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.head = head
        self.adapters = Adapters()
        self.trained = True
        self.frozen_tower = False
        self.longest = longest
        self.fit = fit or Fit()
        self.files: dict[str, bytes] = {}
        self.head_kernels: Kernels | None = None
        self.transformed = False
        self._inside: dict[str, str] = {}

    def forward(self, fn: Callable[[Skeleton], Any]) -> Any:
        return fn(self)

    def run(self, tensors: dict[str, Tensor], fn: Callable[[Skeleton], Any]) -> Any:
        """Returns ``fn(skeleton)`` with the model's parameters and buffers replaced by ``tensors``."""
        renamed = {f"model.{self._inside.get(name, name)}": tensor for name, tensor in tensors.items()}
        return torch.func.functional_call(self, renamed, (fn,), tie_weights=True)

    @contextlib.contextmanager
    def transformable(self) -> Iterator[None]:
        """Makes the model accept every ``torch.func`` transformation inside, with the same derivative from each.

        No layer is recomputed, since transformations refuse the hooks for that, one of which makes embeddings require
        gradients. The embedding of the padding token is made a constant in forward mode too, as torch makes it one in
        the backward pass only.
        """
        training = [module for module in self.model.modules() if module.training]
        embeddings = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        hooks = {m: dict(m._forward_hooks) for m in embeddings}
        padded = {m: m.padding_idx for m in embeddings if m.padding_idx is not None}
        self.model.eval()
        self.transformed = True
        for module in hooks:
            module._forward_hooks.clear()
        for module, padding in padded.items():
            module.forward = functools.partial(_embed, module.forward, padding)  # type: ignore[method-assign]
            module.padding_idx = None
        try:
            yield
        finally:
            self.transformed = False
            for module in training:
                module.training = True
            for module, own_hooks in hooks.items():
                module._forward_hooks.update(own_hooks)
            for module, padding in padded.items():
                del module.forward
                module.padding_idx = padding

    def adapt(self, lora: Lora, key: Key, folder: str | Path) -> None:
        """Adds adapters, drawn from ``key``; parameters keep their names. Errors name ``folder``.

        Raises:
            LoraError: this model cannot have them.
        """
        frozen = self.tower if self.frozen_tower else None
        self.adapters = inject(self.model, lora, self.output_layer, key, folder, without=frozen)
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        self._inside = {canonical(name): name for name in names}

    @property
    def trainable(self) -> frozenset[str] | None:
        """The names of trained parameters: of the adapters and a value head, or None for all parameters."""
        if self.adapters.lora is None:
            if not self.trained:
                return frozenset()
            if not self.frozen_tower:
                return None
            return frozenset(name for name, _ in self.model.named_parameters()) - self.frozen_names
        head = set(self.output_layer.parameters()) if self.head == "value" else set()
        return frozenset(self.adapters.names()) | {n for n, p in self.model.named_parameters() if p in head}

    @property
    def trained_head(self) -> str:
        """The name of the value head, since it is trained although it has no adapter; empty for a language model."""
        return self.output_name if self.head == "value" else ""

    @property
    def frozen_names(self) -> frozenset[str]:
        """The parameters of a tower that is not trained."""
        inside = set(self.tower.parameters()) if self.frozen_tower and self.tower is not None else set()
        return frozenset(name for name, p in self.model.named_parameters() if p in inside)

    def freeze_tower(self, frozen: bool, folder: str | Path) -> None:
        """Sets whether the module that sees images is not trained.

        Raises:
            ModelError: there is none.
        """
        if frozen and self.tower is None:
            raise ModelError(
                f"{folder} has no tower for images that could be frozen; set freeze_vision_tower to false"
            )
        self.frozen_tower = frozen

    def move_buffers(self, device: torch.device) -> None:
        """Moves the model's constants, such as rotary frequencies, to a device."""
        for module in self.modules():
            for name, b in module._buffers.items():
                module._buffers[name] = None if b is None else b.to(device)

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def family(self) -> Family | None:
        """What models with images of this kind have in common; None for a model of text and for a value model."""
        return family_of(self.config) if self.head == "lm" else None

    @property
    def language_model(self) -> nn.Module:
        """The model without its tower."""
        return self.model if self.family is None else getattr(self.body, self.family.text)

    @property
    def tower(self) -> nn.Module | None:
        """The module that sees images, if the model has one."""
        return None if self.family is None else getattr(self.body, self.family.tower)

    @functools.cached_property
    def conversions(self) -> list[Any]:
        """transformers' conversions of names and tensors in the model's files to the model's own."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions: list[Any] = get_model_conversion_mapping(self.model, add_legacy=False)
        return conversions

    @property
    def constants(self) -> dict[str, Tensor]:
        """The folder's values of the buffers that a model's file contains."""
        return {name: self.model.get_buffer(name) for name in self._constants}

    @functools.cached_property
    def _constants(self) -> list[str]:
        saved = self.model.state_dict(keep_vars=True)
        return [name for name, _ in self.model.named_buffers() if name in saved]

    @contextlib.contextmanager
    def holding(self, params: Params) -> Iterator[None]:
        """Computes with the buffers of these parameters inside, in the place of the folder's.

        Raises:
            ValueError: they have other buffers than the model.
        """
        self.check_buffers(params.buffers)
        own = self.constants
        self._hold(params.buffers)
        try:
            yield
        finally:
            self._hold(own)

    def _hold(self, buffers: Mapping[str, Tensor]) -> None:
        for name, b in buffers.items():
            owner, _, last = name.rpartition(".")
            module = self.model.get_submodule(owner)
            held = module._buffers[last]
            module._buffers[last] = b if held is None else b.to(held.device)

    def new_buffers(self, device: torch.device | str) -> Buffers:
        """Returns copies of the folder's buffers, for a state."""
        return Buffers({name: b.detach().to(device, copy=True) for name, b in self.constants.items()})

    def check_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Raises ValueError for buffers that are not this model's."""
        wanted = {name: tuple(b.shape) for name, b in self.constants.items()}
        given = {name: tuple(b.shape) for name, b in buffers.items()}
        if differing := sorted(wanted.items() ^ given.items()):
            raise ValueError(
                f"params.buffers are not this model's: {len({name for name, _ in differing})} differ, such as "
                f"{differing[0][0]}; keep the buffers that the backend made, as attrs.evolve(params, leaves=...) does"
            )

    @property
    def padded(self) -> bool:
        """Whether rows are padded to the longest of their micro-batch."""
        return self.fit.layout == PADDED

    @property
    def body(self) -> Any:
        """The part of the model that computes hidden states."""
        body = self.model.base_model
        return self.model.model if body is self.model else body

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The modules of the longest stack of the language model; empty if it has none."""
        return _stack(self.language_model)

    @property
    def tower_layers(self) -> Sequence[nn.Module]:
        """The modules of the tower's longest stack; empty without a tower."""
        return () if self.tower is None else _stack(self.tower)

    @property
    def output_layer(self) -> nn.Linear:
        """The language-model head or the value head."""
        if self.head == "lm":
            return self.model.get_output_embeddings()
        return next(getattr(self.model, name) for name in ("score", "classifier") if hasattr(self.model, name))

    @property
    def output_name(self) -> str:
        """The name of the output layer."""
        return next(name for name, module in self.model.named_modules() if module is self.output_layer)

    def check_trained(self, params: Params) -> None:
        """Raises an error for a state that a checkpoint would not restore with the same parameters trained.

        A checkpoint does not record which parameters are trained.

        Raises:
            ValueError: the state trains other parameters than the states that the backend makes.
        """
        own = set(params if self.trainable is None else self.trainable)
        if differing := sorted(own.symmetric_difference(params.trained())):
            raise ValueError(
                f"this state has another set of trainable parameters than the backend's ({len(differing)} differ: "
                f"{', '.join(differing[:3])}), and a checkpoint does not keep the set. If its params are of another "
                "state, such as a reference with the parameters of the actor, keep its own set: "
                "attrs.evolve(reference, params=attrs.evolve(actor.params, trainable=reference.params.trainable)). "
                "If you chose the set, save params = attrs.evolve(state.params, "
                "trainable=backend.init(key).params.trainable) and optimizer=backend.optimizer.init(params), whose "
                "moments are zeros; choose the set again after restore"
            )

    def check_batch(self, batch: Batch) -> None:
        """Raises an error for a batch that this model cannot compute.

        Raises:
            ValueError: a row is too long, has a token that the model does not know, or images that it cannot read.
        """
        self.check_longest(int(batch.lengths.max()))
        expect_tokens(batch, self.config.get_text_config().vocab_size)
        check_images(self.family, self.config, batch, padded=self.padded)

    def check_longest(self, tokens: int) -> None:
        """Raises an error for a row that is too long to be computed as if no other row were there.

        Raises:
            ValueError: the model's rotary frequencies depend on rows of this length, or its layers compute such rows
                wrong.
        """
        if tokens > self.fit.longest:
            raise ValueError(
                f"a row has {tokens} tokens; transformers' own code for the state-space layers of "
                f"{type(self.model).__name__} is right only up to chunk_size, {self.fit.longest} tokens: shorten the "
                "rows, raise chunk_size in config.json, or install mamba-ssm and causal-conv1d"
            )
        if tokens > self.longest:
            raise ValueError(
                f"a row has {tokens} tokens, more than the {self.longest} of this model's "
                f"original_max_position_embeddings: a longer row would change all rows of a micro-batch (longrope)"
            )

    def hidden_states(self, tokens: Tensor, positions: Tensor, packing: Packing, seen: Seen | None = None) -> Tensor:
        """Returns the last hidden state of each packed token, ``[T, H]``; ``seen`` are the images of the rows.

        Raises:
            ValueError: a row is too long to be computed as if no other row were there.
        """
        self.check_longest(packing.longest)
        # Fused kernels have no forward-mode derivative.
        with sdpa_kernel(SDPBackend.MATH) if packing.plain else contextlib.nullcontext():
            if self.padded and seen is None:
                # The model as it is: causal attention hides the padding after a row.
                outputs = self.body(input_ids=packing.table(tokens), use_cache=False)
                return outputs.last_hidden_state.flatten(0, 1).index_select(0, packing.slots)
            # transformers does not read a mask of four dimensions. Without a mask it looks for packed rows in the
            # positions, but cannot do so with a traced tensor.
            mask = torch.empty(1, 1, 1, 1, device=tokens.device) if packing.plain else None
            given: dict[str, Any] = {"attention_mask": mask, "use_cache": False, "packing": packing}
            if seen is None:
                outputs = self.body(input_ids=tokens[None], position_ids=positions[None], **given)
            else:
                given["packing"] = attrs.evolve(packing, blocks=seen.blocks)
                outputs = self.read(tokens, positions[None], seen, **given)
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden

    def read(self, tokens: Tensor, positions: Tensor, seen: Seen, **given: Any) -> Any:
        """Runs the language model on tokens and the features of images; ``given`` is passed to it.

        Args:
            tokens: of all rows.
            positions: of families with one axis, ``[1, T]``.
            given: arguments of the language model.
        """
        places = positions if seen.positions is None else seen.positions.T[:, None]
        return self.language_model(**seen.embedded(self.body, tokens), position_ids=places, **given)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of hidden states in fp32, ``[N, V]``."""
        if self.fit.own_head:
            return self.own_logits(hidden).float()
        logits = self.output_layer(hidden.to(self.output_layer.weight.dtype)).float()
        logits = logits if self.fit.scale == 1.0 else logits * self.fit.scale
        return logits if self.fit.softcap is None else torch.tanh(logits / self.fit.softcap) * self.fit.softcap

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits that the model's own code makes of hidden states, ``[N, V]``."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        body = self.body
        # The body answers with the hidden states that are there already.
        body.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del body.forward
        return logits


def _stack(model: nn.Module) -> Sequence[nn.Module]:
    """Returns the list of modules with most parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    largest = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=None)
    return list(largest or ())


def _embed(embed: Callable[[Tensor], Tensor], padding: int, ids: Tensor) -> Tensor:
    rows = embed(ids)
    return torch.where((ids == padding)[..., None], rows.detach(), rows)


@attrs.frozen(eq=False)
class Hollow:
    """A model without its weights.

    Attributes:
        skeleton: on the meta device, except for constants such as rotary frequencies.
        shapes: every parameter by canonical name, on the meta device, in the dtype that a state holds it in; adapters
            come last.
        adapters: the values of LoRA's adapters.
        new_head: the output layer is new and of zeros, so the folder need not have it.
    """

    skeleton: Skeleton
    shapes: dict[str, Tensor]
    adapters: dict[str, Tensor]
    new_head: bool


def compile_layer(layer: nn.Module) -> None:
    """Compiles a decoder layer with ``torch.compile``; all layers and all numbers of tokens share its kernels."""
    for module in layer.modules():
        if hasattr(module, LAYER_INDEX):
            # Only caches read it, and code that was compiled with it would serve only one layer.
            setattr(module, LAYER_INDEX, 0)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILED_FORMS)
    compiled = torch.compile(layer.forward)

    def forward(hidden: Tensor, *args: Any, packing: Packing | None = None, **kwargs: Any) -> Any:
        # Only numbers of tokens vary: kernels for head sizes that are known only at run time are far slower.
        by_token = (hidden, kwargs.get("position_ids"), *(kwargs.get("position_embeddings") or ()))
        for t in by_token:
            if isinstance(t, Tensor):
                torch._dynamo.maybe_mark_dynamic(t, 1)
        if packing is None:
            torch._dynamo.maybe_mark_dynamic(hidden, 0)
            return compiled(hidden, *args, **kwargs)
        for t in (packing.slots, packing.cu_seqlens, packing.places):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        return compiled(hidden, *args, packing=packing, **kwargs)

    layer.forward = forward
