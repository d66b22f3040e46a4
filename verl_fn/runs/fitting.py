"""Settings with which a run fits its GPUs, found by counting the bytes of plans that have them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import TypeAlias

import attrs

from verl_fn.backends.hf.sizes import model_sizes
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.config import ConfigError, Plan, make_plan
from verl_fn.config.load import flat, put, structure
from verl_fn.driver import ranks

from .checks import check_gpus, check_ranks
from .memory import GIB, Phase, element_width, engine_weights, largest, phases, share

# Proposals leave a twentieth of the GPU to what activations take beyond their estimate.
FILLED = 0.95
STEP = 1024  # budgets of tokens are multiples of it
MOST_SHARE = 0.9  # of a GPU, for vLLM
Settings: TypeAlias = tuple[str, ...]
Change: TypeAlias = Settings | Callable[[Plan, int], Settings | None]


@attrs.frozen
class Fit:
    """Settings for a plan, and its largest phase with them on a GPU.

    Attributes:
        settings: what the plan lacks, as ``key=value``.
        phase: the largest phase.
        layout: strategy and ranks; empty if they do not change.
    """

    settings: Settings
    phase: Phase
    layout: str = ""

    def __str__(self) -> str:
        settings = " ".join(self.settings) or "as it is"
        layout = self.layout and f"{self.layout}: "
        return f"{layout}{settings} (peak {self.phase.nbytes / GIB:.1f} GiB, {self.phase.title})"


def with_settings(plan: Plan, settings: Sequence[str]) -> Plan:
    """Returns the plan of the same config with other settings, given as ``key=value``."""
    return make_plan(structure(put(copy.deepcopy(plan.table), settings, lambda key: None)))


def peak(plan: Plan, gpu: int) -> Phase:
    """Returns the largest phase on the GPU of a training rank."""
    return largest(phases(plan, ranks.training_ranks(plan), gpu))


def fits(plan: Plan, gpu: int, filled: float = 1.0) -> bool:
    """Returns whether all phases fit into a part of the GPU, and the engine's weights into its share of it."""
    served = not (of_engine := share(plan, gpu)) or engine_weights(plan) <= of_engine
    return served and peak(plan, gpu).nbytes <= filled * gpu


def longest_row(plan: Plan) -> int:
    """Returns the tokens of the longest row that is sampled."""
    return plan.data.max_prompt_length + plan.data.max_response_length


