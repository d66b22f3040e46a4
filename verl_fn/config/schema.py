"""The tables of the configuration: frozen classes with verl's names, and a line of documentation for each key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, le, lt

from verl_fn.errors import raised_as

from .algorithms import AlgorithmTable, uses_critic
from .names import is_reference, is_task, reasoning_names, verifiers_name
from .options import (
    MOST,
    PATTERN,
    PROMPT,
    ConfigError,
    all_or_some,
    free,
    given,
    has_a_group,
    has_response,
    is_address,
    is_date,
    one_of,
    opt,
    paths,
    provided,
    sub,
    unless,
)

Table: TypeAlias = dict[str, Any]
"""Nested tables that need not be checked."""
STRATEGIES = ("local", "fsdp", "megatron")
ROLLOUT_ENGINES = ("sampler", "vllm")
# Arguments of the tokenizer's apply_chat_template that a run decides itself.
TAKEN_BY_TEMPLATES = frozenset({
    "messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now",
})  # fmt: skip
VLLM = given("name", "vllm", "auto", label="vllm")
DECAYS = unless("lr_scheduler_type", "constant")
# A critic without a strategy of its own has the actor's.
OURS = provided(lambda table, cfg: (table.strategy or cfg.actor.strategy) != "megatron", "with Megatron")
RECOMPUTES = given("enable_gradient_checkpointing"), OURS
COLOCATED, OVER_RAY = given("placement", "colocated"), unless("driver.kind", "local")
SAMPLING = provided(
    lambda o, cfg: cfg.algorithm.outline.learns_from == "samples", 'with algorithm.name = "{cfg.algorithm.name}"'
)
DRAWN = unless("temperature", 0.0)
WANDB = provided(lambda o, cfg: "wandb" in o.logger, "without wandb in trainer.logger")
IS_READ = provided(lambda o, cfg: o.is_read, "without data.train_files")
FROM_FILES = provided(lambda o, cfg: o.from_files, "without data.train_files")
LARGEST_VAL_SIZE = 20_000  # drawing more problems of a generated task would take long
BY_FUNCTIONS, BY_JUDGE, IN_TURNS = given("functions"), given("url", label="judge"), given("name")
ASKED = (BY_JUDGE, given("api", "chat", label=""))

# What a reward function is given for each response, or for all of a batch.
GIVEN = frozenset(
    name + many for name in ("data_source", "solution_str", "ground_truth", "extra_info") for many in ("", "s")
)


@attrs.frozen(kw_only=True)
class ValConfig:
    """Sampling in evaluations."""

    n: int = opt(1, "responses per held-out prompt; above 1 adds best@N, maj@N and pass@k", ge(1))
    temperature: float = opt(0.0, "sampling temperature; 0 takes the likeliest token", ge(0), le(MOST))
    top_k: int = opt(-1, "keep the k likeliest tokens; -1 keeps all", all_or_some, when=DRAWN)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", gt(0), le(1), when=DRAWN)

    def __attrs_post_init__(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"rollout.val_kwargs.n is {self.n} at temperature 0, where all answers are the same; "
                f"set rollout.val_kwargs.temperature"
            )


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """The rollout engine, and sampling in training."""

    name: str = opt(
        "sampler", "the rollout engine: sampler, vllm, or auto: the faster one", one_of(*ROLLOUT_ENGINES, "auto")
    )
    n: int = opt(1, "responses per prompt", ge(1), when=SAMPLING)
    temperature: float = opt(1.0, "sampling temperature", gt(0), le(MOST), when=SAMPLING)
    top_k: int = opt(-1, "keep the k likeliest tokens; -1 keeps all", all_or_some, when=SAMPLING)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", gt(0), le(1), when=SAMPLING)
    slots: int | None = opt(
        None,
        "rows decoded at once by each engine; by default 64 on a CPU, and on a GPU the rows that an engine gets in a "
        "step, up to 1024 and to what its cache holds",
        ge(1),
        le(2**20),
    )
    engines: int = opt(
        1, "engines that share the prompts of a step; more than one need Ray", ge(1), le(4096), when=OVER_RAY
    )
    placement: str = opt(
        "colocated",
        "colocated: engines share the training ranks' GPUs; apart: each has a GPU of its own if there are GPUs",
        one_of("colocated", "apart"),
        when=OVER_RAY,
    )
    dtype: str | None = opt(
        None,
        "dtype of the engine: float32 or bfloat16; by default float32 on a CPU, and the model folder's on a GPU",
        one_of("float32", "bfloat16"),
    )
    verify: str = opt(
        "first",
        "compare checksums of published weights: first, in the first publication of a run, or always",
        one_of("first", "always"),
    )
    exact: str = opt(
        "off",
        "compute log-probs of engine and actor by the same, slower kernels: audit counts those that differ in any "
        "bit, strict ends the run at the first",
        one_of("off", "audit", "strict"),
        when=SAMPLING,
    )
    in_flight_weight_updates: bool = opt(
        False,
        "with driver.max_lag: new weights reach the engines at every step, in the middle of responses, which go on "
        "with them",
    )
    max_restarts: int = opt(
        3,
        "restarts in a row of an engine that dies or hangs, without an answer between them; 0 ends the run",
        ge(0),
        when=OVER_RAY,
    )
    tensor_parallel_size: int = opt(1, "GPUs that share a model, for engines placed apart", ge(1), le(64), when=VLLM)
    gpu_memory_utilization: float | None = opt(
        None,
        "share of a GPU's memory for weights, cache and computation; by default 0.5, or more if the cache needs and "
        "finds it, and 0.9 for engines placed apart",
        gt(0),
        le(1),
        when=VLLM,
    )
    free_cache_engine: bool = opt(
        True,
        "free the engine's weights and cache while the ranks that share its GPU compute",
        when=(VLLM, COLOCATED),
    )
    offload_trainer: bool | None = opt(
        None,
        "keep parameters and moments on the CPU while the engine generates; by default where they do not fit beside "
        "the engine",
        when=(VLLM, COLOCATED, given("free_cache_engine")),
    )
    enforce_eager: bool = opt(False, "run without CUDA graphs and compiler, to start faster", when=VLLM)
    adapters: str = opt(
        "merged",
        "publish adapters merged into the weights, or alone after one publication of the model",
        one_of("merged", "alone"),
        when=(VLLM, given("actor.lora_rank", label="with actor.lora_rank")),
    )
    engine_kwargs: Mapping[str, Any] = free("a table of further arguments of its EngineArgs", when=VLLM)
    val_kwargs: ValConfig = sub(ValConfig)

    def __attrs_post_init__(self) -> None:
        if self.tensor_parallel_size > 1 and self.placement != "apart":
            raise ConfigError(
                f"rollout.tensor_parallel_size = {self.tensor_parallel_size} takes whole GPUs: set "
                "rollout.placement=apart, or several rollout.engines with a GPU each"
            )


@attrs.frozen(kw_only=True)
class DataConfig:
    """The problems."""

    task: str = opt(
        "reverse",
        "generated task, used if train_files is empty, sets of Reasoning Gym as reasoning_gym:SET,SET, or an "
        "environment of the package verifiers with its datasets, as verifiers:NAME",
        is_task,
        when=unless("train_files"),
    )
    task_options: Mapping[str, Any] = free(
        "reasoning_gym: a table of each set's options, by the set's name",
        when=provided(lambda o, cfg: o.sets, "without data.task = reasoning_gym:SET"),
    )
    weights: tuple[float, ...] = opt(
        (),
        "the share of each of data.train_files among prompts, by default its share of the rows; or of each set of "
        "reasoning_gym, by default the same for all",
        deep_iterable(and_(gt(0), le(MOST))),
        when=provided(
            lambda o, cfg: o.sets or o.train_files, "without data.train_files or data.task = reasoning_gym:SET"
        ),
    )
    train_files: tuple[str, ...] = paths(
        (),
        "parquet or JSONL files in verl's RL columns; they replace the task. With the package datasets also "
        "hub:datasets/OWNER/NAME@COMMIT#CONFIG/SPLIT, FOLDER#CONFIG/SPLIT, and folders of Dataset.save_to_disk",
    )
    val_files: tuple[str, ...] = paths((), "files of held-out problems, in the same format")
    train_batch_size: int = opt(256, "prompts per step", ge(1))
    val_size: int | None = opt(
        None, "most held-out problems; by default all of data.val_files, or 512 of a generated task", ge(1)
    )
    max_prompt_length: int = opt(512, "longest prompt in tokens", ge(1))
    max_response_length: int = opt(
        16, "longest response in tokens, including the end token; with env.name, all that follows the prompt", ge(1)
    )
    prompt_key: str = opt("prompt", "the files' column of prompts: chat messages or strings", when=FROM_FILES)
    chat_template_kwargs: Mapping[str, Any] = free(
        "a table of arguments of the chat template, such as enable_thinking; rows of files add their own in a column "
        "of this name",
        when=provided(lambda o, cfg: o.is_read or o.sets or cfg.env.name, "without data.train_files or env.name"),
    )
    date: str | None = opt(
        None,
        "the day that a chat template prints if it asks for the date, as YYYY-MM-DD; by default the day on which the "
        "run began, which its folder records",
        is_date,
    )
    convert: tuple[str, ...] = paths(
        (),
        "functions that make rows of other columns into verl's: FILE.py:NAME or MODULE:NAME, such as "
        "verl_fn.data.converters:gsm8k",
        kind="code",
        when=FROM_FILES,
    )
    stream: bool = opt(
        False,
        "read the rows of training data sets when a step needs them, rather than all at the start; their prompts and "
        "rewards are then checked in that step",
        when=given("train_files"),
    )
    filter_overlong_prompts: bool = opt(
        False,
        "leave out prompts that are too long; otherwise they end the run, or data.truncation cuts them",
        when=provided(lambda o, cfg: o.is_read or o.sets, "without data.train_files"),
    )
    truncation: str = opt(
        "error",
        "prompts longer than data.max_prompt_length: error ends the run, left keeps their end, right their start, "
        "and middle half of it from each side",
        one_of("error", "left", "right", "middle"),
        when=(unless("filter_overlong_prompts"), IS_READ),
    )
    shuffle: bool = opt(True, "draw a new order of the files' rows in every epoch", when=IS_READ)

    @property
    def from_files(self) -> bool:
        """Returns whether problems are read from files of the user, training or held-out ones."""
        return bool(self.train_files or self.val_files)

    @property
    def sets(self) -> tuple[str, ...]:
        """Returns the sets of Reasoning Gym that problems are generated from."""
        return () if self.from_files else reasoning_names(self.task)

    @property
    def is_read(self) -> bool:
        """Returns whether problems are rows of files, or of the datasets that an environment brings."""
        return self.from_files or bool(verifiers_name(self.task))

    def __attrs_post_init__(self) -> None:
        sets = reasoning_names(self.task)
        count, of = (len(self.train_files), "data.train_files") if self.train_files else (len(sets), "data.task")
        if self.weights and len(self.weights) != count:
            raise ConfigError(f"data.weights has {len(self.weights)} values for the {count} sources of {of}")
        if not self.from_files and self.val_size is not None and self.val_size > LARGEST_VAL_SIZE:
            raise ConfigError(f"data.val_size is {self.val_size}; a generated task gives at most {LARGEST_VAL_SIZE}")
        if wrong := [name for name in self.convert if not is_reference(name)]:
            raise ConfigError(f"data.convert has {wrong[0]!r}; it must be a function as FILE.py:NAME or MODULE:NAME")
        if taken := sorted(TAKEN_BY_TEMPLATES & self.chat_template_kwargs.keys()):
            raise ConfigError(f"data.chat_template_kwargs.{taken[0]} is decided by the run; remove it")
        for name, options in self.task_options.items():
            if name not in sets or not isinstance(options, Mapping):
                raise ConfigError(
                    f"data.task_options.{name} is {options!r:.80}, but must be a table of options of a set that "
                    f"data.task names ({', '.join(sets) or 'none'})"
                )


@attrs.frozen(kw_only=True)
class NewModelConfig:
    """The sizes of a random model."""

    arch: str = opt("qwen3", "transformers model type")
    hidden_size: int = opt(64, "width", ge(1), le(2**16))
    num_hidden_layers: int = opt(2, "depth", ge(1), le(1024))
    num_attention_heads: int = opt(4, "query heads", ge(1), le(1024))
    num_key_value_heads: int = opt(2, "key and value heads", ge(1), le(1024))


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The model that training starts from."""

    path: str = paths("", "Hugging Face model folder; if empty, a random model is made for the task")
    layout: str = opt(
        "auto",
        "rows of a micro-batch: packed end to end, padded on the right, or auto for packed ones if the model keeps "
        "rows apart in its attention; megatron has its own",
        one_of("auto", "packed", "padded"),
    )
    new: NewModelConfig = sub(NewModelConfig, when=unless("path"))


