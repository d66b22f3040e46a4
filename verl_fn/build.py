"""Construction of a plan's parts (backends, engine, reward) in the process that uses them, and the code of a process.

Each function imports what it makes, so that a process does not load the libraries of the others.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

import verl_fn
from verl_fn import steps
from verl_fn.backends.protocol import RolloutBackend, Sampling, TrainBackend
from verl_fn.config.names import source_file
from verl_fn.config.plan import Plan, RolePlan, RolloutPlan
from verl_fn.config.schema import DriverConfig, EnvConfig, MegatronConfig, OptimConfig, RewardConfig, ValConfig

if TYPE_CHECKING:
    from verl_fn.backends.megatron.layout import Sizes
    from verl_fn.rewards import Reward


# Beside a GPU the host has little to compute, and processes with a thread a core each only wait for each other.
THREADS_BESIDE_GPU = 2


def device(driver: DriverConfig) -> str:
    """Returns the device that ``driver.device`` asks for."""
    import torch

    if driver.device != "auto":
        return driver.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_memory(device: str) -> int | None:
    """Returns the bytes of this process's GPU; None on a CPU, and for a plan for a GPU that is not here.

    Example:
        >>> gpu_memory("cpu") is None
        True
    """
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def smallest_gpu(driver: DriverConfig) -> int | None:
    """Returns the bytes of this machine's smallest GPU; None on a CPU, or if the driver's tool is not there.

    NVIDIA's driver is asked, since torch would take memory of a GPU for this process.

    Example:
        >>> smallest_gpu(DriverConfig(device="cpu")) is None
        True
    """
    if device(driver) != "cuda":
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
        return min((int(line) * 2**20 for line in said.splitlines()), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def threads(driver: DriverConfig, ranks: int, *, by_user: bool = False) -> int:
    """Returns the number of torch's CPU threads in a process.

    Args:
        ranks: the number of training processes that share the cores.
        by_user: the user has started this process, and so OMP_NUM_THREADS is the user's; Ray and torchrun set it to 1
            by themselves.

    Example:
        >>> threads(DriverConfig(num_threads=3), ranks=1)
        3
    """
    cores = max(1, len(os.sched_getaffinity(0)) // ranks)
    share = min(cores, THREADS_BESIDE_GPU) if device(driver) == "cuda" else cores
    named = os.environ.get("OMP_NUM_THREADS", "") if by_user else ""
    return driver.num_threads or (int(named) if named.isdecimal() else 0) or share


def set_up_process(driver: DriverConfig, ranks: int, *, by_user: bool = False) -> None:
    """Sets the number of threads of this process, and the environment variables that libraries read.

    Args:
        ranks, by_user: as for ``threads``.
    """
    import torch

    torch.set_num_threads(threads(driver, ranks, by_user=by_user))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if driver.deterministic:
        # cuBLAS reads this variable when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def optimizer(optim: OptimConfig | None, total_updates: int) -> steps.Optimizer:
    """Makes gradient clipping and AdamW from an ``optim`` table; returns ``frozen()`` for None.

    Args:
        optim: the table, or None for a model that is not trained.
        total_updates: updates of the whole run, over which the learning rate decays by default.
    """
    import torch

    if optim is None:
        return steps.frozen()
    if optim.lr_scheduler_type == "constant":
        schedule: steps.Schedule = steps.constant(optim.lr, optim.lr_warmup_steps)
    else:
        falling = steps.linear if optim.lr_scheduler_type == "linear" else steps.cosine
        decay = optim.lr_decay_steps or total_updates
        schedule = falling(optim.lr, decay, optim.lr_warmup_steps, optim.min_lr_ratio)
    mask = None if optim.decay_biases_and_norms else steps.matrices
    moments = torch.bfloat16 if optim.moments_dtype == "bfloat16" else None
    update = steps.adamw(
        schedule, optim.betas, optim.eps, optim.weight_decay, weight_decay_mask=mask, moments=moments
    )
    return steps.chain(steps.clip_by_global_norm(optim.clip_grad), update)


def trainer(role: RolePlan, driver: DriverConfig, device: str) -> TrainBackend:
    """Makes the training backend of a role; ``fsdp`` and ``megatron`` need a process group."""
    from verl_fn.backends.hf.config import compute_dtype
    from verl_fn.backends.hf.folder import OFFLOAD, pads_rows
    from verl_fn.backends.hf.lora import Lora

    common: dict[str, Any] = {
        "head": role.head,
        "dtype": compute_dtype(role.dtype, role.folder, device),
        "max_tokens": role.max_tokens,
        "checkpointing": role.enable_gradient_checkpointing,
        "lora": Lora(*role.lora) if role.lora else None,
        "device": device,
        "deterministic": driver.deterministic,
        "freeze_vision_tower": role.freeze_vision_tower,
    }
    update = optimizer(role.optim if role.trained else None, role.total_updates)
    # The protocol also allows handles to other processes. A backend in this process takes and returns only values,
    # which the type checker accepts only with a cast.
    if role.strategy == "megatron":
        from verl_fn.backends.megatron import Megatron

        sizes = attrs.asdict(megatron_sizes(role.megatron))
        common |= {"provider": role.megatron.override_transformer_config, "router_replay": role.router_replay}
        common |= {"updates_by": role.megatron.optimizer, "fsdp": role.megatron.use_megatron_fsdp}
        return cast(TrainBackend, Megatron(role.folder, update, **sizes, **common))
    # What the first state needs is imported and checked now, while other processes start.
    pads_rows(role.folder, role.head, role.row_layout)
    common |= {"row_layout": role.row_layout, "exact": role.exact}
    if role.offload_activations:
        common["checkpointing"] = OFFLOAD
    if role.strategy != "fsdp":
        from verl_fn.backends.local import Local

        return cast(TrainBackend, Local(role.folder, update, **common))
    from verl_fn.backends.fsdp import Fsdp

    fsdp = Fsdp(
        role.folder,
        update,
        replicate=role.fsdp_config.replicate,
        sp=role.fsdp_config.ulysses_sequence_parallel_size,
        reshard_after_forward=role.fsdp_config.reshard_after_forward,
        compile=role.fsdp_config.use_torch_compile,
        reduce_dtype=role.fsdp_config.reduce_dtype,
        **common,
    )
    return cast(TrainBackend, fsdp)


def libraries(roles: Iterable[RolePlan]) -> list[str]:
    """Returns the versions and folders of the libraries that only these roles' backends use.

    Args:
        roles: the plans of the roles that a process trains.
    """
    if all(role.strategy != "megatron" for role in roles):
        return []
    from verl_fn.backends.megatron.importing import about

    return [f"{name} {place}" for name, place in about().items()]


def log_libraries(roles: Sequence[RolePlan]) -> None:
    """Writes ``libraries`` to the log of this process."""
    for line in libraries(roles):
        print(line, flush=True)


def code_identity(code: Sequence[str] = ()) -> dict[str, str]:
    """Returns what the results of this process depend on: versions, and digests of sources, by name.

    Args:
        code: references to the user's own objects, ``FILE.py:NAME`` or ``package.module:NAME``; their digests are
            empty if there is no file.

    Example:
        >>> code_identity() == code_identity(), sorted(code_identity())
        (True, ['python', 'ray', 'sources', 'torch', 'transformers', 'verl_fn'])
    """
    versions = {"verl_fn": verl_fn.__version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("torch", "ray", "transformers")}
    folder = Path(verl_fn.__file__).resolve().parent
    h = hashlib.blake2b(digest_size=4)
    # Unlike Path.rglob, glob enters the folders that verl_fn links to.
    for name in sorted(glob.glob("**/*.py", root_dir=folder, recursive=True)):
        h.update(name.encode() + (folder / name).read_bytes())
    return versions | {"sources": f"{h.hexdigest()} from {folder}"} | {one: _digest(one) for one in code}


def _digest(reference: str) -> str:
    try:
        file = source_file(reference)
        return "" if file is None else hashlib.blake2b(file.read_bytes(), digest_size=4).hexdigest()
    except (ImportError, OSError, ValueError):
        return ""


def code_difference(driver: Mapping[str, str], other: Mapping[str, str], whose: str) -> str | None:
    """Describes how the code of another process, named by ``whose``, differs from the driver's; None if it does not.

    The same sources may lie in another folder.

    Example:
        >>> driver = code_identity()
        >>> code_difference(driver, driver, "rank 1") is None
        True
        >>> print(code_difference(driver, {**driver, "torch": "1.0"}, "rank 1"))
        rank 1 does not run the driver's code, but torch 1.0 instead of ...
        Install the same versions and files on all nodes, or ...
    """
    differing = [name for name in driver if driver[name].split(" from ")[0] != other[name].split(" from ")[0]]
    if not differing:
        return None
    described = ", ".join(f"{name} {other[name]} instead of {driver[name]}" for name in differing)
    return (
        f"{whose} does not run the driver's code, but {described}\nInstall the same versions and files on all nodes, "
        "or send the driver's with the run: py_modules or working_dir in the file of ray.runtime_env"
    )


def megatron_sizes(megatron: MegatronConfig) -> Sizes:
    """Returns the sizes of a table ``megatron`` as the backend takes them."""
    from verl_fn.backends.megatron.layout import Sizes

    return Sizes(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        sp=megatron.sequence_parallel,
    )


def rollout(rollout: RolloutPlan, device: str) -> RolloutBackend:
    """Makes only the rollout engine."""
    from verl_fn.backends.hf.config import compute_dtype

    common: dict[str, Any] = {
        "device": device,
        "dtype": compute_dtype(rollout.dtype, rollout.folder, device),
        "slots": rollout.slots,
        "verify": rollout.verify,
        "in_flight": rollout.in_flight_weight_updates,
        "routed_experts": rollout.routed_experts,
    }
    if rollout.name == "sampler":
        from verl_fn.backends.sampler import Sampler

        return Sampler(rollout.folder, exact=rollout.exact != "off", **common)
    from verl_fn.backends.hf.lora import Lora
    from verl_fn.backends.vllm import Vllm

    return Vllm(
        rollout.folder,
        max_length=rollout.longest,
        tensor_parallel_size=rollout.tensor_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        engine_kwargs=rollout.engine_kwargs,
        lora=Lora(*rollout.lora) if rollout.lora else None,
        **common,
    )


def policy_tokenizer(plan: RolloutPlan) -> Any:
    """Reads the tokenizer of the policy, whose chat template gets the run's arguments and date.

    Raises:
        ModelError: the folder has none, or one that cannot be used.
    """
    from verl_fn.backends.hf.tokenizer import read_tokenizer

    return read_tokenizer(plan.folder, plan.data.chat_template_kwargs, plan.data.date)


def conversing(
    plan: RolloutPlan,
    device: str,
    env: EnvConfig,
    folder: str | None = None,
    engine: Callable[[RolloutPlan, str], RolloutBackend] | None = None,
) -> RolloutBackend:
    """Makes the rollout engine, and in front of it the environment if ``env.name`` names one.

    Args:
        folder: the folder that the environment's module or file is looked up from, by default the current one.
        engine: makes the engine, after the environment; by default ``rollout``.

    Raises:
        EnvError: the environment cannot be imported, or the chat template cannot be rendered turn by turn.
    """
    engine = engine or rollout
    if not env.name:
        return engine(plan, device)
    from verl_fn.backends.hf.tokenizer import end_tokens
    from verl_fn.environments.engine import Conversing, Limits
    from verl_fn.environments.processes import EnvProcesses
    from verl_fn.environments.rendering import Renderer, call_format

    tokenizer = policy_tokenizer(plan)
    ends = end_tokens(plan.folder, tokenizer)
    renderer = Renderer(tokenizer, ends)
    environments = EnvProcesses(
        env.name,
        env.timeout,
        env.num_workers,
        folder,
        env.variables,
        python=env.python,
        arguments=env.arguments,
        calls=call_format(tokenizer),
    )
    limits = Limits(env.max_turns, env.max_turn_length or plan.data.max_response_length, plan.data.max_prompt_length)
    engines = Conversing(engine(plan, device), environments, renderer, tokenizer, ends, limits)
    return cast(RolloutBackend, engines)


def at_driver(plan: Plan) -> dict[str, Any]:
    """Makes the parts of a plan that work in the driver: fields of ``Workers`` by name."""
    from verl_fn.backends.hf.tokenizer import end_tokens

    tokenizer, actor = policy_tokenizer(plan.rollout), plan.roles["actor"]
    return {
        "reward": reward(plan.reward, plan.model, env=plan.env.name, replies=plan.trainer.dir),
        "tokenizer": tokenizer,
        "sampling": sampling(plan.rollout, plan.data.max_response_length),
        "max_prompt_length": plan.data.max_prompt_length,
        "truncation": plan.data.truncation,
        "end_tokens": end_tokens(plan.model, tokenizer),
        "converses": bool(plan.env.name),
        "router_replay": actor.router_replay,
        "gives_likeliest": actor.strategy != "megatron",
        "exact": plan.rollout.exact,
    }


def sampling(table: RolloutPlan | ValConfig, max_response_length: int) -> Sampling:
    """Returns the sampling settings of training rollouts or of evaluations."""
    return Sampling(max_response_length, table.temperature, table.top_k, table.top_p, table.n)


def reward(table: RewardConfig, model: str, env: str = "", replies: str | None = None) -> Reward:
    """Makes the reward by ``reward.functions``, by a judge, or by the rules of the problems' data sources.

    Args:
        env: the name of the environment, whose reward takes the place of the rules; empty without one.
        replies: the folder that keeps the judge's replies, if it exists; by default they are not kept.

    Raises:
        RewardError: a function cannot be imported or called, or the judge's key is not set.
    """
    from verl_fn.backends.hf.tokenizer import end_tokens, read_tokenizer
    from verl_fn.rewards import Reward, by_rules, unscored

    judge: Any = unscored if env else by_rules
    if table.functions:
        from verl_fn.rewards.functions import RewardFunctions

        judge = RewardFunctions(
            table.functions, table.weights, table.timeout, table.num_workers, env=table.env, arguments=table.arguments
        )
    elif table.url:
        from verl_fn.rewards.judge import Judge, Question, Replies, ServedModel

        question: Question | ServedModel = ServedModel(table.model)
        if table.api == "chat":
            question = Question(table.model, table.prompt, table.pattern, table.unreadable_score)
        judge = Judge(
            table.url,
            question,
            Replies(None if replies is None else Path(replies), offline=table.offline),
            timeout=table.timeout,
            retries=table.retries,
            concurrency=table.concurrency,
            api_key_env=table.api_key_env,
        )
    tokenizer = read_tokenizer(model)
    return Reward(judge, tokenizer, end_tokens(model, tokenizer))
