"""The names that programs use, each imported when it is first used: ``import verl_fn as vf``.

All other names are in the packages: ``vf.steps.rloo``, ``vf.state.Request``.

Example:
    >>> import verl_fn as vf
    >>> loss = vf.ppo_clip() - 0.01 * vf.entropy()
    >>> vf.check_loss(vf.ppo_clip())
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import user_files  # so that a process that imports this package can unpickle objects of users' files

if TYPE_CHECKING:
    from .algorithms import Algorithm, Experience, Workers
    from .algorithms.experience import sample_and_score, update, update_report, with_reference
    from .backends.fsdp import Fsdp
    from .backends.hf.lora import Lora
    from .backends.hf.new_model import new_model
    from .backends.local import Local
    from .backends.megatron import Megatron
    from .backends.sampler import Sampler
    from .backends.vllm import Vllm
    from .config import Outline, Role, given, opt
    from .environments import Done
    from .rewards import Reward
    from .state import Batch, Grads, Key, Max, Min, Node, Params, Sampling, Sum, TrainState, Weighted, node, tree
    from .steps import (
        adamw,
        aggregate,
        chain,
        clip_by_global_norm,
        cosine,
        cross_entropy,
        entropy,
        gae,
        kl_to_reference,
        linear,
        loss,
        minibatches,
        ppo_clip,
        sgd,
        token_mean,
        value_clip,
    )
    from .testing import (
        Mock,
        MockRollout,
        check_advantage,
        check_backend,
        check_environment,
        check_loss,
        check_reward,
        check_rollout,
        compare_backends,
        compare_loss,
        tiny_batch,
    )

__version__ = "0.2.0"
__all__ = [
    "Algorithm",
    "Batch",
    "Done",
    "Experience",
    "Fsdp",
    "Grads",
    "Key",
    "Local",
    "Lora",
    "Max",
    "Megatron",
    "Min",
    "Mock",
    "MockRollout",
    "Node",
    "Outline",
    "Params",
    "Reward",
    "Role",
    "Sampler",
    "Sampling",
    "Sum",
    "TrainState",
    "Vllm",
    "Weighted",
    "Workers",
    "adamw",
    "aggregate",
    "chain",
    "check_advantage",
    "check_backend",
    "check_environment",
    "check_loss",
    "check_reward",
    "check_rollout",
    "clip_by_global_norm",
    "compare_backends",
    "compare_loss",
    "cosine",
    "cross_entropy",
    "entropy",
    "gae",
    "given",
    "kl_to_reference",
    "linear",
    "loss",
    "minibatches",
    "new_model",
    "node",
    "opt",
    "ppo_clip",
    "sample_and_score",
    "sgd",
    "tiny_batch",
    "token_mean",
    "tree",
    "update",
    "update_report",
    "user_files",
    "value_clip",
    "with_reference",
]

_PACKAGES = ("state", "steps", "backends", "config", "data", "rewards", "environments", "algorithms", "testing")
# Where each name is, by module.
_HOMES = {
    "algorithms": "Algorithm Experience Workers",
    "algorithms.experience": "sample_and_score update update_report with_reference",
    "backends.fsdp": "Fsdp",
    "backends.hf.lora": "Lora",
    "backends.hf.new_model": "new_model",
    "backends.local": "Local",
    "backends.megatron": "Megatron",
    "backends.sampler": "Sampler",
    "backends.vllm": "Vllm",
    "config": "Outline Role given opt",
    "environments": "Done",
    "rewards": "Reward",
    "state": "Batch Grads Key Max Min Node Params Sampling Sum TrainState Weighted node tree",
    "steps": "adamw aggregate chain clip_by_global_norm cosine cross_entropy entropy gae kl_to_reference linear loss "
    "minibatches ppo_clip sgd token_mean value_clip",
    "testing": "Mock MockRollout check_advantage check_backend check_environment check_loss check_reward "
    "check_rollout compare_backends compare_loss tiny_batch",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