@attrs.frozen(kw_only=True)
class OptimConfig:
    """The optimizer of a model."""

    lr: float = opt(1e-6, "learning rate", ge(0), le(MOST))
    betas: tuple[float, float] = opt(
        (0.9, 0.999), "decay rates of AdamW's averages", deep_iterable(and_(ge(0), lt(1)))
    )
    eps: float = opt(1e-8, "AdamW's epsilon", gt(0), le(MOST))
    weight_decay: float = opt(0.01, "decoupled weight decay", ge(0), le(MOST))
    clip_grad: float = opt(1.0, "global gradient norm above which gradients are clipped", gt(0), le(1e30))
    lr_scheduler_type: str = opt("constant", "constant, linear or cosine", one_of("constant", "linear", "cosine"))
    lr_warmup_steps: int = opt(
        0,
        "updates of linear warm-up from 0; a step has ppo_epochs * ceil(train_batch_size / ppo_mini_batch_size) of "
        "them, and verl's key counts steps",
        ge(0),
    )
    min_lr_ratio: float = opt(0.0, "share of the learning rate left at the end of a decay", ge(0), le(1), when=DECAYS)
    lr_decay_steps: int | None = opt(
        None, "the update at which a decay ends, counted from the first; by default the last one", ge(1), when=DECAYS
    )
    moments_dtype: str = opt(
        "float32",
        "dtype of AdamW's averages: float32, or bfloat16 with stochastic rounding, in half the memory",
        one_of("float32", "bfloat16"),
    )
    decay_biases_and_norms: bool = opt(
        True, "weight decay also of parameters with one dimension; Megatron's optimizer exempts these"
    )


