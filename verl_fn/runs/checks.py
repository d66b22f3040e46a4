"""Checks of a plan, its data and its models before the first step.

A check that fails raises a ``ConfigError``, unless it says otherwise.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from verl_fn import build
from verl_fn.algorithms import make
from verl_fn.algorithms.experience import conversations_of
from verl_fn.algorithms.own import check_fields, hints
from verl_fn.atomic import existing
from verl_fn.backends.hf.config import compute_dtype, is_classifier
from verl_fn.backends.hf.exact import check as check_exact
from verl_fn.backends.hf.experts import experts_of
from verl_fn.backends.hf.folder import ModelError, check_weights, hollow, pads_rows, read_config, without_head
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.skeleton import dtype_of
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.hf.ulysses import LayoutError, check_heads
from verl_fn.backends.hf.vision import family_of
from verl_fn.backends.megatron.distributed_optimizer import check_updates_by
from verl_fn.backends.megatron.fidelity import check_head, check_sight
from verl_fn.backends.megatron.importing import MegatronMissing, check_installed
from verl_fn.backends.megatron.shards import check_fully_sharded
from verl_fn.backends.mock import MockRollout
from verl_fn.config import ConfigError, Plan, RolePlan
from verl_fn.config.plan import check_address, check_room
from verl_fn.config.schema import TrainerConfig
from verl_fn.data.examples import COMPLETION, Conversation
from verl_fn.data.files import FileData, encode_prompts, label_of
from verl_fn.data.judged import Judged, TaskPairs
from verl_fn.data.notices import IMAGES, TOOLS, Traits, traits_of
from verl_fn.data.tasks import TASKS, Problem, Source, Task
from verl_fn.driver import ranks
from verl_fn.environments.processes import EnvError
from verl_fn.environments.rendering import Renderer
from verl_fn.errors import install, raised_as
from verl_fn.rewards.reward import Answer, RewardError, by_rules, has_rule, odd_answers
from verl_fn.state import Key

from .history import is_run, other_writer, run_around

# Frozen models of other folders that algorithm.NAME names.
OTHER_MODELS = ("reward_model", "teacher")
JUDGED = 2  # problems of each kind that reward functions are tried on
TRIES = 8  # conversations of a kind that a check probes at most
# A path in one of these is no OWNER/NAME of the hub.
OUR_FOLDERS = frozenset(("models", "runs", "checkpoints", "exported", "data"))


def check(plan: Plan, source: Source, tokenizer: Any, *, installed: bool = True) -> None:
    """Checks that tokenizer, models, row lengths and ranks go together.

    Args:
        installed: whether the libraries of its backends must be installed here.

    Raises:
        ModelError: the tokenizer's vocabulary is larger than a model's.
        ConfigError: the longest row does not fit the token budget or the model's positions, or prompts are longer
            than allowed.
        RewardError: problems have no reward.
    """
    check_ranks(plan, installed=installed)
    if isinstance(source, FileData):
        _check_rules(plan, source, tokenizer)
        _check_pairs(plan, source)
        _check_tools(plan, source, tokenizer)
        _check_images(plan, source, tokenizer)
    check_other_models(plan, tokenizer)
    for role in plan.roles.values():
        check_vocabulary(role.folder, tokenizer)
    check_lengths(plan, row_lengths(plan, source, tokenizer))


def check_lengths(plan: Plan, rows: RowLengths) -> None:
    """Checks that the longest rows fit the models and the budgets of tokens."""
    own = plan.learns_from != "samples"
    for role in plan.roles.values():
        positions = getattr(read_config(role.folder), "max_position_embeddings", None)
        if positions is not None and rows.trained > positions and own:
            raise ConfigError(
                f"a row of the data may have {rows.trained} tokens (prompt, answer and end token), but "
                f"{role.folder} has only {positions} "
                "positions; leave long rows out, or take a model with more positions"
            )
        if positions is not None and rows.sampled > positions:
            raise ConfigError(
                f"a row may have {rows.sampled} tokens (prompt and data.max_response_length), but {role.folder} has "
                f"only {positions} positions (max_position_embeddings of its config.json, which verl-fn new-model "
                "can set); lower data.max_response_length or data.max_prompt_length"
            )
        if rows.together > role.max_tokens:
            _refuse_budget(role, rows)
        if rows.padded > role.max_tokens and pads_rows(role.folder, role.head, role.row_layout):
            _refuse_budget(role, attrs.evolve(rows, together=rows.padded, parts="a pair: its longer row twice"))


@attrs.frozen
class RowLengths:
    """The lengths of the longest rows of a run in tokens.

    Attributes:
        sampled: of a row that is sampled; 0 in a run that samples none.
        trained: of a row that is trained on.
        together: of the rows that are trained on together, such as a pair.
        padded: of these rows if each is as long as the longest of them.
        parts: what ``together`` consists of.
    """

    sampled: int
    trained: int
    together: int
    padded: int
    parts: str


def row_lengths(plan: Plan, source: Source, tokenizer: Any) -> RowLengths:
    """Returns the lengths of the longest rows in tokens.

    Raises:
        ConfigError: prompts of a generated task are longer than allowed.
    """
    data, prompt = plan.data, source.max_prompt
    if isinstance(source, Task | TaskPairs):
        # A generated task has one token for each character, after the bos token.
        prompt += tokenizer.bos_token_id is not None
        if prompt > data.max_prompt_length:
            raise ConfigError(
                f"prompts of data.task = {data.task} have up to {prompt} tokens, more than data.max_prompt_length "
                f"= {data.max_prompt_length}; raise it"
            )
    # An environment begins conversations with messages of its own.
    opening = data.max_prompt_length if plan.env.name else prompt
    answered = opening + data.max_response_length
    if plan.learns_from == "samples":
        return RowLengths(answered, answered, answered, answered, "a row: prompt and data.max_response_length")
    # vLLM makes room for such rows before it gets any.
    if plan.rollout.name == "sampler" and not sampled(plan, source.held_out(data.val_size)):
        answered = 0
    # What the data holds is not limited by data.max_response_length.
    trained = (
        prompt + source.max_answer + 1 if isinstance(source, Task | TaskPairs) else getattr(source, "max_row", 0)
    )
    if plan.learns_from != "pairs":
        return RowLengths(answered, trained, trained, trained, "a row: prompt, answer and end token")
    together = 2 * trained if isinstance(source, TaskPairs) else getattr(source, "max_group", 0)
    return RowLengths(answered, trained, together, 2 * trained, "a pair: twice prompt, response and end token")


def _refuse_budget(role: RolePlan, rows: RowLengths) -> None:
    shared = role.sharers
    on_ranks = f" on {shared} ranks together" if shared > 1 else ""
    unit, _, parts = rows.parts.partition(": ")
    raise ConfigError(
        f"{unit} may have {rows.together} tokens ({parts}), more than {role.table}.ppo_max_token_len_per_gpu = "
        f"{role.max_tokens // shared}{on_ranks}; raise that budget"
    )


def check_run_folder(plan: Plan) -> None:
    """Checks that the folders that a run writes are no files and lie in none, and that its own can be a run's.

    It can be no model's, and a new one cannot lie in another run's, which removes folders of its own. A new run does
    not overwrite the responses of another one.
    """
    own = Path(plan.trainer.dir)
    if (own / "config.json").is_file():
        raise ConfigError(f"trainer.dir: {own} is the folder of a model; choose another folder for the run")
    if not is_run(own) and (other := run_around(own)) is not None:
        raise ConfigError(
            f"trainer.dir: {own} lies in the folder of another run, {other}, which may remove it; choose a folder "
            "beside that one"
        )
    for key, folder in _written_folders(plan):
        if taken := next((place for place in (folder, *folder.parents) if place.is_file()), None):
            raise ConfigError(f"{key}: {taken} is a file; choose a folder")
        if key != "trainer.dir" and (writer := other_writer(folder, own)) is not None:
            raise ConfigError(
                f"{key}: {folder} has the responses of the run {writer}, and this run would overwrite them; choose "
                "another folder"
            )


def check_writable(plan: Plan) -> None:
    """Checks that the folders that a run writes can be written or made, by a file that has no name."""
    for key, folder in _written_folders(plan):
        there = existing(folder)
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise ConfigError(
                f"{key}: {there} cannot be written ({error.strerror or error}); choose a folder that can be"
            ) from error


def _written_folders(plan: Plan) -> list[tuple[str, Path]]:
    """Returns the folders that a run writes, with their keys."""
    given = {"trainer.dir": plan.trainer.dir}
    if plan.learns_from == "samples" and plan.trainer.rollout_data_dir:
        given["trainer.rollout_data_dir"] = plan.trainer.rollout_data_dir
    return [(key, Path(folder)) for key, folder in given.items()]


def check_has_training(plan: Plan) -> None:
    """Checks that there is something to train on."""
    if plan.data.val_files and not plan.data.train_files:
        raise ConfigError("data.val_files is set without data.train_files, so there is nothing to train on")


def check_model_folders(plan: Plan) -> None:
    """Checks that the folders of models exist; nothing is downloaded."""
    for role in plan.roles.values():
        if role.folder == plan.model and plan.new_model is not None:
            continue
        if not Path(role.folder).is_dir():
            key = "critic.path" if role.table == "critic" and role.folder != plan.model else "model.path"
            key = f"algorithm.{role.name}" if role.name in OTHER_MODELS else key
            if Path(role.folder).exists():
                raise ConfigError(f"{key}: {role.folder} is a file; set the folder of a model")
            name = _hub_name(Path(role.folder))
            hub, folder = (name, f"models/{Path(name).name}") if name else ("OWNER/NAME", "FOLDER")
            raise ConfigError(
                f"{key}: there is no folder {role.folder}. If another run makes it, do that one first. A run "
                f"downloads no models: for one of the Hugging Face hub, run verl-fn prepare hub:{hub} --out {folder} "
                "first and set the folder. To plan for another machine (--gpus), a folder with config.json is enough"
            )


def _hub_name(folder: Path) -> str:
    """Returns what may be the name of a model of the hub, of a path that was given as OWNER/NAME; else nothing."""
    here, owner = Path.cwd(), folder.parent
    named = owner.parent == here and not owner.exists() and owner.name not in OUR_FOLDERS
    return "/".join(folder.parts[-2:]) if named else ""


def _check_tools(plan: Plan, source: FileData, tokenizer: Any) -> None:
    """Checks that no row has tools where an environment gives them."""
    if not plan.env.name:
        return
    if rows := sum(traits_of(problems, tokenizer).count(TOOLS) for problems in (source.training, source.validation)):
        raise ConfigError(
            f"env.name: {rows} rows have tools in the column tools, and the model would only see the environment's; "
            "let the environment give them, and remove the column (a function of data.convert can)"
        )


def _check_images(plan: Plan, source: FileData, tokenizer: Any) -> None:
    """Checks that all parts of a run read images, if rows have any."""
    # Where samples are learned from, only the rollout engine gets held-out rows.
    trained = (source.training, *(() if plan.learns_from == "samples" else (source.validation,)))
    if not any(traits_of(problems, tokenizer).count(IMAGES) for problems in trained):
        return
    if plan.trainer.journal == "samples":
        raise ConfigError("trainer.journal = samples keeps no images, and rows have some; set it to digests")
    for name, role in plan.roles.items():
        table = f"{name} ({role.folder})"
        if role.head != "lm":
            raise ConfigError(
                f"{table}: a model with a value head reads no images, and rows have some; take an algorithm without "
                "one, such as algorithm.name=grpo"
            )
        if family_of(read_config(role.folder)) is None:
            raise ConfigError(f"{table}: this model reads no images, and rows have some; take one that does")
        if pads_rows(role.folder, role.head, role.row_layout):
            raise ConfigError(f"{table}: padded rows have no images; set model.layout to auto")
        if role.sharers > 1:
            raise ConfigError(f"{table}: ranks cannot share rows with images; set their number for a row to 1")


def _check_rules(plan: Plan, source: FileData, tokenizer: Any) -> None:
    """Checks that the rules can score the problems of files, before any step is paid for.

    Raises:
        RewardError: a data source has no rule, or its rule does not fit a problem.
    """
    if plan.reward.by_user or plan.env.name:
        return
    held_out = source.held_out(plan.data.val_size)
    by_rules([Answer(problem, "") for problem in sampled(plan, held_out)])
    if plan.needs_reward:
        by_rules([Answer(source.training[i], "") for i in _with_rules(traits_of(source.training, tokenizer))])


def _check_pairs(plan: Plan, source: FileData) -> None:
    """Checks that held-out rows of a model that gives no answers hold pairs; others could not be evaluated."""
    if plan.roles["actor"].head == "lm" or plan.learns_from != "pairs":
        return
    if others := [one for one in source.held_out(plan.data.val_size) if not isinstance(one, Judged)]:
        raise ConfigError(
            f"data.val_files: {label_of(others[0])} has no responses chosen and rejected, and {plan.algorithm} "
            "answers no prompts; name files of pairs"
        )


def _with_rules(traits: Traits) -> list[int]:
    """Returns the places of problems whose rules can fail on an answer without text.

    They are the first one of each data source, and all with the source of a generated task, whose rule reads the
    prompt.
    """
    found: list[int] = []
    for number, group in enumerate(traits.names):
        places = np.flatnonzero(traits.groups == number)
        found += (places if group.data_source in TASKS else places[:1]).tolist()
    return sorted(found)


def sampled(plan: Plan, problems: Sequence[Problem]) -> list[Problem]:
    """Returns the held-out problems to which an evaluation samples answers.

    A model that is no language model answers none. Without reward functions and an environment, a problem that holds
    responses to learn from is left out, unless it has a ground truth and a rule for its data source.
    """
    if plan.roles["actor"].head != "lm":
        return []
    judged = bool(plan.reward.by_user or plan.env.name)
    return [
        p
        for p in problems
        if judged
        or not (isinstance(p, Conversation | Judged) or p.data_source == COMPLETION)
        or (p.answer and has_rule(p.data_source))
    ]


def check_ranks(plan: Plan, *, installed: bool = True) -> None:
    """Checks that every role's layout fits the number of ranks and its model.

    Args:
        installed: whether the libraries of its backends must be installed here.
    """
    size = ranks.training_ranks(plan)
    for role in plan.roles.values():
        # A critic without a strategy of its own has the actor's layout.
        has_own = role.table == "critic" and plan.table["critic"].get("strategy") is not None
        table = "critic" if has_own else "actor"
        if role.strategy == "local":
            if size > 1:
                ranks_are = "ray.ranks is" if plan.driver.kind == "ray" else "torchrun's number of processes is"
                raise ConfigError(
                    f"{table}.strategy is local, which is one process, but {ranks_are} {size}; "
                    f"set {table}.strategy=fsdp or {table}.strategy=megatron"
                )
            continue
        if role.strategy == "megatron":
            _check_megatron(role, table, size, installed=installed)
            continue
        for name in ("replicate", "ulysses_sequence_parallel_size"):
            value = getattr(role.fsdp_config, name)
            if size % value:
                raise ConfigError(f"{table}.fsdp_config.{name} = {value} does not divide the {size} training ranks")
        with raised_as(ConfigError, f"{table}.fsdp_config.ulysses_sequence_parallel_size", LayoutError):
            check_heads(read_config(role.folder), role.fsdp_config.ulysses_sequence_parallel_size)


def _check_megatron(role: RolePlan, table: str, size: int, *, installed: bool) -> None:
    with raised_as(ConfigError, f"{table}.strategy is megatron", MegatronMissing, ValueError):
        if installed:
            check_installed()
        check_updates_by(role.megatron.optimizer, build.optimizer(role.optim if role.trained else None, 1))
    with raised_as(ConfigError, f"{table}.megatron", LayoutError):
        sizes = build.megatron_sizes(role.megatron)
        config = read_config(role.folder).get_text_config()
        sizes.check(size)
        sizes.check_model(config)
        if role.megatron.use_megatron_fsdp:
            check_fully_sharded(sizes, adapters=role.lora is not None, updates_by=role.megatron.optimizer)
    if role.router_replay and not experts_of(config):
        raise ConfigError(f"actor.router_replay.mode needs a model with experts, and {role.folder} has none")
    if role.lora and role.lora[0] % sizes.tp:
        raise ConfigError(
            f"{role.table}.lora_rank = {role.lora[0]} must be a multiple of "
            f"{table}.megatron.tensor_model_parallel_size = {sizes.tp}"
        )


def check_device(plan: Plan) -> None:
    """Checks that the device exists."""
    # A Ray cluster may have GPUs that this process does not see.
    ray = sys.modules.get("ray")
    connected = plan.driver.kind == "ray" and (plan.ray.address or (ray is not None and ray.is_initialized()))
    if plan.driver.device == "cuda" and not connected and not torch.cuda.is_available():
        raise ConfigError(
            "driver.device is cuda, but torch finds no GPU here; set driver.device=cpu or auto, or plan for another "
            "machine by --check --gpus N --gpu-memory GIB"
        )


def check_other_models(plan: Plan, tokenizer: Any) -> None:
    """Checks that a plan's reward model and teacher have the actor's tokens.

    Raises:
        ConfigError: a teacher is not named, or ``algorithm.top_k`` cannot be used.
        ModelError: a model was trained with another tokenizer.
    """
    for name in OTHER_MODELS:
        role = plan.roles.get(name)
        if role is None:
            continue
        if not getattr(plan.options, name, role.folder):
            raise ConfigError(f"algorithm.{name} is empty; set it to the model folder of the {name}")
        if read_tokenizer(role.folder).get_vocab() != tokenizer.get_vocab():
            raise ModelError(
                f"algorithm.{name}: the tokenizer in {role.folder} is not the actor's, so it would read other texts "
                "than the actor writes; take a model with the same tokenizer"
            )

    _check_top_k(plan, len(tokenizer))


def _check_top_k(plan: Plan, tokens: int) -> None:
    top_k = getattr(plan.options, "top_k", 0) if "teacher" in plan.roles else 0
    if top_k > tokens:
        raise ConfigError(f"algorithm.top_k is {top_k}, but the tokenizer has only {tokens} tokens; lower it")
    if top_k and any(role.strategy == "megatron" for role in plan.roles.values()):
        raise ConfigError(
            "algorithm.top_k needs probabilities of several tokens at each place, which megatron does not give; set "
            "actor.strategy=fsdp, or algorithm.top_k=0"
        )


def check_vocabulary(folder: str | Path, tokenizer: Any) -> None:
    """Checks that a model has an embedding for every id of the tokenizer."""
    size = read_config(folder).get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model in {folder} only {size}: "
            f"they do not belong together; use the tokenizer that the model was trained with"
        )


# The screen, on which a run prints whether it is asked for or not.
CONSOLE = "console"


def check_parts(plan: Plan, tokenizer: Any, ends: Sequence[int], gpus: int | None = None) -> None:
    """Checks loggers, chat template, rollout engine and cluster, none of which is started.

    Args:
        gpus: how many GPUs another machine has, for which packages need not be installed here; None for this one.

    Raises:
        UserError: one of them cannot be had or used; the message names the key.
    """
    if plan.env.name:
        Renderer(tokenizer, ends)
    if gpus is not None:
        return
    check_loggers(plan.trainer)
    # Nodes of a cluster that runs already may have what this machine lacks.
    if plan.rollout.name == "vllm" and not plan.ray.address:
        _check_vllm(plan)
    if plan.driver.kind == "ray":
        check_cluster(plan)


def check_cluster(plan: Plan) -> None:
    """Checks what can be known of a plan's Ray cluster before it is started or reached.

    Raises:
        ConfigError: the runtime environment cannot be read, ``ray.address`` is not an address, or this machine has
            too few GPUs for a cluster of its own.
    """
    from verl_fn.driver.ray import placements, runtime_env

    ray = sys.modules["ray"]
    if plan.ray.runtime_env:
        runtime_env(Path(plan.ray.runtime_env))
    if plan.ray.address:
        check_address(plan.ray.address, reach=False)
    # Other clusters, and the machine on which a plan for GPUs runs later, may have more GPUs than are seen here.
    elif not ray.is_initialized() and plan.driver.device != "cpu" and (gpus := torch.cuda.device_count()):
        check_room(plan, placements(plan, "cuda")[1], [{"GPU": gpus}])


def check_gpus(plan: Plan, gpus: int) -> None:
    """Checks that a machine has a GPU for each process of a plan that takes one."""
    from verl_fn.driver.ray import placements

    if plan.driver.kind == "ray":
        check_room(plan, placements(plan, "cuda")[1], [{"GPU": gpus}], planned=True)


def check_code(plan: Plan, *, here: bool = True) -> list[str]:
    """Checks that the files of the user's own code exist, and that the algorithm can be made of its objects.

    Args:
        here: whether rewards and environment run on this machine, and so have to be here.

    Returns:
        Sentences about a loss and an estimator of the user that fail on a made-up batch, and options without effect.

    Raises:
        ConfigError: a file or an object in it does not exist, or is none that the key takes.
    """
    keys = dict.fromkeys(plan.reward.functions, "reward.functions") | {plan.env.name: "env.name"}
    for reference, key in keys.items():
        file = Path(reference.rpartition(":")[0])
        # A cluster that runs already may have files that this machine lacks.
        if here and file.suffix == ".py" and not file.is_file() and not plan.ray.address:
            raise ConfigError(f"{key}: there is no file {file}")
    make(plan.algorithm, plan.options)
    named = None if plan.reward.functions or plan.reward.url or plan.env.name else ()
    made_up = check_fields(plan.options, named)
    return [*made_up.values(), *hints(plan.options, plan.data.train_batch_size, plan.driver.max_lag)]


def check_loggers(trainer: TrainerConfig) -> None:
    """Checks that the packages of ``trainer.logger`` are installed."""
    for name in trainer.logger:
        if name != CONSOLE and sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger asks for {name}, and it is not installed: {install(name)}, or leave it out of "
                "trainer.logger (metrics.jsonl has all metrics)"
            )


def check_all_weights(plan: Plan, *, needed: bool = True) -> list[str]:
    """Checks that model folders have the weights of their models, whose files are not read to the end.

    Args:
        needed: whether a folder must have weights.

    Returns:
        The folders without weights.

    Raises:
        ModelError: one has not, a reward model lacks its head, or Megatron cannot compute the logits of its model.
        ExactError: log-probs of its model cannot be the engine's in every bit.
        ConfigError: ranks would share padded rows.
    """
    models = {(role.folder, role.head, role.row_layout): role for role in plan.roles.values()}
    lacking = [folder for folder, *_ in models if not _has_weights(Path(folder))]
    if needed and lacking:
        raise ModelError(
            f"{lacking[0]} has no weights (model.safetensors or its shards). To plan for a machine that has them, "
            "add --check --gpus N --gpu-memory GIB"
        )
    # Without a head, all scores would be 0. A critic of the same folder may lack it.
    reward_model = plan.roles["reward_model"].folder if "reward_model" in plan.roles else None
    if reward_model in lacking and not is_classifier(read_config(reward_model)):
        raise without_head(reward_model)
    skeletons = {
        (folder, head, layout): hollow(folder, head, key=Key.from_seed(0), row_layout=layout).skeleton
        if folder in lacking
        else check_weights(folder, head, layout, scores=head == "value" and folder == reward_model)
        for folder, head, layout in models
    }
    for role in plan.roles.values():
        skeleton = skeletons[role.folder, role.head, role.row_layout]
        changed = skeleton
        if role.lora or role.recomputes or role.freeze_vision_tower:
            changed = hollow(
                role.folder,
                role.head,
                key=Key.from_seed(0),
                checkpointing=role.recomputes,
                lora=Lora(*role.lora) if role.lora else None,
                freeze_tower=role.freeze_vision_tower,
            ).skeleton
        if role.exact:
            device = build.device(plan.driver)
            dtype = dtype_of(compute_dtype(role.dtype, role.folder, device), "actor.dtype")
            check_exact(skeleton, dtype, torch.device(device), role.folder)
        if role.strategy == "megatron":
            check_head(skeleton, role.folder)
            sizes = build.megatron_sizes(role.megatron)
            check_sight(changed, sizes, role.folder, fsdp=role.megatron.use_megatron_fsdp)
        elif role.strategy == "fsdp" and skeleton.padded and role.fsdp_config.ulysses_sequence_parallel_size > 1:
            raise ConfigError(
                f"{role.table}.fsdp_config.ulysses_sequence_parallel_size: rows of {role.folder} are padded, and "
                "ranks cannot share padded rows; set it to 1"
            )
    return list(dict.fromkeys(lacking))


def _has_weights(folder: Path) -> bool:
    return any(file for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))


def check_rewards(plan: Plan, source: Source | None) -> None:
    """Starts what runs the user's reward functions, as a run does, and lets them judge a few answers.

    These are the ground truths of some problems, and odd answers. ``check_judge`` asks a judge at an address.

    Args:
        source: the problems; None if the functions judge nothing, since what they need may be on another machine.

    Raises:
        UserError: they cannot be used, or fail.
    """
    functions = plan.reward.functions
    if any(_elsewhere(plan, name) for name in functions):
        return
    reward = build.reward(plan.reward, plan.model, env=plan.env.name, replies=plan.trainer.dir)
    if not functions or plan.env.name or source is None:
        return
    sampled = source.train(Key.from_seed(0), 0, JUDGED) if plan.learns_from == "samples" and plan.needs_reward else ()
    problems = (*sampled, *source.held_out(JUDGED))
    tried = [(Answer(problem, problem.answer), *odd_answers(problem, problem.answer)) for problem in problems]
    named = {name for scored in reward.judge([one for answers in tried for one in answers]) for name in scored}
    check_fields(plan.options, [f"reward/{name}" for name in named - {"score", "acc", "pred"}])


def check_judge(plan: Plan, source: Source) -> Iterator[str]:
    """Asks a judge at an address for one score, once and in the way of a run, and keeps no reply.

    Yields:
        A sentence if there is none; the judge may begin to serve later.
    """
    table = plan.reward
    if not table.url or table.offline:
        return
    sampled = source.train(Key.from_seed(0), 0, 1) if plan.learns_from == "samples" and plan.needs_reward else ()
    for problem in (*sampled, *source.held_out(1))[:1]:
        try:
            reward = build.reward(attrs.evolve(table, retries=0), plan.model)
            answer = reward.tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
            tokens = torch.tensor([*encode_prompts([problem], reward.tokenizer)[0], *answer])
            reward.judge([Answer(problem, problem.answer, tokens=tokens)])
        except RewardError as error:
            yield f"reward.url: {error}"


def check_conversations(plan: Plan, source: Source) -> Iterator[str]:
    """Starts what runs the user's environment, as a run does, and probes a conversation.

    The environment begins the conversation and answers an empty reply. If it fails, other conversations are tried: a
    run ends if all of a step's conversations fail.

    Yields:
        Sentences about what a run survives.

    Raises:
        UserError: the environment cannot be used, or all conversations fail.
    """
    if plan.env.name and not _elsewhere(plan, plan.env.name):
        # Nothing is drawn, so no engine is needed.
        tokenizer = build.policy_tokenizer(plan.rollout)
        conversing: Any = build.conversing(plan.rollout, "cpu", plan.env, engine=lambda *_: MockRollout({}))
        sampling = build.sampling(plan.rollout, plan.data.max_response_length)
        # All of a step are tried until one begins.
        sampled = (
            source.train(Key.from_seed(0), 0, plan.data.train_batch_size) if plan.learns_from == "samples" else ()
        )
        for part, problems in (("training", sampled), ("held-out", source.held_out(TRIES))):
            failures = []
            for request in conversations_of(problems, tokenizer, sampling, Key.from_seed(0)):
                if (failure := conversing.probe(request)) is None:
                    break
                failures.append(failure)
            # Conversations of the other held-out problems may go well.
            if failures and len(failures) == len(problems) and (part == "training" or len(problems) < TRIES):
                raise EnvError(f"env.name: all {len(failures)} {part} conversations fail, {failures[0]}")
            if failures:
                yield f"of the {part} problems, {failures[0]}"


def _elsewhere(plan: Plan, reference: str) -> bool:
    """Returns whether a reference is to a file that only the nodes of a running cluster have."""
    file = Path(reference.rpartition(":")[0])
    return bool(plan.ray.address) and file.suffix == ".py" and not file.is_file()


def _check_vllm(plan: Plan) -> None:
    from verl_fn.backends.vllm.arguments import check_served, check_version, engine_arguments

    r, device = plan.rollout, build.device(plan.driver)
    check_version()
    engine_arguments(
        Path(r.folder),
        device=device,
        dtype=compute_dtype(r.dtype, r.folder, device),
        slots=r.slots,
        max_length=r.longest,
        tensor_parallel_size=r.tensor_parallel_size,
        gpu_memory_utilization=r.gpu_memory_utilization,
        enforce_eager=r.enforce_eager,
        engine_kwargs=r.engine_kwargs,
    )
    check_served(Path(r.folder), device)