def largest_budget(plan: Plan, gpu: int) -> Settings | None:
    """Returns the settings of the largest budget of tokens in a micro-batch that fits; None if no row fits.

    More tokens than all rows of a rank have are not proposed.
    """
    size, shared = ranks.training_ranks(plan), max(role.sharers for role in plan.roles.values())
    least = -(-longest_row(plan) // shared)
    of_rank = -(-plan.data.train_batch_size * plan.rollout.n // size) * longest_row(plan)

    def fitting(budget: int) -> bool:
        roles = {n: attrs.evolve(role, ppo_max_token_len_per_gpu=budget) for n, role in plan.roles.items()}
        return fits(attrs.evolve(plan, roles=roles), gpu, FILLED)

    low, high = -(-least // STEP), max(1, -(-max(of_rank, least) // STEP))
    if not fitting(low * STEP):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fitting(middle * STEP) else (low, middle - 1)
    tables = dict.fromkeys(role.table for role in plan.roles.values())
    return tuple(f"{table}.ppo_max_token_len_per_gpu={low * STEP}" for table in tables)


def layouts(plan: Plan, gpus: int, gpu: int) -> Iterator[Fit]:
    """Yields the layouts of a plan on a number of GPUs that fit, each with its largest budget of tokens.

    They are one process, and shards over all GPUs; with Megatron, numbers of tensor-parallel ranks. Ranks share rows
    and offload states only if a layout does not fit otherwise; each is tried with and without recomputed layers.
    """
    megatron, r = plan.roles["actor"].strategy == "megatron", plan.rollout
    over: Settings = ("driver.kind=ray", f"ray.ranks={gpus}")
    if r.placement == "colocated" and plan.learns_from == "samples":
        over += (f"rollout.engines={gpus}",)
    sharded, powers = (*over, "actor.strategy=fsdp"), [2**i for i in range(gpus.bit_length())]
    if megatron:
        size = "actor.megatron.tensor_model_parallel_size"
        kinds = [[(*over, f"{size}={power}")] for power in powers]
    else:
        size = "actor.fsdp_config.ulysses_sequence_parallel_size"
        kinds = [[("actor.strategy=local", "ray.ranks=1", "rollout.engines=1")]]
        kinds += [[(*sharded, f"{size}={power}") for power in powers]] if gpus > 1 else []
    tables = dict.fromkeys(role.table for role in plan.roles.values() if role.trained)
    for ways in kinds:
        for kind, offload in product(ways, ("false", "true")):
            found = []
            for recompute in ("false", "true"):
                more = tuple(f"{table}.enable_gradient_checkpointing={recompute}" for table in tables)
                if "actor.strategy=fsdp" in kind:
                    more += (f"actor.fsdp_config.offload_policy={offload}",)
                tried = _possible(plan, (*kind, *more), gpus)
                if tried is not None and (budget := largest_budget(tried, gpu)) is not None:
                    found.append(_layout(plan, (*kind, *more, *budget), gpu))
            if found:
                yield from found
                break


def _layout(plan: Plan, settings: Settings, gpu: int) -> Fit:
    """Returns the settings that a plan lacks for a layout, which is named."""
    after = with_settings(plan, settings)
    before, now, size = flat(plan.table), flat(after.table), ranks.training_ranks(after)
    lacking = tuple(s for s in settings if before.get(key := s.partition("=")[0]) != now[key])
    named = f"{after.roles['actor'].strategy} over {size} ranks" if size > 1 else "one process"
    return Fit(lacking, peak(after, gpu), named)


def _possible(plan: Plan, settings: Settings, gpus: int) -> Plan | None:
    """Returns the plan with other settings; None if its models cannot have such a layout."""
    try:
        tried = with_settings(plan, settings)
        check_ranks(tried, ranks.training_ranks(tried), installed=False)
        check_gpus(tried, gpus)
    except (ConfigError, LayoutError):
        return None
    return tried


def remedies(plan: Plan, gpus: int, gpu: int) -> list[Fit]:
    """Returns up to two changes with which a plan fits, the ones that cost least first.

    Each is one change, or two if no single one suffices. If no two suffice, the best two are returned.
    """
    r, actor = plan.rollout, plan.roles["actor"]
    trained = [role for role in plan.roles.values() if role.trained]
    wholly = dict.fromkeys(role.table for role in trained if not role.enable_gradient_checkpointing)
    over = ("driver.kind=ray", f"ray.ranks={gpus}", "actor.strategy=fsdp")
    changes: list[Change | None] = [
        ("rollout.offload_trainer=true",) if r.sleeps and not r.offload_trainer else None,
        ("rollout.free_cache_engine=true",) if r.shares and not r.free_cache_engine else None,
        largest_share if r.name == "vllm" else None,
        largest_budget,
        tuple(f"{table}.enable_gradient_checkpointing=true" for table in wholly) or None,
        over if ranks.training_ranks(plan) < gpus and actor.strategy != "megatron" else None,
        ("actor.fsdp_config.offload_policy=true",) if actor.strategy == "fsdp" and not actor.offload else None,
    ]
    known, tried = [change for change in changes if change is not None], []
    for count in (1, 2):
        for chosen in combinations(known, count):
            tried += [found for found in [_after(plan, chosen, gpu, gpus)] if found is not None]
        if fitting := [one for one in tried if one.phase.nbytes <= gpu]:
            return fitting[:2]
    return sorted(tried, key=lambda one: one.phase.nbytes)[:1]


def _after(plan: Plan, changes: Sequence[Change], gpu: int, gpus: int) -> Fit | None:
    """Returns the plan after changes; those that are computed come last. None if the plan cannot have them."""
    settings: Settings = ()
    for change in sorted(changes, key=callable):
        more = change(with_settings(plan, settings), gpu) if callable(change) else change
        if more is None:
            return None
        settings += more
    after = _possible(plan, settings, gpus)
    return None if after is None else Fit(settings, peak(after, gpu))


def largest_share(plan: Plan, gpu: int) -> Settings | None:
    """Returns the setting of the largest share of a GPU with which vLLM fits beside what else is there; or None."""
    for percent in range(int(100 * MOST_SHARE), 0, -5):
        rollout = attrs.evolve(plan.rollout, gpu_memory_utilization=percent / 100)
        if fits(attrs.evolve(plan, rollout=rollout), gpu, FILLED):
            return (f"rollout.gpu_memory_utilization={percent / 100:g}",)
    return None


def better_engine(plan: Plan, gpu: int) -> Iterator[str]:
    """Yields sentences about settings with which the engine uses the GPU better."""
    r = plan.rollout
    rows = -(-plan.data.train_batch_size * r.n // r.engines)
    if r.name == "vllm":
        better = largest_share(plan, gpu)
        if better and float(better[0].partition("=")[2]) > r.gpu_memory_utilization + 0.05:
            yield f"{better[0]} fits ({r.gpu_memory_utilization:g} now): a larger cache holds more rows at once"
            return
        per_row = model_sizes(r.folder, "lm").cache(r.longest, element_width(plan)) // r.tensor_parallel_size
        slots = min(rows, max(0, share(plan, gpu) - engine_weights(plan)) // max(1, per_row))
    else:
        slots = rows
        while slots > r.slots and not fits(attrs.evolve(plan, rollout=attrs.evolve(r, slots=slots)), gpu, FILLED):
            slots = slots * 3 // 4
    if slots > r.slots:
        yield f"rollout.slots={slots} fits ({r.slots} now): an engine has {rows:,} rows to draw in a step"