@attrs.frozen(kw_only=True)
class FsdpConfig:
    """The layout of a sharded model."""

    replicate: int = opt(1, "complete copies of the parameters among the ranks", ge(1), le(4096))
    ulysses_sequence_parallel_size: int = opt(1, "neighbouring ranks that share each row", ge(1), le(4096))
    reshard_after_forward: bool = opt(True, "free a layer's gathered parameters between forward and backward")
    offload_policy: bool = opt(False, "keep parameters and optimizer state on the CPU between passes")
    use_torch_compile: bool = opt(False, "compile each layer; the first steps take longer")
    reduce_dtype: str = opt("float32", "dtype of sums of gradients over ranks", one_of("float32", "bfloat16"))


@attrs.frozen(kw_only=True)
class MegatronConfig:
    """The layout of a model of Megatron; the ranks that these sizes leave have rows of their own."""

    tensor_model_parallel_size: int = opt(1, "ranks that share the matrices of each layer", ge(1), le(4096))
    pipeline_model_parallel_size: int = opt(1, "ranks that share the layers", ge(1), le(4096))
    context_parallel_size: int = opt(1, "ranks that share the tokens of each row", ge(1), le(4096))
    expert_model_parallel_size: int = opt(1, "ranks that share the experts", ge(1), le(4096))
    sequence_parallel: bool = opt(False, "sequence parallelism: tensor-parallel ranks also split tokens")
    override_transformer_config: Mapping[str, Any] = free("a table of fields of Megatron-Bridge's provider")
    use_megatron_fsdp: bool = opt(False, "Megatron-FSDP in place of Megatron's DDP: ranks divide all parameters")
    optimizer: str = opt(
        "verl_fn",
        "implementation of the optimizer: verl_fn, or megatron (its distributed optimizer)",
        one_of("verl_fn", "megatron"),
    )


