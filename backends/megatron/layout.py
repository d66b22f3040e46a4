"""How ranks share a model: tensor, pipeline, context, expert and data parallelism, over Megatron's process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from verl_fn.backends.hf.config import kv_heads
from verl_fn.backends.hf.experts import experts_of
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron.importing import load_bridge


@attrs.frozen
class Sizes:
    """How many ranks share a model in each way.

    Attributes:
        tp: share the matrices of each layer (tensor parallelism).
        pp: share the layers (pipeline parallelism).
        cp: share the tokens of each row (context parallelism).
        ep: share the experts (expert parallelism); the data-parallel and context-parallel ranks do.
        sp: ranks that share matrices also share the tokens between them (Megatron's sequence parallelism).

    Example:
        >>> Sizes(tp=2, pp=2).check(8)
        2
        >>> Sizes(tp=3).check(8)
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: tp x pp x cp = 3 does not divide the 8 ranks of this run
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False

    def check(self, ranks: int) -> int:
        """Returns how many ranks have rows of their own (data parallelism).

        Raises:
            LayoutError: the sizes do not divide the ranks.
        """
        for name in ("tp", "pp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} = {getattr(self, name)} must be at least 1")
        model = self.tp * self.pp * self.cp
        if ranks % model:
            raise LayoutError(f"tp x pp x cp = {model} does not divide the {ranks} ranks of this run")
        if (ranks // self.pp) % self.ep:
            raise LayoutError(f"ep = {self.ep} does not divide the {ranks // self.pp} ranks of a pipeline stage")
        if self.sp and self.tp == 1:
            raise LayoutError("sp shares tokens between the ranks of tensor parallelism, so it needs tp above 1")
        return ranks // model

    def check_model(self, config: Any) -> None:
        """Raises an error for a model that these ranks cannot share.

        Raises:
            LayoutError: they do not divide its heads, layers or experts, or leave a rank without a part of its
                vocabulary.

        Example:
            >>> from types import SimpleNamespace
            >>> Sizes(tp=4).check_model(SimpleNamespace(num_attention_heads=4, num_hidden_layers=2, vocab_size=5))
            Traceback (most recent call last):
            verl_fn.backends.hf.ulysses.LayoutError: tp = 4 is too much for a vocabulary of 5: a rank has no token
        """
        experts = experts_of(config)
        for size, count, name, what in (
            (self.tp, config.num_attention_heads, "tp", "attention heads"),
            (self.tp, kv_heads(config), "tp", "key-value heads"),
            (self.pp, config.num_hidden_layers, "pp", "layers"),
        ):
            if count % size:
                raise LayoutError(f"{name} = {size} does not divide the model's {count} {what}")
        rows = -(-config.vocab_size // self.tp)
        if rows * (self.tp - 1) >= config.vocab_size:
            raise LayoutError(
                f"tp = {self.tp} is too much for a vocabulary of {config.vocab_size}: a rank has no token"
            )
        if self.ep > 1 and not experts:
            raise LayoutError(f"ep = {self.ep}, and the model has no experts")
        if experts and experts % self.ep:
            raise LayoutError(f"ep = {self.ep} does not divide the model's {experts} experts")
        if experts and self.tp > 1 and not self.sp:
            raise LayoutError("a model with experts needs sp = true where tp is above 1, as Megatron does")


@attrs.frozen(eq=False)
class Layout:
    """The place of this rank among all ranks.

    Megatron keeps its process groups in globals of a module. Several backends can live in one process, so each call
    of a backend puts its own groups there; see ``active``.

    Attributes:
        rank: the number of this process.
        size: how many processes there are.
        shares: how many ranks have rows of their own, so into how many parts the rows are dealt.
        groups: Megatron's ``ProcessGroupCollection``.
        globals: the globals of ``megatron.core.parallel_state`` for this layout.
    """

    sizes: Sizes
    rank: int
    size: int
    shares: int
    groups: Any
    globals: dict[str, Any]

    @classmethod
    def of(cls, sizes: Sizes) -> Layout:
        """Returns the layout of all ranks of the default process group, and makes its groups the first time.

        Raises:
            LayoutError: the sizes do not divide the number of ranks.
            MegatronMissing: megatron-core or Megatron-Bridge is missing, or of a version that was not tested.
        """
        load_bridge()
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        size = dist.get_world_size()
        shares = sizes.check(size)
        if (made := _MADE.get((sizes, dist.group.WORLD))) is not None:
            return made
        before = _globals(parallel_state)
        if not _EMPTY:
            _EMPTY.update(before)
        vars(parallel_state).update(_EMPTY)
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.tp,
                pipeline_model_parallel_size=sizes.pp,
                context_parallel_size=sizes.cp,
                expert_model_parallel_size=sizes.ep,
                expert_tensor_parallel_size=1,
                distributed_timeout_minutes=_timeout().total_seconds() / 60,
            )
            groups = ProcessGroupCollection.use_mpu_process_groups()
            made = cls(sizes, dist.get_rank(), size, shares, groups, _globals(parallel_state))
            _MADE[sizes, dist.group.WORLD] = made
            return made
        finally:
            vars(parallel_state).update(before)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Puts this layout's process groups into Megatron's globals inside."""
        from megatron.core import parallel_state

        module = vars(parallel_state)
        # By known names: a search would take longer, and this runs for every tensor.
        before = {name: module[name] for name in self.globals}
        module.update(self.globals)
        try:
            yield
        finally:
            module.update(before)

    # What `agreement` asks of a layout.

    @property
    def share(self) -> int:
        """The number of this rank's part."""
        # Megatron numbers ranks by tp first, then by cp, dp and pp.
        return self.rank // (self.sizes.tp * self.sizes.cp) % self.shares

    @property
    def answering(self) -> range:
        """For each share, the rank that has its outputs: the first one of its last pipeline stage."""
        return range(self.size - self.size // self.sizes.pp, self.size, self.sizes.tp * self.sizes.cp)

    @property
    def tp_rank(self) -> int:
        """The number of this rank among the ranks that share matrices."""
        return self.groups.tp.rank()


_EMPTY: dict[str, Any] = {}
"""Megatron's globals before any layout was made."""
_MADE: dict[Any, Layout] = {}
"""The layouts of this process, whose backends share process groups: there are dozens of groups in each."""


def _globals(module: Any) -> dict[str, Any]:
    """Returns the groups and sizes that Megatron keeps in a module."""
    return {name: value for name, value in vars(module).items() if name.startswith("_") and name[1:].isupper()}


def _timeout() -> timedelta:
    """Returns the timeout of the default process group; Megatron's groups would have 30 minutes."""
    group: Any = dist.group.WORLD
    # A group of only NCCL has none for CPUs.
    device = min(group._device_types, key=lambda device: device.type != "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
