"""Megatron backends that are broken in the ways in which others broke silently, and one that is not."""

import attrs
import torch.distributed as dist
from rank_cases import KEY

from verl_fn.backends.megatron import Megatron, executor
from verl_fn.state import Grads


class IgnoresParameters(Megatron):
    """Computes with the parameters that it was given first."""

    def _holding(self, params):
        self.first = getattr(self, "first", params)
        return super()._holding(self.first)


class NormOfOneRank(Megatron):
    """Clips by the norm of this rank's elements."""

    def apply_update(self, state, grads, *, donate=True, **settings):
        real, dist.all_reduce = dist.all_reduce, lambda t, *args, **kwargs: None
        try:
            return super().apply_update(state, grads, donate=donate, **settings)
        finally:
            dist.all_reduce = real


class Averages(Megatron):
    """Divides gradients by the number of micro-batches, as losses of two results do."""

    def _forward_backward(self, state, batch, loss, wanted):
        grads, metrics = super()._forward_backward(state, batch, loss, wanted)
        return grads.scale(1 / len(self._share(batch, wanted, state, loss.together))), metrics


class AliasedGradients(Megatron):
    """Returns views of Megatron's buffer, which the next call overwrites."""

    def _forward_backward(self, state, batch, loss, wanted):
        grads, metrics = super()._forward_backward(state, batch, loss, wanted)
        pieces = self._built().pieces
        return Grads({name: pieces[name].gradient for name in grads}), metrics


class DropsMoments(Megatron):
    """Restores new moments."""

    def restore(self, folder):
        state = super().restore(folder)
        return attrs.evolve(state, optimizer=self._built().optimizer.init(state.params))


class StaleMasters(Megatron):
    """Loads weights into Megatron's buffer, and leaves the masters as they were."""

    def restore(self, folder):
        state, fresh = super().restore(folder), self.init(KEY)
        return attrs.evolve(state, params=fresh.params)


class TwoResults(Megatron):
    """Returns a loss without a number of tokens, which Megatron then multiplies and divides (verl#6609)."""

    def _run(self, *args, **options):
        from megatron.core import pipeline_parallel

        real = pipeline_parallel.get_forward_backward_func

        def schedule_of(*sizes):
            def schedule(*, forward_step_func, **more):
                def step(*given):
                    hidden, loss = forward_step_func(*given)
                    return hidden, lambda hidden: loss(hidden)[::2]

                return real(*sizes)(forward_step_func=step, **more)

            return schedule

        pipeline_parallel.get_forward_backward_func = schedule_of
        try:
            return super()._run(*args, **options)
        finally:
            pipeline_parallel.get_forward_backward_func = real


class MeansOfMeans(Megatron):
    """Takes the mean over the tokens of each rank, and then the mean over ranks (Megatron-LM#4590)."""

    def _share(self, batch, *rest):
        share = super()._share(batch, *rest)
        whole = float(batch["loss_weight"].sum())
        own = sum(float(part.batch["loss_weight"].sum()) for part in share.staged)

        def reweighted(part):
            weight = part.batch["loss_weight"] * (whole / self.layout.shares / own)
            return attrs.evolve(part, batch=part.batch.with_tokens(loss_weight=weight))

        return attrs.evolve(share, staged=[reweighted(part) for part in share.staged])


class ReplaysThePackedOrder(Megatron):
    """Forgets the padding between rows that ranks share (verl#7106), and that they share tokens."""

    def _share(self, batch, *rest):
        share = super()._share(batch, *rest)
        staged = [
            part
            if part.routed is None
            else attrs.evolve(part, routed=part.routed.index_select(0, part.routed_tokens.argsort()))
            for part in share.staged
        ]
        return attrs.evolve(share, staged=staged)


class RoutesBackwardAlone(Megatron):
    """Lets routers decide where layers are computed again."""

    def _run(self, *args, **options):
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        real = RouterReplay.set_router_replay_action

        def forward_alone(replay, action):
            real(replay, None if action is RouterReplayAction.REPLAY_BACKWARD else action)

        RouterReplay.set_router_replay_action = forward_alone
        try:
            super()._run(*args, **options)
        finally:
            RouterReplay.set_router_replay_action = real


class SeveralBuckets(Megatron):
    """Has buffers of several buckets, as Megatron makes of large models. Nothing is broken."""

    def _built(self):
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        real = DistributedOptimizer.compute_full_param_layout
        DistributedOptimizer.compute_full_param_layout = lambda params, size, *rest, **options: real(
            params, 500, *rest, **options
        )
        try:
            built = super()._built()
        finally:
            DistributedOptimizer.compute_full_param_layout = staticmethod(real)
        assert all(len(buffer.buckets) > 2 for buffer in built.built.ddp.buffers)
        return built


class OneBucket(SeveralBuckets):
    """Divides every bucket as if it were the first one (Megatron-LM#5077)."""

    def _built(self):
        real = executor.pieces_of

        def pieces_of(ddp, layout):
            buckets = [bucket for buffer in ddp.buffers for bucket in buffer.buckets]
            offsets = [bucket.offset for bucket in buckets]
            for bucket in buckets:
                bucket.offset = 0
            try:
                return real(ddp, layout)
            finally:
                for bucket, offset in zip(buckets, offsets, strict=True):
                    bucket.offset = offset

        executor.pieces_of = pieces_of
        try:
            return super()._built()
        finally:
            executor.pieces_of = real


class FreesBuffers(Megatron):
    """Frees its buffers before each call that uses them. Nothing is broken."""

    def _holding(self, params):
        self.free_buffers()
        return super()._holding(params)

    def apply_update(self, state, grads, *, donate=True, **settings):
        self.free_buffers()
        return super().apply_update(state, grads, donate=donate, **settings)


class FreesWithoutForgetting(Megatron):
    """Frees its buffers, and takes what is allocated later for what they held."""

    def free_buffers(self):
        for memory in (self._built().resident.weights, self._built().resident.gradients):
            memory.free()

    def _holding(self, params):
        self.free_buffers()
        weights = self._built().resident.weights
        weights.allocate()
        for t, _ in weights.sizes:
            t.untyped_storage().fill_(0)
        return super()._holding(params)