@attrs.frozen(kw_only=True)
class RouterReplayConfig:
    """The replay of expert routing."""

    mode: str = opt(
        "disabled",
        "in updates, tokens go to the experts of the pass for old log-probs (R2), or in both to those of the rollout "
        "engine (R3); for megatron",
        one_of("disabled", "R2", "R3"),
    )


@attrs.frozen(kw_only=True)
class TrainedConfig:
    """What the tables of the actor and of the critic have in common."""

    optim: OptimConfig = sub(OptimConfig)
    strategy: str | None = opt("local", "local: one process; fsdp and megatron: over all ranks", one_of(*STRATEGIES))
    fsdp_config: FsdpConfig = sub(FsdpConfig, when=given("strategy", "fsdp"))
    megatron: MegatronConfig = sub(MegatronConfig, when=given("strategy", "megatron"))
    ppo_max_token_len_per_gpu: int = opt(16384, "most tokens of a micro-batch; no row may be longer", ge(1))
    dtype: str | None = opt(
        None,
        "compute dtype: float32 or bfloat16; by default float32 on a CPU, the folder's on a GPU; masters are fp32",
        one_of("float32", "bfloat16"),
    )
    enable_gradient_checkpointing: bool = opt(False, "recompute each layer in the backward pass")
    enable_activation_offload: bool = opt(False, "keep inputs of recomputed layers in host memory", when=RECOMPUTES)
    lora_rank: int = opt(0, "rank of the LoRA adapters; 0 trains all parameters", ge(0), le(2**16))
    lora_alpha: float = opt(
        16.0, "adapters are scaled by lora_alpha / lora_rank", gt(0), le(MOST), when=given("lora_rank")
    )
    target_modules: tuple[str, ...] = opt(
        ("all-linear",), "layers that get adapters, by the end of their names", when=given("lora_rank")
    )


