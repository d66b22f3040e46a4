"""Settings with which a run fits its GPUs, found by counting the bytes of plans that have them.

The config may leave the rollout engine open: which one, its share of a GPU, its rows at once. These are chosen.
"""

from __future__ import annotations

import copy
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from typing import TypeAlias

import attrs

from verl_fn import build
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.config import ConfigError, Plan, RolePlan, make_plan
from verl_fn.config.load import flat, put, structure
from verl_fn.config.plan import SHARE, SLOTS
from verl_fn.driver import ranks

from .checks import check_gpus, check_ranks
from .memory import (
    GENERATION,
    GIB,
    PUBLICATION,
    Phase,
    element_width,
    engine_weights,
    host_memory,
    largest,
    model_sizes,
    phases,
    share,
    sizes_of,
    step_tokens,
)

STEP = 1024  # budgets of tokens are multiples of it
MORE_MACHINES = (2, 4, 8, 16)
Settings: TypeAlias = tuple[str, ...]
Change: TypeAlias = Settings | Callable[[Plan, int], Settings | None]
# What is chosen or proposed leaves a twentieth of the GPU to what activations take beyond their estimate.
FILLED = 0.95
MOST_SHARE, MOST_SLOTS = 0.9, 1024
SHARES = [percent / 100 for percent in range(round(100 * MOST_SHARE), 0, -5)]
# What vLLM takes beside weights and cache: activations of prompts, logits of its rows and recorded graphs.
COMPUTATION = 4 * GIB
# Sizes of Megatron's layouts beside tensor parallelism, the ones that cost least first.
EXPERTS = "expert_model_parallel_size"
SPLITS = (EXPERTS, "context_parallel_size", "pipeline_model_parallel_size")


@attrs.frozen
class Fit:
    """Settings for a plan, and its phases with them on a GPU.

    Attributes:
        settings: what the plan lacks, as ``key=value``.
        phases: what lies on the GPU in each phase.
        layout: strategy and ranks; empty if they do not change.
        on_cpu: bytes that lie in the memory of CPUs, of all ranks: of a layout all, of a change what it adds.
    """

    settings: Settings
    phases: tuple[Phase, ...]
    layout: str = ""
    on_cpu: int = 0

    @property
    def phase(self) -> Phase:
        """The largest phase."""
        return largest(self.phases)

    def __str__(self) -> str:
        settings = " ".join(self.settings) or "as it is"
        layout = self.layout and f"{self.layout}: "
        on_cpu = f", and {self.on_cpu / GIB:.0f} GiB of CPU memory" if self.on_cpu else ""
        return f"{layout}{settings} (peak {self.phase.nbytes / GIB:.1f} GiB, {self.phase.title}{on_cpu})"

    def by_phase(self) -> str:
        """Returns the bytes of each phase."""
        return "GiB: " + ", ".join(f"{phase.title} {phase.nbytes / GIB:.1f}" for phase in self.phases)


def with_settings(plan: Plan, settings: Sequence[str], gpu: int) -> Plan:
    """Returns the plan of the same config with other settings, as ``key=value``, and an engine of their size."""
    made = make_plan(structure(put(copy.deepcopy(plan.table), settings, lambda key: None)))
    return sized(attrs.evolve(made, rollout=attrs.evolve(made.rollout, used=plan.rollout.used)), gpu)


