"""Values under canonical names, both ways, through the mappings of Megatron-Bridge.

Bridge maps weights. Gradients and moments go the same way. This is right if a mapping only moves elements. A norm
that scales by 1 + weight in Megatron is shifted when its leaf is copied to its buffer, so that the leaf has
transformers' values. A mapping that computes anything else is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_fn.backends.agreement import gathered
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Adapters
from verl_fn.backends.megatron.adapters import halves
from verl_fn.backends.megatron.gathering import Parts, converted, names_of
from verl_fn.backends.megatron.names import Canonical
from verl_fn.backends.megatron.shards import Piece
from verl_fn.backends.protocol import BUCKET_BYTES
from verl_fn.errors import raised_as

# Families with images that Megatron trains, and what Bridge's names of their language models begin with.
SEEING = ("qwen2_5_vl", "qwen3_vl")
_LANGUAGE, _OF_LANGUAGE = "language_model.", "model.language_model."
# A mapping that subtracts 1: what maps a weight is wrong for its gradient.
_CENTRES = "RMSNorm2ZeroCenteredRMSNormMapping"


@attrs.frozen(eq=False)
class Task:
    """A parameter of Megatron and the tensors that it is made of.

    Attributes:
        leaf: the name of its leaf in values of this backend: the hub's names, joined by ``+``.
        hub: the hub's names of its tensors; of a stack, ``name[expert]``.
        hub_anywhere: the hub's names of the tensors that any rank needs for the task of this number.
        mapping: Bridge's mapping, for exporting.
        importing: another instance of it. One that has imported a parameter knows its kind on this pipeline stage
            alone, and an export would then wait for other stages that do not know it.
        module: Megatron's module that has the parameter, None where it is on another pipeline stage.
        param: the parameter, or a buffer that is a constant.
        bridge: Bridge's code for the family.
        shift: what Megatron's weight is more than transformers'.
    """

    leaf: str
    hub: tuple[str, ...]
    hub_anywhere: tuple[str, ...]
    mapping: Any
    importing: Any
    module: nn.Module | None
    param: nn.Parameter | None
    bridge: Any
    shift: float = 0.0


def bridge_of(bridge: Any, config: Any) -> Any:
    """Returns Bridge's code for the family of a config.

    Args:
        bridge: Megatron-Bridge's ``AutoBridge``; it returns a new object for each access.
    """
    own = bridge._model_bridge
    if config.model_type in SEEING:
        own.mapping_registry = functools.partial(_beside_tower, own.mapping_registry)
    return own


def _beside_tower(registry: Callable[[], Any]) -> Any:
    """Returns Bridge's mappings for a language model that has transformers' tower as its module ``visual``."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping

    def named(hub: str) -> str:
        # Bridge has older names of Qwen2.5-VL's tensors, and adapters look for the present ones.
        old = hub.startswith("model.") and not hub.startswith(_OF_LANGUAGE)
        return _OF_LANGUAGE + hub.removeprefix("model.") if old else hub

    mappings = [mapping for mapping in registry().mappings if mapping.megatron_param.startswith(_LANGUAGE)]
    for mapping in mappings:
        mapping.megatron_param = mapping.megatron_param.removeprefix(_LANGUAGE)
        hub = mapping.hf_param
        mapping.hf_param = named(hub) if isinstance(hub, str) else {key: named(name) for key, name in hub.items()}
    return MegatronMappingRegistry(*mappings, ReplicatedMapping("visual.**", "model.visual.**"))