@attrs.frozen(kw_only=True)
class ActorConfig(TrainedConfig):
    """The actor, and every other model without a value head."""

    router_replay: RouterReplayConfig = sub(RouterReplayConfig)
    freeze_vision_tower: bool = opt(
        False, "do not train the module of a model with images that sees them; adapters leave it as it is"
    )


@attrs.frozen(kw_only=True)
class CriticOptimConfig(OptimConfig):
    """The optimizer of the critic."""

    lr: float = opt(1e-5, "learning rate", ge(0), le(MOST))


@attrs.frozen(kw_only=True)
class CriticConfig(TrainedConfig):
    """The critic."""

    optim: CriticOptimConfig = sub(CriticOptimConfig)
    strategy: str | None = opt(
        None, "local, fsdp or megatron; by default the actor's, with the actor's layout", one_of(*STRATEGIES)
    )
    path: str | None = paths(None, "model folder of the critic, by default the actor's")


@attrs.frozen(kw_only=True)
class RewardConfig:
    """Reward functions of the user, or a judge."""

    functions: tuple[str, ...] = paths(
        (), "rewards as module:function or FILE.py:function; if empty, the rule of the data source", kind="code"
    )
    weights: tuple[float, ...] = opt((), "weight of each function, by default 1", when=BY_FUNCTIONS)
    arguments: Mapping[str, Any] = free(
        "a table of further keyword arguments of the functions; each gets the ones that it has parameters for",
        when=BY_FUNCTIONS,
    )
    timeout: float = opt(
        30.0,
        "seconds that one call of a function, or a judge's reply, may take",
        gt(0),
        le(MOST),
        when=provided(lambda o, cfg: o.by_user, "without reward.functions or reward.url"),
    )
    num_workers: int = opt(1, "processes that run the functions", ge(1), le(4096), when=BY_FUNCTIONS)
    env: tuple[str, ...] = opt(
        (), "environment variables that the functions get, such as the key of a judge's API", when=BY_FUNCTIONS
    )
    url: str = opt("", "API of a judge, such as http://localhost:8000/v1, as the reward", is_address)
    api: str = opt(
        "chat",
        "what is at its address: chat, a language model that is asked; pooling, a reward model that vLLM serves and "
        "that scores the tokens of a response with its prompt",
        one_of("chat", "pooling"),
        when=BY_JUDGE,
    )
    model: str = opt("", "the name of its model", when=BY_JUDGE)
    prompt: str = opt(
        PROMPT, "what it is asked; {prompt}, {response} and {ground_truth} are replaced", has_response, when=ASKED
    )
    pattern: str = opt(
        PATTERN,
        "regular expression whose first group is the score; its last match in a reply counts",
        has_a_group,
        when=ASKED,
    )
    unreadable_score: float = opt(
        0.0, "the score of a response where the reply has none; these are counted", ge(-MOST), le(MOST), when=ASKED
    )
    retries: int = opt(
        3, "further attempts where it is not reached, late, overloaded or broken", ge(0), le(100), when=BY_JUDGE
    )
    concurrency: int = opt(16, "most requests at a time", ge(1), le(1024), when=BY_JUDGE)
    api_key_env: str = opt("", "the environment variable with the key of its API, if it needs one", when=BY_JUDGE)
    offline: bool = opt(False, "take replies from judge.jsonl in trainer.dir alone, as a replay does", when=BY_JUDGE)

    def __attrs_post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"reward.weights has {len(self.weights)} values for the {len(self.functions)} of reward.functions"
            )
        if self.url and self.functions:
            raise ConfigError(
                "reward.url and reward.functions are both set, and one of them must score; to add a judge to others, "
                "ask it in a function"
            )
        if taken := sorted(GIVEN & self.arguments.keys()):
            raise ConfigError(f"reward.arguments.{taken[0]} is given by the run, for each response; remove it")
        about = "reward.arguments must have values of JSON, since functions run in other processes"
        with raised_as(ConfigError, about, TypeError, ValueError):
            json.dumps(dict(self.arguments))
        if self.url and not self.model:
            raise ConfigError("reward.model is empty; set it to the name of the judge's model at reward.url")

    @property
    def by_user(self) -> bool:
        """Returns whether the user's functions or a judge score, and not the rule of the data source."""
        return bool(self.functions or self.url)