def largest_budget(plan: Plan, gpu: int) -> Settings | None:
    """Returns the settings of the largest budget of tokens in a micro-batch that fits; None if no row fits.

    More tokens than all rows of a rank have are not proposed, and nothing if the plan's own budget holds all of them.
    """
    roles = plan.roles.values()
    least = -(-plan.rollout.longest // max(role.sharers for role in roles))
    of_rank = max(step_tokens(role, plan) for role in roles)
    if of_rank <= min(role.ppo_max_token_len_per_gpu for role in roles) and fits(plan, gpu):
        return ()

    def fitting(steps: int) -> bool:
        roles = {n: attrs.evolve(role, ppo_max_token_len_per_gpu=steps * STEP) for n, role in plan.roles.items()}
        return fits(attrs.evolve(plan, roles=roles), gpu)

    low, high = -(-least // STEP), max(1, -(-max(of_rank, least) // STEP))
    if not fitting(low):
        return None
    larger = bisect(range(low + 1, high + 1), False, key=lambda steps: not fitting(steps))
    return _in_tables(roles, f"ppo_max_token_len_per_gpu={(low + larger) * STEP}")


def layouts(plan: Plan, gpus: int, gpu: int) -> list[Fit]:
    """Returns the layouts of a plan on a number of GPUs that fit, each with its largest budget of tokens.

    They are one process, and shards over all GPUs; with Megatron, numbers of tensor-parallel ranks. Each is tried
    with and without recomputed layers. If shards do not fit, more changes, in this order: fewer replicas, layers
    freed after their forward pass, ranks that share rows, states on the CPU; with Megatron, more ranks that share
    experts, rows or layers. If nothing fits, engines get GPUs of their own, one half of all, each engine several if
    its weights need them.
    """
    found = [fit for ways in _ways(plan, gpus) for fit in _first_that_fit(plan, ways, gpus, gpu)]
    return found or _first_that_fit(plan, _apart(plan, gpus), gpus, gpu)


def nearest(plan: Plan, gpus: int, gpu: int) -> Fit | None:
    """Returns the layout that needs least memory on a GPU, with the smallest budget of tokens; None without any."""
    kinds = [kind for ways in [*_ways(plan, gpus), _apart(plan, gpus)] for kind in ways]
    budget = _in_tables(plan.roles.values(), f"ppo_max_token_len_per_gpu={-(-plan.rollout.longest // STEP) * STEP}")
    fits: list[Fit] = []
    for kind, offload in product(kinds, ("false", "true")):
        settings = (*kind, *_recomputing(plan, "true"), *_offloading(kind, offload), *budget)
        if (tried := _possible(plan, settings, gpus, gpu)) is not None:
            fits.append(_layout(plan, settings, tried, gpu))
    return min(fits, key=lambda fit: fit.phase.nbytes, default=None)


def enough_gpus(plan: Plan, gpus: int, gpu: int) -> tuple[int, Fit] | None:
    """Returns the least number of GPUs, a multiple of ``gpus``, on which a layout fits, and the layout; or None."""
    # Ranks that share all that they can fit if any do. To try all layouts for each number would take minutes.
    shared = _sharded(plan)[-1]
    least = with_settings(plan, shared, gpu)
    for count in (gpus * n for n in MORE_MACHINES):
        if found := layouts(least, count, gpu):
            return count, attrs.evolve(found[0], settings=(*shared, *found[0].settings))
    return None


def _ways(plan: Plan, gpus: int) -> Iterator[list[Settings]]:
    """Yields lists of settings for layouts; the first of a list that fits is taken."""
    most, colocated = _for_ranks(plan, gpus), plan.rollout.placement == "colocated"
    over: Settings = ("driver.kind=ray", f"ray.ranks={most}")
    if colocated and plan.learns_from == "samples":
        over += (f"rollout.engines={gpus}",)
    powers = [2**i for i in range(most.bit_length())]
    if plan.roles["actor"].strategy == "megatron":
        for power in powers:
            kind = (*over, f"actor.megatron.tensor_model_parallel_size={power}")
            more = ((*kind, setting) for size in SPLITS for n in powers[:4] if (setting := _larger(plan, size, n)))
            yield [kind, *more]
        return
    local: Settings = ("actor.strategy=local", "ray.ranks=1", *(("rollout.engines=1",) if colocated else ()))
    # fsdp with one rank can offload, and local cannot.
    yield [local] if gpus > 1 else [local, (*over, "actor.strategy=fsdp")]
    if gpus > 1:
        size = "actor.fsdp_config.ulysses_sequence_parallel_size"
        kinds = product([f"{size}={power}" for power in powers], _sharded(plan))
        yield [(*over, "actor.strategy=fsdp", shared, *sharded) for shared, sharded in kinds]


def _for_ranks(plan: Plan, gpus: int) -> int:
    """Returns the GPUs that training ranks may have; engines apart keep their own."""
    r = plan.rollout
    return max(0, gpus - (r.engines * r.tensor_parallel_size if r.placement == "apart" else 0))


def _apart(plan: Plan, gpus: int) -> list[Settings]:
    """Returns settings for shards over one half of the GPUs, and engines of one or several GPUs on the other."""
    half, r = gpus // 2, plan.rollout
    if half < 1 or r.name != "vllm" or plan.learns_from != "samples" or plan.roles["actor"].strategy == "megatron":
        return []
    over = ("driver.kind=ray", f"ray.ranks={half}", "actor.strategy=fsdp", "rollout.placement=apart")
    sizes = [2**i for i in range(half.bit_length()) if half % 2**i == 0 and 2**i <= 64]
    engines = [(f"rollout.engines={half // n}", f"rollout.tensor_parallel_size={n}") for n in sizes]
    return [(*over, *kind, *sharded) for kind, sharded in product(engines, _sharded(plan))]


def _sharded(plan: Plan) -> list[Settings]:
    """Returns settings with which ranks of FSDP keep ever fewer elements; the first ones are the plan's own."""
    whole = _kept(plan)
    return [(*copies, *freed) for freed in ((), whole)[: 1 + bool(whole)] for copies in ((), *_fewer_replicas(plan))]


def _fewer_replicas(plan: Plan) -> list[Settings]:
    """Returns settings with fewer whole copies of the parameters among the ranks, most copies first."""
    copies = {table: role.fsdp_config.replicate for table, role in _sharding(plan)}
    most = max(copies.values(), default=1)
    fewer = [n for n in range(most - 1, 0, -1) if most % n == 0]
    return [tuple(f"{t}.fsdp_config.replicate={n}" for t, now in copies.items() if now > n) for n in fewer]


def _kept(plan: Plan) -> Settings:
    """Returns the settings that free gathered layers which the plan keeps until the backward pass."""
    kept = (table for table, role in _sharding(plan) if role.trained and not role.fsdp_config.reshard_after_forward)
    return tuple(f"{table}.fsdp_config.reshard_after_forward=true" for table in dict.fromkeys(kept))


def _sharding(plan: Plan) -> Iterator[tuple[str, RolePlan]]:
    """Yields the table that each role's layout is in, and the role, unless it is of Megatron."""
    for role in plan.roles.values():
        if role.strategy != "megatron":
            # A critic without a strategy of its own has the actor's layout.
            yield "actor" if plan.table["critic"].get("strategy") is None else role.table, role


def _larger(plan: Plan, size: str, value: int) -> str:
    """Returns a larger size of the actor's layout, as a setting; empty if it is not larger, or splits nothing."""
    actor = plan.roles["actor"]
    table = "megatron" if hasattr(actor.megatron, size) else "fsdp_config"
    useless = size == EXPERTS and not sizes_of(actor).experts
    return "" if useless or value <= getattr(getattr(actor, table), size) else f"actor.{table}.{size}={value}"


def _first_that_fit(plan: Plan, kinds: Sequence[Settings], gpus: int, gpu: int) -> list[Fit]:
    """Returns the first layout that fits, without and with recomputed layers as far as both fit."""
    for offload, kind in product(("false", "true"), kinds):
        if offload == "true" and not _offloading(kind, offload):
            continue
        found = []
        for recompute in ("false", "true"):
            settings = (*kind, *_recomputing(plan, recompute), *_offloading(kind, offload))
            tried = _possible(plan, settings, gpus, gpu)
            if tried is not None and (budget := largest_budget(tried, gpu)) is not None:
                settings += budget
                found.append(_layout(plan, settings, with_settings(plan, settings, gpu), gpu))
        if found:
            return found
    return []


def _in_tables(roles: Iterable[RolePlan], setting: str) -> Settings:
    """Returns a setting in the table of each role."""
    return tuple(f"{table}.{setting}" for table in dict.fromkeys(role.table for role in roles))


def _recomputing(plan: Plan, recompute: str) -> Settings:
    trained = (role for role in plan.roles.values() if role.trained)
    return _in_tables(trained, f"enable_gradient_checkpointing={recompute}")


def _offloading(kind: Settings, offload: str) -> Settings:
    return (f"actor.fsdp_config.offload_policy={offload}",) if "actor.strategy=fsdp" in kind else ()


def _layout(plan: Plan, settings: Settings, after: Plan, gpu: int) -> Fit:
    """Returns the settings that a plan lacks for a layout, which is named."""
    before, now, size = flat(plan.table), flat(after.table), ranks.training_ranks(after)
    lacking = tuple(s for s in settings if before.get(key := s.partition("=")[0]) != now[key])
    named = f"{after.roles['actor'].strategy} over {size} ranks" if size > 1 else "one process"
    if after.rollout.placement == "apart":
        named += f" and engines on {after.rollout.engines * after.rollout.tensor_parallel_size} GPUs"
    return Fit(lacking, phases(after, gpu), named, _on_cpus(after, gpu))


def _possible(plan: Plan, settings: Settings, gpus: int, gpu: int) -> Plan | None:
    """Returns the plan with other settings; None if its models cannot have such a layout."""
    try:
        tried = with_settings(plan, settings, gpu)
        check_ranks(tried, installed=False)
        check_gpus(tried, gpus)
    except (ConfigError, LayoutError):
        return None
    return tried


def remedies(plan: Plan, gpus: int, gpu: int, *, begun: bool) -> list[Fit]:
    """Returns up to two ways to make a plan fit, the ones that cost least first.

    A way is one change, or two or three changes if fewer do not suffice. Changes are tried in the order of this
    function's list, which docs/gpus.md names. The list is empty if no way is found.

    Args:
        begun: whether the run has checkpoints, since these fix the dtype of moments.
    """
    r, actor = plan.rollout, plan.roles["actor"]
    trained = [role for role in plan.roles.values() if role.trained]
    wholly = [role for role in trained if not role.enable_gradient_checkpointing]
    inputs = [role for role in trained if role.recomputes and not role.offload_activations]
    most, shards = _for_ranks(plan, gpus), actor.strategy == "fsdp"
    over = ("driver.kind=ray", f"ray.ranks={most}", "actor.strategy=fsdp")
    more_ranks = ranks.training_ranks(plan) < most
    offload: Settings = ("actor.fsdp_config.offload_policy=true",)
    wide = [role for role in trained if role.optim.moments_dtype != "bfloat16" and not begun]
    splits: Settings = ("tensor_model_parallel_size", *SPLITS)
    if actor.strategy != "megatron":
        splits = ("ulysses_sequence_parallel_size",) if shards else ()
    changes: list[Change] = [
        _with_fewer_replicas if shards and _fewer_replicas(plan) else (),
        _kept(plan) if shards else (),
        ("rollout.offload_trainer=true",) if r.sleeps and not r.offload_trainer else (),
        ("rollout.free_cache_engine=true",) if r.shares and not r.free_cache_engine else (),
        _smaller_engine,
        largest_budget,
        _in_tables(wholly, "enable_gradient_checkpointing=true"),
        *(partial(_smallest, size, gpus) for size in splits),
        _in_tables(inputs, "enable_activation_offload=true"),
        over if more_ranks and actor.strategy != "megatron" else (),
        () if actor.offload or actor.strategy == "megatron" else offload if shards else (*over, *offload),
        _in_tables(wide, "optim.moments_dtype=bfloat16"),
    ]
    for count in (1, 2, 3):
        fitting: list[Fit] = []
        for chosen in combinations([change for change in changes if change], count):
            found = _after(plan, chosen, gpu, gpus)
            if found is not None and not any(set(fit.settings) <= set(found.settings) for fit in fitting):
                fitting.append(found)
            if len(fitting) == 2:
                break
        if fitting:
            return fitting
    return []


def adapters(plan: Plan, gpus: int, gpu: int) -> Fit | None:
    """Returns the plan with adapters in place of all parameters; None if it has them, cannot, or does not fit."""
    if plan.roles["actor"].lora:
        return None
    tried = (_after(plan, [("actor.lora_rank=32", *more)], gpu, gpus) for more in ((), _recomputing(plan, "true")))
    return next((found for found in tried if found is not None), None)


def _after(plan: Plan, changes: Sequence[Change], gpu: int, gpus: int) -> Fit | None:
    """Returns the plan after changes; the computed ones come last. None if it cannot have them, or does not fit."""
    settings: Settings = ()
    for change in sorted(changes, key=callable):
        more = change(with_settings(plan, settings, gpu), gpu) if callable(change) else change
        if more is None:
            return None
        settings += more
    after = _possible(plan, settings, gpus, gpu)
    if after is None or not fits(after, gpu):
        return None
    return Fit(settings, phases(after, gpu), on_cpu=max(0, _on_cpus(after, gpu) - _on_cpus(plan, gpu)))


def _on_cpus(plan: Plan, gpu: int) -> int:
    """Returns the bytes that a plan moves to the memory of CPUs, of all ranks."""
    return host_memory(plan, gpu, ranks.training_ranks(plan)).nbytes


def _with_fewer_replicas(plan: Plan, gpu: int) -> Settings | None:
    """Returns the most copies of the parameters that fit; if not even one copy does, one, for further changes."""
    fewer = _fewer_replicas(plan)
    return next((one for one in fewer if fits(with_settings(plan, one, gpu), gpu)), fewer[-1])


def _smallest(size: str, gpus: int, plan: Plan, gpu: int) -> Settings | None:
    """Returns the smallest size of the actor's layout that fits, larger than the plan's; None if none does."""
    larger = (_larger(plan, size, 2**i) for i in range(gpus.bit_length()))
    tried = ((setting, _possible(plan, (setting,), gpus, gpu)) for setting in larger if setting)
    return next(((setting,) for setting, after in tried if after is not None and fits(after, gpu)), None)


def _smaller_engine(plan: Plan, gpu: int) -> Settings | None:
    if plan.rollout.name == "vllm":
        return None if (most := largest_share(plan, gpu)) is None else (f"rollout.gpu_memory_utilization={most:g}",)
    return None if (slots := largest_slots(plan, gpu)) is None else (f"rollout.slots={slots}",)


def better_engine(plan: Plan, gpu: int) -> Iterator[str]:
    """Yields sentences about settings with which the engine uses the GPU better than with the ones of the config."""
    r, rows = plan.rollout, rows_of_engine(plan)
    if r.name == "vllm":
        better = largest_share(plan, gpu)
        if better and better > r.gpu_memory_utilization + 0.05 and cached_rows(plan, gpu) < rows:
            setting = f"rollout.gpu_memory_utilization={better:g}"
            more = _on_cpus(with_settings(plan, [setting], gpu), gpu) - _on_cpus(plan, gpu)
            moved = f", and takes {more / GIB:.0f} GiB more of CPU memory" if more > GIB / 2 else ""
            yield (
                f"{setting} fits ({r.gpu_memory_utilization:g} now){moved}: a larger cache holds more rows at once"
            )
            return
        slots = min(rows, cached_rows(plan, gpu))
    else:
        slots = largest_slots(plan, gpu) or 0
    if slots > r.slots:
        yield f"rollout.slots={slots} fits ({r.slots} now): an engine has {rows:,} rows to draw in a step"


def with_engine(plan: Plan) -> Plan:
    """Returns the plan with the faster engine if ``rollout.name`` is auto.

    On GPUs over Ray, this is vLLM for models that the embedded engine decodes without graphs, for engines that take
    several GPUs, and for adapters that are published alone; in all other cases the embedded engine.

    Raises:
        ModelError: the model's folder or architecture cannot be used.
    """
    r = plan.rollout
    if r.name != "auto":
        return plan
    in_one_process = plan.driver.kind != "ray" or build.device(plan.driver) == "cpu"
    if r.tensor_parallel_size > 1 or r.lora is not None:
        return plan.changed("rollout", name="vllm")
    if in_one_process or r.exact != "off" or plan.new_model is not None:
        return plan.changed("rollout", name="sampler")
    from verl_fn.backends.sampler.llama import misfit
    from verl_fn.backends.serving import model_of

    skeleton, shapes = model_of(r.folder)
    fast = not skeleton.padded and misfit(skeleton.config, shapes) is None
    return plan.changed("rollout", name="sampler" if fast or skeleton.family is not None else "vllm")


def sized(plan: Plan, gpu: int | None) -> Plan:
    """Returns the plan with an engine as large as its GPU and its rows ask for, if the config leaves that open.

    vLLM's share of the GPU is the smallest one, in steps of 0.05 and at least 0.5, whose cache holds all rows that an
    engine gets in a step, or else the largest one that fits; engines that are placed apart take 0.9. All rows are
    decoded at once, up to 1,024, as far as the cache holds them at their longest.

    Args:
        gpu: bytes of a GPU; None if there is none or it is unknown, and the plan then stays as it is.
    """
    if gpu is None or plan.learns_from != "samples":
        return plan
    asked = plan.table.get("rollout", {})
    if plan.rollout.name == "vllm" and asked.get("gpu_memory_utilization") is None:
        plan = _with_share(plan, _share(plan, gpu))
    return _with_slots(plan, _slots(plan, gpu)) if asked.get("slots") is None else plan


def rows_of_engine(plan: Plan) -> int:
    """Returns the most rows that one engine draws in a step."""
    return -(-plan.data.train_batch_size * plan.rollout.n // plan.rollout.engines)


def cached_rows(plan: Plan, gpu: int) -> int:
    """Returns how many rows of the greatest length the cache of a vLLM engine holds."""
    return max(0, share(plan, gpu) - engine_weights(plan)) // max(1, _row_bytes(plan))


def _row_bytes(plan: Plan) -> int:
    """Returns the bytes of the longest row in the cache of each of a vLLM engine's GPUs."""
    r = plan.rollout
    return model_sizes(r.folder, "lm").cache(r.longest, element_width(plan)) // r.tensor_parallel_size


def fits(plan: Plan, gpu: int, filled: float = FILLED) -> bool:
    """Returns whether all phases fit into a part of the GPU, and the engine's weights into its share of it."""
    served = not (of_engine := share(plan, gpu)) or engine_weights(plan) <= of_engine
    return served and largest(phases(plan, gpu)).nbytes <= filled * gpu


def largest_share(plan: Plan, gpu: int) -> float | None:
    """Returns the largest share of a GPU with which vLLM fits beside what else is there; None if none does."""
    return next((one for one in SHARES if fits(_with_share(plan, one), gpu)), None)


def largest_slots(plan: Plan, gpu: int) -> int | None:
    """Returns the most rows at once, a part of the rows of a step, with which the embedded engine fits; or None."""
    slots = min(rows_of_engine(plan), MOST_SLOTS)
    while slots and not fits(_with_slots(plan, slots), gpu):
        slots = slots * 3 // 4
    return slots or None


def _with_share(plan: Plan, share: float) -> Plan:
    return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, gpu_memory_utilization=share))


def _with_slots(plan: Plan, slots: int) -> Plan:
    return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, slots=slots))


def _share(plan: Plan, gpu: int) -> float:
    if plan.rollout.placement == "apart":
        return MOST_SHARE
    rows = min(rows_of_engine(plan), MOST_SLOTS)
    needed = -(-100 * (engine_weights(plan) + rows * _row_bytes(plan) + COMPUTATION) // gpu)
    target = max(SHARE, -(-needed // 5) * 5 / 100)
    fitting = (one for one in SHARES if one <= target and _generates(_with_share(plan, one), gpu))
    return next(fitting, SHARE)


def _generates(plan: Plan, gpu: int) -> bool:
    """Returns whether the phases in which the engine is awake fit; if others do not, the trainer has to change."""
    awake = (GENERATION, PUBLICATION) if plan.rollout.sleeps else None
    counted = phases(plan, gpu)
    most = max(phase.nbytes for phase in counted if awake is None or phase.name in awake)
    return engine_weights(plan) < share(plan, gpu) and most <= FILLED * gpu


def _slots(plan: Plan, gpu: int) -> int:
    if plan.rollout.name != "vllm":
        return largest_slots(plan, gpu) or SLOTS
    rows = min(rows_of_engine(plan), MOST_SLOTS)
    return max(SLOTS, min(rows, cached_rows(plan, gpu)))