def tasks_of(
    bridge: Any, config: Any, model: nn.Module, head: str, canonical: Canonical, adapters: Adapters
) -> tuple[list[Task], list[Task]]:
    """Returns the tasks of all parameters and of all buffers, in the same order on all ranks.

    All ranks call it together.

    Args:
        model: Megatron's model, without wrappers.
        adapters: the adapters of transformers' model.

    Raises:
        ModelError: a parameter has no mapping, or one that computes with elements.
    """
    own = bridge_of(bridge, config)
    parts, again = (_mappings(own, config, model, head) + halves(model, adapters) for _ in range(2))
    # What reads weights asks a loaded model for its config.
    own.hf_pretrained = SimpleNamespace(config=config)
    hubs = [_hub(mapping) for mapping, _, _ in parts]
    by_rank = gathered(hubs)
    tasks, of_buffers = [], []
    for i, (mapping, module, param) in enumerate(parts):
        centres = any(cls.__name__ == _CENTRES for cls in type(mapping).__mro__)
        if centres and type(mapping).__name__ != _CENTRES:
            raise ModelError(f"{mapping.hf_param}: {type(mapping).__name__} changes values, not only their places")
        anywhere = tuple(dict.fromkeys(name for of_rank in by_rank for name in of_rank[i]))
        importing, shift = again[i][0], 0.0
        if centres:
            mapping, importing, shift = _moving(mapping, model), _moving(importing, model), -1.0
        task = Task("+".join(hubs[i]), hubs[i], anywhere, mapping, importing, module, param, own, shift)
        if {canonical.place(name).name for name in anywhere} <= canonical.constants.keys():
            of_buffers.append(task)
        elif param is not None and not isinstance(param, nn.Parameter):
            raise ModelError(f"Megatron-Bridge holds {task.leaf} as a buffer, and buffers have no gradient")
        else:
            tasks.append(task)
    _check_complete(model, tasks)
    order = {name: i for i, name in enumerate(canonical.shapes)}
    return sorted(tasks, key=lambda task: min(order[canonical.place(h).name] for h in task.hub_anywhere)), of_buffers


def _moving(mapping: Any, model: Any) -> Any:
    """Returns a mapping of the same names that only moves elements."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    plain = AutoMapping(mapping.megatron_param, mapping.hf_param)
    plain.set_process_groups_from_pg_collection(model.pg_collection)
    return plain


def _hub(mapping: Any) -> tuple[str, ...]:
    """Returns the hub's names of a parameter; of the expert that it belongs to, where they name stacks of experts."""
    names = names_of(mapping.hf_param)
    if not getattr(mapping, "is_grouped_export", False):
        return names
    from megatron.bridge.utils.common_utils import extract_expert_number_from_param

    expert = extract_expert_number_from_param(mapping.megatron_param)
    return tuple(f"{name}[{expert}]" for name in names)


@torch.no_grad()
def fill(task: Task, canonical: Canonical, buffers: Mapping[str, Tensor]) -> None:
    """Copies buffers by canonical name to a buffer of Megatron's."""
    if task.module is not None and task.param is not None:
        whole = {name: buffers[canonical.place(name).name] for name in task.hub}
        given = {name: t.to(task.param.device, torch.float32) for name, t in whole.items()}
        task.param.copy_(_converted(task, given, task.param.shape))


def _mappings(
    own: Any, config: Any, model: Any, head: str
) -> list[tuple[Any, nn.Module | None, nn.Parameter | None]]:
    """Returns Bridge's mapping of every parameter, with the module and the parameter where this rank has it."""
    from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping

    given = [t for t in own.build_conversion_tasks(config, [model]) if t is not None]
    if head == "value":
        given = [t for t in given if not t.global_param_name.startswith("output_layer.")]
    parts = [(t.mapping, t.megatron_module, t.param_weight) for t in given]
    if head == "value":
        layer = model.output_layer if model.post_process else None
        for name in ("weight", "bias"):
            mapping = ReplicatedMapping(f"output_layer.{name}", f"score.{name}")
            mapping.set_process_groups_from_pg_collection(model.pg_collection)
            parts.append((mapping, layer, None if layer is None else getattr(layer, name)))
    return parts


def _check_complete(model: nn.Module, tasks: list[Task]) -> None:
    mapped = {id(task.param) for task in tasks}
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    lacking = [
        name
        for name, p in model.named_parameters()
        if id(p) not in mapped and not (tied and name == "output_layer.weight")
    ]
    if lacking:
        raise ModelError(f"Megatron-Bridge has no mapping for {len(lacking)} parameters, such as {lacking[:3]}")