@attrs.frozen(kw_only=True)
class EnvConfig:
    """The environment that the policy talks to in several turns."""

    name: str = paths("", "class as FILE.py:NAME or MODULE:NAME; if empty, a response ends a problem", kind="code")
    arguments: Mapping[str, Any] = free("a table of keyword arguments of the class", when=IN_TURNS)
    python: str = paths(
        "",
        "interpreter of the processes with environments, if their packages differ from the trainer's",
        kind="link",
        when=IN_TURNS,
    )
    max_turns: int = opt(8, "most replies of a conversation", ge(1), le(10_000), when=IN_TURNS)
    max_turn_length: int | None = opt(
        None,
        "longest reply in tokens, with its end token; by default data.max_response_length",
        ge(1),
        when=IN_TURNS,
    )
    timeout: float = opt(30.0, "seconds that one call of the environment may take", gt(0), le(MOST), when=IN_TURNS)
    num_workers: int = opt(
        1, "processes with environments beside each rollout engine", ge(1), le(4096), when=IN_TURNS
    )
    variables: tuple[str, ...] = opt(
        (), "environment variables that these processes get, such as the key of an API", when=IN_TURNS
    )

    def __attrs_post_init__(self) -> None:
        if self.name and not (is_reference(self.name) or verifiers_name(self.name)):
            raise ConfigError(f"env.name is {self.name!r}; it must be a class as FILE.py:NAME or MODULE:NAME")


@attrs.frozen(kw_only=True)
class DriverConfig:
    """How the parts of a run are distributed over processes."""

    kind: str = opt(
        "local", "local: this process; ray: rollout, reward and training as actors", one_of("local", "ray")
    )
    num_threads: int = opt(
        0,
        "torch's CPU threads a process; 0: a local run's OMP_NUM_THREADS, or two beside a GPU, else a share of cores",
        ge(0),
        le(4096),
    )
    device: str = opt("auto", "cpu, cuda, or auto", one_of("auto", "cpu", "cuda"))
    deterministic: bool = opt(True, "use only kernels whose results repeat bitwise; on GPUs they are slower")
    max_lag: int = opt(
        0,
        "maximum staleness of a sample, in steps; above 0, engines "
        "that are placed apart sample while the trainer learns",
        ge(0),
        le(64),
    )


@attrs.frozen(kw_only=True)
class RayConfig:
    """The Ray driver."""

    ranks: int = opt(1, "training processes, each with a GPU if there are GPUs", ge(1), le(4096), when=OVER_RAY)
    separate: tuple[str, ...] = opt(
        (),
        "roles that train in ray.ranks processes of their own; all other roles share processes",
        deep_iterable(one_of("critic", "reference")),
        when=OVER_RAY,
    )
    address: str = opt("", "a running cluster to use: auto, or host:port; if empty, one is started", when=OVER_RAY)
    runtime_env: str = paths("", "YAML file with Ray's runtime environment for the workers", when=OVER_RAY)
    placement: str = opt(
        "PACK",
        "how Ray places the ranks on nodes",
        one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        when=OVER_RAY,
    )
    timeout: float = opt(
        600.0,
        "seconds after which a rank that others wait for counts as hung",
        gt(0),
        le(MOST),
        when=provided(
            lambda o, cfg: (
                cfg.driver.kind == "ray" or {cfg.actor.strategy, cfg.critic.strategy} & {"fsdp", "megatron"}
            ),
            'with driver.kind = "local"',
        ),
    )


