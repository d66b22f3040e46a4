"""The configuration: frozen classes from TOML and ``key=value``, with verl's names for what verl has.

Nothing here touches torch, so a config is read and checked in milliseconds.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs.validators import ge, gt, in_, le


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key."""


class _RangeError(ValueError):
    """A field's name and what is wrong with its value."""


def opt(default: Any, doc: str, *checks: Callable[..., Any]) -> Any:
    """A field with a default, a line of documentation, and checks of its range."""

    def check(instance: Any, attribute: Any, value: Any) -> None:
        for one in checks if value is not None else ():
            try:
                one(instance, attribute, value)
            except ValueError as error:
                raise _RangeError(attribute.name, str(error.args[0])) from error

    return attrs.field(default=default, validator=check, metadata={"doc": doc})


def sub(cls: type) -> Any:
    """A nested table."""
    return attrs.field(factory=cls)


KL_TYPES = tuple(kind + plus for plus in ("", "+") for kind in ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"))


@attrs.frozen(kw_only=True)
class KLCtrl:
    type: str = opt("fixed", "fixed or adaptive", in_(("fixed", "adaptive")))
    kl_coef: float = opt(0.001, "coefficient of the KL penalty, the first one if adaptive", ge(0))
    target_kl: float = opt(0.1, "KL that the adaptive controller steers to, in nats", gt(0))
    horizon: int = opt(10000, "rows over which the adaptive controller reacts", ge(1))


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    name: str = opt("ppo", "ppo (with a critic), grpo (groups, no critic) or sft", in_(("ppo", "grpo", "sft")))
    adv_estimator: str | None = opt(
        None, "gae for ppo; grpo, rloo or reinforce_plus_plus for grpo",
        in_(("gae", "grpo", "rloo", "reinforce_plus_plus")),
    )  # fmt: skip
    gamma: float = opt(1.0, "discount of later rewards", ge(0), le(1))
    lam: float = opt(1.0, "GAE's lambda", ge(0), le(1))
    norm_adv_by_std_in_grpo: bool = opt(True, "divide by the group's standard deviation; off is Dr. GRPO")
    clip_ratio: float = opt(0.2, "PPO's clip range", gt(0))
    clip_ratio_low: float | None = opt(None, "lower clip range, by default clip_ratio", gt(0))
    clip_ratio_high: float | None = opt(None, "upper clip range, by default clip_ratio", gt(0))
    clip_ratio_c: float = opt(3.0, "bound of the dual clip", gt(1))
    loss_agg_mode: str = opt(
        "token-mean", "how per-token losses are averaged",
        in_(("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")),
    )  # fmt: skip
    loss_scale_factor: float | None = opt(
        None, "the constant of seq-mean-token-sum-norm, by default data.max_response_length", gt(0)
    )
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = opt(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = opt(0.001, "weight of that term", ge(0))
    kl_loss_type: str = opt("low_var_kl", "its estimator: k1, k2, k3 (low_var_kl), abs, or one with +", in_(KL_TYPES))
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = opt("kl", "its estimator", in_(KL_TYPES))
    kl_ctrl: KLCtrl = sub(KLCtrl)
    cliprange_value: float = opt(0.5, "clip range of the value loss", gt(0))
    ppo_mini_batch_size: int = opt(256, "prompts an update", ge(1))
    ppo_epochs: int = opt(1, "passes over a batch", ge(1))
    shuffle: bool = opt(False, "another order of rows in every pass")


@attrs.frozen(kw_only=True)
class OptimConfig:
    lr: float = opt(1e-6, "learning rate", ge(0))
    betas: tuple[float, float] = attrs.field(
        default=(0.9, 0.999), metadata={"doc": "decay rates of AdamW's averages"}
    )
    eps: float = opt(1e-8, "AdamW's epsilon", gt(0))
    weight_decay: float = opt(0.01, "decoupled weight decay", ge(0))
    clip_grad: float = opt(1.0, "largest global gradient norm", gt(0))
    lr_scheduler_type: str = opt("constant", "constant, linear or cosine", in_(("constant", "linear", "cosine")))
    lr_warmup_steps: int = opt(0, "updates of linear warm-up from 0", ge(0))
    min_lr_ratio: float = opt(0.0, "share of the learning rate left at the end of a decay", ge(0), le(1))


@attrs.frozen(kw_only=True)
class ActorConfig:
    optim: OptimConfig = sub(OptimConfig)
    ppo_max_token_len_per_gpu: int = opt(16384, "strict budget of tokens a micro-batch", ge(1))
    dtype: str = opt("float32", "compute dtype; masters are fp32", in_(("float32", "bfloat16")))
    enable_gradient_checkpointing: bool = opt(False, "recompute each layer in the backward pass")


@attrs.frozen(kw_only=True)
class CriticOptimConfig(OptimConfig):
    lr: float = opt(1e-5, "learning rate", ge(0))


@attrs.frozen(kw_only=True)
class CriticConfig(ActorConfig):
    optim: CriticOptimConfig = sub(CriticOptimConfig)
    path: str | None = opt(None, "model folder of the critic, by default the actor's")


@attrs.frozen(kw_only=True)
class RolloutConfig:
    name: str = opt("sampler", "the rollout engine", in_(("sampler",)))
    n: int = opt(1, "responses a prompt", ge(1))
    temperature: float = opt(1.0, "sampling temperature", gt(0))
    top_k: int = opt(-1, "keep the k likeliest tokens; -1 keeps all", ge(-1))
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", gt(0), le(1))
    slots: int = opt(64, "rows decoded at once", ge(1))
    dtype: str = opt("float32", "dtype of the engine", in_(("float32", "bfloat16")))


@attrs.frozen(kw_only=True)
class DataConfig:
    task: str = opt("reverse", "where problems come from", in_(("count", "reverse", "countdown")))
    train_batch_size: int = opt(256, "prompts a step", ge(1))
    val_size: int = opt(512, "held-out problems", ge(1))
    max_response_length: int = opt(16, "longest response in tokens, the end token included", ge(1))


@attrs.frozen(kw_only=True)
class NewModelConfig:
    arch: str = opt("qwen3", "transformers model type")
    hidden_size: int = opt(64, "width", ge(1))
    num_hidden_layers: int = opt(2, "depth", ge(1))
    num_attention_heads: int = opt(4, "query heads", ge(1))
    num_key_value_heads: int = opt(2, "key and value heads", ge(1))


@attrs.frozen(kw_only=True)
class ModelConfig:
    path: str = opt("", "Hugging Face model folder; empty makes a random model for the task")
    new: NewModelConfig = sub(NewModelConfig)


@attrs.frozen(kw_only=True)
class DriverConfig:
    kind: str = opt(
        "local", "local: this process; ray: rollout, reward and training as actors", in_(("local", "ray"))
    )
    num_threads: int = opt(0, "CPU threads of torch in each process; 0 takes all cores", ge(0))
    device: str = opt("auto", "cpu, cuda, or auto", in_(("auto", "cpu", "cuda")))
    deterministic: bool = opt(True, "bitwise repeatable kernels")


@attrs.frozen(kw_only=True)
class TrainerConfig:
    dir: str = opt("runs/run", "the run's folder")
    seed: int = opt(0, "everything random derives from it", ge(0))
    total_training_steps: int = opt(100, "steps of the run", ge(1))
    val_before_train: bool = opt(True, "evaluate before the first step")
    test_freq: int = opt(-1, "steps between evaluations; -1 only at the end", ge(-1))
    save_freq: int = opt(-1, "steps between checkpoints; -1 only at the end", ge(-1))
    max_ckpt_to_keep: int = opt(2, "checkpoints kept", ge(1))
    critic_warmup: int = opt(0, "steps in which only the critic learns", ge(0))
    resume_mode: str = opt(
        "auto", "auto continues the folder's last checkpoint; disable starts anew", in_(("auto", "disable"))
    )
    stop_at: float | None = opt(None, "end when held-out exact match reaches this", ge(0), le(1))
    log_freq: int = opt(1, "steps between lines on the screen", ge(1))


@attrs.frozen(kw_only=True)
class Config:
    """The whole configuration.

    >>> Config(algorithm=AlgorithmConfig(name="sft")).algorithm.clip_ratio
    0.2
    """

    trainer: TrainerConfig = sub(TrainerConfig)
    data: DataConfig = sub(DataConfig)
    model: ModelConfig = sub(ModelConfig)
    algorithm: AlgorithmConfig = sub(AlgorithmConfig)
    actor: ActorConfig = sub(ActorConfig)
    critic: CriticConfig = sub(CriticConfig)
    rollout: RolloutConfig = sub(RolloutConfig)
    driver: DriverConfig = sub(DriverConfig)

    def __attrs_post_init__(self) -> None:
        a = self.algorithm
        allowed = {"ppo": ("gae",), "grpo": ("grpo", "rloo", "reinforce_plus_plus"), "sft": ()}[a.name]
        if a.adv_estimator is not None and a.adv_estimator not in allowed:
            raise ConfigError(
                f"algorithm.adv_estimator is {a.adv_estimator!r}, which algorithm.name = {a.name!r} does not use; "
                f"it takes {' or '.join(allowed) or 'none'}"
            )
        t = self.trainer
        if t.stop_at is not None and t.test_freq < 1:
            raise ConfigError("trainer.stop_at needs evaluations to look at; set trainer.test_freq")
        if a.name == "grpo" and a.adv_estimator != "reinforce_plus_plus" and self.rollout.n < 2:
            raise ConfigError(
                "rollout.n is 1: estimators that compare within a group need at least 2 responses a prompt"
            )


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The config of a TOML file with ``key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the nearest one is offered), or a value has
            the wrong type or range.

    >>> load(overrides=["algorithm.clip_ratio=0.3", "data.task=count"]).algorithm.clip_ratio
    0.3
    >>> load(overrides=["algorithm.clip_ration=0.3"])
    Traceback (most recent call last):
    verl_fn.config.ConfigError: unknown key algorithm.clip_ration; did you mean algorithm.clip_ratio?
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _put(table, override)
    return structure(table)


def structure(table: Mapping[str, Any]) -> Config:
    """The config of nested tables, as ``load`` checks it."""
    _check_keys(table, Config, "")
    try:
        return _CONVERTER.structure(table, Config)
    except cattrs.BaseValidationError as error:
        raise ConfigError("; ".join(_messages(error, ""))) from error


def to_table(cfg: Config) -> dict[str, Any]:
    """Nested tables with every key, those that are None left out, as TOML has no null.

    >>> structure(to_table(Config())) == Config()
    True
    """
    return attrs.asdict(cfg, filter=lambda attribute, value: value is not None)


def keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key.

    >>> "actor.optim.lr" in set(keys())
    True
    """
    hints = typing.get_type_hints(cls)
    for f in attrs.fields(cls):
        if attrs.has(hints[f.name]):
            yield from keys(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def _check_keys(table: Mapping[str, Any], cls: type, prefix: str) -> None:
    hints = typing.get_type_hints(cls)
    for name, value in table.items():
        if name not in hints:
            raise _unknown(prefix + name)
        if attrs.has(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name} is a table of keys, not {value!r}")
            _check_keys(value, hints[name], f"{prefix}{name}.")


def _unknown(key: str) -> ConfigError:
    known = list(keys())
    last = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, 1, 0.8) or [k for k in known if k.rsplit(".", 1)[-1] == last]
    near = near or difflib.get_close_matches(key, known, 1, 0.5)
    return ConfigError(f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))


def _put(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, name = key.strip().split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part} is a value, not a table of keys")
    table[name] = value


def _messages(error: BaseException, prefix: str) -> Iterator[str]:
    """One line for each leaf of cattrs's tree of errors, with the dotted key in front."""
    if isinstance(error, cattrs.BaseValidationError):
        for inner in error.exceptions:
            notes = [n for n in getattr(inner, "__notes__", ()) if isinstance(n, cattrs.AttributeValidationNote)]
            yield from _messages(inner, f"{prefix}.{notes[0].name}".lstrip(".") if notes else prefix)
    elif isinstance(error, ConfigError):
        yield str(error)
    elif isinstance(error, _RangeError):
        name, text = error.args
        yield f"{prefix}.{name}".lstrip(".") + ": " + text.removeprefix(f"'{name}' ")
    else:
        yield f"{prefix}: {error.args[0] if error.args else error}"


def _strict(kind: type, *accepted: type) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"expected {kind.__name__}, got {value!r}")
        return kind(value)

    return hook


def _optional(value: Any, hint: Any) -> Any:
    inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return None if value is None else _CONVERTER.structure(value, inner)


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
for _kind, _accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
    _CONVERTER.register_structure_hook(_kind, _strict(_kind, *_accepted))
_CONVERTER.register_structure_hook_func(
    lambda hint: isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint), _optional
)