def present(tasks: list[Task], leaves: Mapping[str, Tensor]) -> list[int]:
    """Returns the numbers of the tasks whose parameters a value has on any rank; all ranks call it together.

    Args:
        leaves: the value on this rank: gradients are only of adapters, and a reference has none.
    """
    by_rank = gathered([task.param is not None and task.leaf in leaves for task in tasks])
    return [i for i in range(len(tasks)) if any(of_rank[i] for of_rank in by_rank)]


def named(
    tasks: list[Task], parts: Parts, canonical: Canonical, leaves: Mapping[str, Tensor], nbytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yields whole tensors by canonical name, on the device of the leaves; all ranks go through them together.

    No rank has more than one bucket of ``nbytes`` beside its own elements and the tensor that it yields.

    Args:
        parts: of all parameters.
        leaves: the elements that this rank owns, by leaf.
        nbytes: of the tensors that ranks exchange together.
    """
    numbers = present(tasks, leaves)

    def by_hub() -> Iterator[tuple[str, Tensor]]:
        for bucket in parts.buckets(numbers, nbytes):
            own = [leaves.get(tasks[i].leaf) if tasks[i].param is not None else None for i in bucket]
            flat, arrived = parts.exchanged(bucket, own)
            for i in bucket:
                task = tasks[i]
                for name, t in converted(task.mapping, task.module, arrived.pop(i), parts.layout.sizes.tp):
                    # A view would keep the bucket.
                    yield name, t.clone() if t.untyped_storage().data_ptr() == flat else t

    # A pipeline stage may have no leaves of a value that has only adapters.
    device = next((t.device for t in leaves.values()), None)
    of_value = canonical.of(name for i in numbers for name in tasks[i].hub_anywhere)
    with torch.no_grad():
        for name, t in of_value.joined(by_hub()):
            yield name, t.to(device, canonical.shapes[name].dtype)


def divided(
    tasks: list[Task],
    pieces: Mapping[str, Piece],
    read: Callable[[str], Tensor],
    canonical: Canonical,
    together: bool = False,
) -> dict[str, Tensor]:
    """Returns the elements that this rank owns of whole tensors, by leaf; all ranks call it together.

    Args:
        tasks: of the parameters to divide.
        read: returns a whole tensor by hub's name, on the CPU.
        canonical: the canonical names; it has the dtypes of the results.
        together: whether all ranks have to read the same tensors in the same order.
    """
    elements: dict[str, Tensor] = {}
    sums: dict[str, tuple[int, int]] = {}
    with torch.no_grad():
        for task in tasks:
            if task.module is None and not together:
                continue
            whole = {name: read(name) for name in (task.hub_anywhere if together else task.hub)}
            if task.module is None or task.param is None:
                continue
            param, piece = task.param, pieces[task.leaf]
            tensors = {name: whole[name].to(param.device, torch.float32) for name in task.hub}
            converted = _converted(task, tensors, param.shape)
            owned = converted.reshape(-1)[piece.start : piece.stop]
            sums[task.leaf] = sum(map(_bits, tensors.values())), _bits(owned)
            elements[task.leaf] = owned.to(canonical.shapes[canonical.place(task.hub[0]).name].dtype, copy=True)
    _check_moved(sums)
    return {leaf: elements[leaf] for leaf in pieces if leaf in elements}


def _converted(task: Task, tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Returns what Bridge makes of the hub's tensors by name, padded to the shape of Megatron's parameter.

    Raises:
        ModelError: the shapes do not fit.
    """
    assert task.module is not None
    named = {name.partition("[")[0]: _in_stack(name, t) for name, t in tensors.items()}
    given = task.bridge.maybe_modify_loaded_hf_weight(task.importing.hf_param, named)
    what = f"{task.leaf}: {type(task.mapping).__name__} cannot convert it"
    with raised_as(ModelError, what, RuntimeError), _in_fp32(task.module):
        converted: Tensor = task.importing.hf_to_megatron(given, task.module)
    if converted.shape == shape:
        return converted
    vocabulary = task.mapping.megatron_param.startswith(("embedding.", "output_layer."))
    if converted.shape[1:] != shape[1:] or len(converted) > shape[0] or not vocabulary:
        raise ModelError(
            f"{task.leaf}: {type(task.mapping).__name__} makes the shape {list(converted.shape)} of it, and the "
            f"parameter of Megatron's has {list(shape)}; the provider has another size than the model's folder"
        )
    # Megatron pads the vocabulary with rows that no token has.
    padded = converted.new_zeros(shape)
    padded[: len(converted)] = converted
    return padded


def _in_stack(name: str, t: Tensor) -> Tensor:
    """Returns a tensor whose entry for an expert is the tensor of the expert, if ``name`` is ``stack[expert]``."""
    expert = name.partition("[")[2].rstrip("]")
    return t.expand(int(expert) + 1, *t.shape) if expert else t


def _bits(t: Tensor) -> int:
    """Returns the sum of the elements' bits: the same in every order."""
    return int(t.contiguous().view(torch.int32).sum(dtype=torch.int64))


def _check_moved(sums: Mapping[str, tuple[int, int]]) -> None:
    """Raises ModelError unless mappings only moved elements; all ranks call it together.

    Args:
        sums: for each leaf of this rank, the sums of bits of the hub's tensors and of the elements that it owns.
    """
    whole: dict[str, int] = {}
    owned: dict[str, int] = {}
    for of_rank in gathered(sums):
        for leaf, (of_hub, of_piece) in of_rank.items():
            whole[leaf] = of_hub
            owned[leaf] = owned.get(leaf, 0) + of_piece
    if changed := [leaf for leaf, total in whole.items() if owned[leaf] != total]:
        raise ModelError(
            f"the mappings of {len(changed)} parameters, such as {changed[0]}, change their values, and not only "
            "their places: gradients and moments cannot go the way of weights"
        )


@contextlib.contextmanager
def _in_fp32(module: nn.Module) -> Iterator[None]:
    """Lets a module's parameters look fp32, since Bridge sends tensors between ranks in the dtype of the parameter.

    Other parameters take their place, without memory: one whose data gets another dtype loses the hooks of Megatron's
    DDP, and with them its gradient.
    """
    owners = [(owner, dict(owner._parameters)) for owner in module.modules()]
    for owner, params in owners:
        for name, p in params.items():
            if p is not None and p.dtype != torch.float32:
                owner._parameters[name] = nn.Parameter(torch.zeros((), device=p.device).expand(p.shape))
    try:
        yield
    finally:
        for owner, params in owners:
            owner._parameters.update(params)


def sent(canonical: Canonical, whole: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """Returns a function by which all ranks together read tensors that the first rank has, by hub's name.

    Args:
        whole: the tensors by canonical name, on the first rank; any mapping on others.
    """

    def read(hub: str) -> Tensor:
        place = canonical.place(hub)
        shape = place.of(canonical.shapes[place.name]).shape
        own = place.of(whole[place.name]).float().contiguous() if dist.get_rank() == 0 else torch.empty(shape)
        if dist.get_world_size() > 1:
            dist.broadcast(own, 0)
        return own

    return read


def in_rows(canonical: Canonical, rows: Callable[[str, int, int], Tensor]) -> Callable[[str], Tensor]:
    """Returns a function by which a rank reads tensors by itself, by hub's name.

    Args:
        rows: returns rows of a tensor by canonical name, from the first to the one before the last.
    """

    def read(hub: str) -> Tensor:
        place = canonical.place(hub)
        if place.expert is None:
            return rows(place.name, 0, canonical.shapes[place.name].shape[0])
        return rows(place.name, place.expert, place.expert + 1)[0, place.start : place.end]

    return read
