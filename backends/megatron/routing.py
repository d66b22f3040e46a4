"""Replay of expert routing: each token goes to the same experts in a later pass as in an earlier one.

A router picks the experts of a token by its largest logits. Where two are close, rounding or an update decides, and a
token that goes to other experts gets another log-probability. With replay (routing replay of Zheng et al. 2025,
arXiv 2507.18071) the pass that computes ``old_log_probs`` records the experts, and updates use them. The weights of
the experts are still computed by the router, so it keeps its gradient.

A recording is a field of the batch, ``routed_experts``, ``[T, L, k]``: for each token and each layer with experts, in
the order of the layers, the numbers of the k experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from verl_fn.backends.agreement import Share, gathered
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.experts import recorded_dtype
from verl_fn.backends.megatron.rows import ROUTED, MicroBatch
from verl_fn.state import Batch
from verl_fn.state.batch import entries_of


@attrs.frozen(eq=False)
class Routers:
    """The routers of this rank's layers.

    Attributes:
        replays: Megatron's ``RouterReplay`` of each router, in the order of the layers.
        places: the number of each among all layers with experts.
        layers: how many layers with experts the model has.
        topk: how many experts a token goes to.
        experts: how many experts a layer has.
    """

    replays: tuple[Any, ...]
    places: tuple[int, ...]
    layers: int
    topk: int
    experts: int

    @classmethod
    def of(cls, model: Any) -> Routers:
        """Returns the routers of Megatron's model; all ranks call it together.

        Raises:
            ModelError: its routers pick experts by a function that cannot replay.
        """
        config = model.config
        if config.moe_router_fusion:
            raise ModelError(
                "router_replay needs routers that ask what to replay: leave moe_router_fusion out of "
                "override_transformer_config"
            )
        routers = [m for m in model.modules() if getattr(m, "router_replay", None) is not None]
        everywhere = sorted({number for rank in gathered([m.layer_number for m in routers]) for number in rank})
        places = tuple(everywhere.index(m.layer_number) for m in routers)
        replays = tuple(m.router_replay for m in routers)
        return cls(replays, places, len(everywhere), config.moe_router_topk, config.num_moe_experts)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a recording."""
        return recorded_dtype(self.experts)

    def check(self, batch: Batch) -> None:
        """Raises ValueError for a batch whose recording is not one of this model."""
        if ROUTED not in batch.per_token:
            return
        routed, expected = batch[ROUTED], [batch.num_tokens, self.layers, self.topk]
        if list(routed.shape) != expected or routed.dtype.is_floating_point:
            raise ValueError(
                f"{ROUTED} is {routed.dtype}{list(routed.shape)}, and this model's is {self.dtype}{expected}; write "
                f"what its own forward gives for {ROUTED!r} into the batch"
            )
        # As a long integer: torch compares uint8 with 256 as if it were 0.
        numbers = routed.long()
        outside = (numbers < 0) | (numbers >= self.experts)
        if bool(outside.any()):
            token, layer = outside.nonzero()[0, :2].tolist()
            raise ValueError(
                f"{ROUTED}: token {token} of the batch goes to the experts {routed[token, layer].tolist()} in layer "
                f"{layer} of the layers with experts; experts have the numbers 0 to {self.experts - 1}"
            )

    @contextlib.contextmanager
    def in_use(self, *, record: bool) -> Iterator[Routing]:
        """Yields the routing of one call of the backend, and leaves nothing behind.

        Args:
            record: whether to record the experts of micro-batches that have no recording to replay.
        """
        try:
            yield Routing(self, record, {})
        finally:
            for replay in self.replays:
                replay.clear_router_replay_action()
                replay.clear_indices()


@attrs.frozen(eq=False)
class Routing:
    """What routers do during one call of a backend.

    Attributes:
        routers: of this rank.
        record: whether to record.
        recorded: the experts of this rank's tokens and layers, ``[t, L', k]``, by the number of the micro-batch.
    """

    routers: Routers
    record: bool
    recorded: dict[int, Int[Tensor, "t l k"]]

    @contextlib.contextmanager
    def of(self, number: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Lets routers replay or record inside, where the forward pass of a micro-batch runs.

        Backward passes run outside of it; with checkpointing they compute layers again. They replay in the order of
        the forward passes, as the schedules without several chunks a stage do.
        """
        from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

        replays, routed = self.routers.replays, micro_batch.routed
        for replay, place in zip(replays, self.routers.places, strict=True):
            if routed is not None:
                replay.set_target_indices(routed[:, place].long())
                replay.set_router_replay_action(Action.REPLAY_FORWARD)
            elif self.record:
                replay.set_router_replay_action(Action.RECORD)
        yield
        if routed is not None:
            for replay in replays:
                replay.set_router_replay_action(Action.REPLAY_BACKWARD)
        elif self.record and replays:
            self.recorded[number] = torch.stack([replay.get_recorded_indices() for replay in replays], 1)

    def whole(self, share: Share[MicroBatch], batch: Batch) -> Int[Tensor, "T L k"]:
        """Returns the recording of a whole batch, on every rank and on the CPU; all ranks call it together.

        Each number was recorded by one rank, so adding up the bytes of all ranks puts them together.
        """
        routers, device = self.routers, share.staged[0].tokens.device
        whole = torch.zeros(batch.num_tokens, routers.layers, routers.topk, dtype=routers.dtype, device=device)
        places = torch.tensor(routers.places, dtype=torch.int64, device=device)
        for number, (rows, micro_batch) in enumerate(share):
            if rows and routers.places:
                tokens = entries_of(batch.cu_seqlens, torch.tensor(rows))[1].to(device)
                assert micro_batch.routed_tokens is not None
                routed = micro_batch.routed_tokens >= 0
                at = tokens[micro_batch.routed_tokens[routed]]
                whole[at[:, None], places] = self.recorded[number][routed].to(routers.dtype)
        dist.all_reduce(whole.view(torch.uint8))
        return whole.cpu()