@attrs.frozen(kw_only=True)
class TrainerConfig:
    """The run: its folder, its length, its evaluations, checkpoints and logs."""

    dir: str = paths("runs/run", "the run's folder", required=True)
    seed: int = opt(0, "the seed of all random numbers", ge(0), le(2**63 - 1))
    total_training_steps: int = opt(100, "steps of the run", ge(1))
    val_before_train: bool = opt(True, "evaluate before the first step")
    test_freq: int = opt(-1, "steps between evaluations; -1 only at the end", ge(-1))
    save_freq: int = opt(50, "steps between checkpoints; -1 only at the end", ge(-1))
    max_ckpt_to_keep: int = opt(2, "newest checkpoints to keep", ge(1))
    async_save: bool = opt(False, "write checkpoints while the next step runs, from a copy in host memory")
    resume_mode: str = opt("auto", "auto continues the run; disable starts over", one_of("auto", "disable"))
    resume_from_path: str | None = paths(None, "checkpoint of this or another run to start from (a fork)")
    stop_at: float | None = opt(None, "end the run when the held-out stop_metric reaches this", ge(-MOST), le(MOST))
    stop_metric: str = opt(
        "acc",
        "what stop_at and the screen's line say of held-out answers: acc, the share of right ones, or reward; means",
        one_of("acc", "reward"),
    )
    log_freq: int = opt(1, "steps between lines on the screen", ge(1))
    logger: tuple[str, ...] = opt(
        (),
        "loggers beside metrics.jsonl: tensorboard, wandb; console is always on",
        deep_iterable(one_of("console", "tensorboard", "wandb")),
    )
    project_name: str = opt("verl_fn", "wandb's project", when=WANDB)
    experiment_name: str = opt("", "the run's name in wandb, by default the folder's name", when=WANDB)
    log_val_generations: int = opt(8, "held-out answers of each evaluation to log, for the report", ge(0))
    rollout_data_dir: str | None = paths(None, "write each step's training responses as text to STEP.jsonl there")
    journal: str = opt(
        "off",
        "record for replay: off; digests of each step's samples and state; or samples: the samples too",
        one_of("off", "digests", "samples"),
    )
    max_skipped_steps: int = opt(
        5, "end the run after so many steps in a row without a finite gradient of a role", ge(1)
    )

    def __attrs_post_init__(self) -> None:
        if self.stop_at is None:
            return
        if self.test_freq < 1:
            raise ConfigError("trainer.stop_at needs evaluations during the run; set trainer.test_freq")
        if self.stop_metric == "acc" and not 0 <= self.stop_at <= 1:
            raise ConfigError(
                f"trainer.stop_at is {self.stop_at}, but acc is a share from 0 to 1; for the reward, set "
                "trainer.stop_metric=reward"
            )


@attrs.frozen(kw_only=True)
class Config:
    """The whole configuration.

    Example:
        >>> Config(data=DataConfig(task="count")).algorithm.options.clip_ratio
        0.2
    """

    trainer: TrainerConfig = sub(TrainerConfig)
    data: DataConfig = sub(DataConfig)
    model: ModelConfig = sub(ModelConfig)
    algorithm: AlgorithmTable = sub(AlgorithmTable)
    actor: ActorConfig = sub(ActorConfig)
    critic: CriticConfig = sub(
        CriticConfig,
        when=provided(
            lambda o, cfg: any(uses_critic(*item) for item in cfg.algorithm.outline.roles.items()),
            'with algorithm.name = "{cfg.algorithm.name}"',
        ),
    )
    rollout: RolloutConfig = sub(RolloutConfig)
    env: EnvConfig = sub(EnvConfig)
    reward: RewardConfig = sub(RewardConfig)
    driver: DriverConfig = sub(DriverConfig)
    ray: RayConfig = sub(RayConfig)


def to_table(cfg: Config) -> Table:
    """Returns nested tables with every key that is not None; TOML has no null.

    Example:
        >>> to_table(Config())["trainer"]["seed"]
        0
    """
    table = attrs.asdict(cfg, filter=lambda attribute, value: value is not None)
    table["algorithm"] = {"name": cfg.algorithm.name} | table["algorithm"]["options"]
    return table
