"""Hugging Face folders as values: a skeleton and its parameters by name, refused where a pure step cannot run them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from verl_fn.backends.hf import attention
from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.lora import Lora, canonical
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.errors import UserError
from verl_fn.state import Batch, Key

# What transformers calls the output layers of language models, and those of classifiers.
HEADS = frozenset({"lm_head", "embed_out", "output_projection", "score", "classifier"})


class ModelError(UserError, ValueError):
    """A folder that cannot be loaded or a model that cannot be run, with what to do."""


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
    skeleton = Skeleton(model, head, _longest(config))
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
