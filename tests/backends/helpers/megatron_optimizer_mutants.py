"""Ways to use Megatron's own optimizer that are broken."""

import contextlib

import attrs

from verl_fn.backends.megatron import Megatron, executor
from verl_fn.backends.megatron.distributed_optimizer import Distributed


class Broken(Megatron):
    """Updates with ``cls``."""

    cls = Distributed

    def _built(self):
        real, executor.Distributed = executor.Distributed, self.cls
        try:
            return super()._built()
        finally:
            executor.Distributed = real


class OwnMoments(Broken):
    """Lets Megatron's optimizer keep moments of its own, beside those of the state."""

    class cls(Distributed):
        def _lent(self, adam, params, lr):
            kept = self.__dict__.setdefault("kept", {})
            for name, moments in {"exp_avg": adam.exp_avg, "exp_avg_sq": adam.exp_avg_sq}.items():
                kept.setdefault(name, {leaf: t.clone() for leaf, t in moments.items()})
            return super()._lent(attrs.evolve(adam, **kept), params, lr)


class FirstLearningRate(Broken):
    """Keeps the learning rate that Megatron's optimizer was made with."""

    class cls(Distributed):
        def _lent(self, adam, params, lr):
            return super()._lent(adam, params, self.adamw.schedule(0))


class FirstPosition(Broken):
    """Corrects the bias of moments as in the first update, as a resume without the count does."""

    class cls(Distributed):
        def _lent(self, adam, params, lr):
            return super()._lent(attrs.evolve(adam, count=0), params, lr)


class KeepsTensors(Broken):
    """Leaves the state's tensors in Megatron's optimizer."""

    class cls(Distributed):
        @contextlib.contextmanager
        def _lent(self, adam, params, lr):
            with super()._lent(adam, params, lr):
                yield
            for name, shard in self.shards.items():
                shard.tensor.data = params[name]


class StaleBuffer(Broken):
    """Takes Megatron's buffer for that of the state before, of which the step has overwritten a part."""

    class cls(Distributed):
        def update(self, grads, state, params, update):
            made = dict(self.resident._made_from)
            result = super().update(grads, state, params, update)
            self.resident._made_from.update(made)
            return result


class NormOfTheFirstRank(Broken):
    """Leaves the parts of parameters that all ranks hold out of the norm, but for those of the first rank."""

    class cls(Distributed):
        @classmethod
        def of(cls, *args):
            made = super().of(*args)
            for name, shard in made.shards.items():
                if made.resident.pieces[name].replicated:
                    shard.tensor.tensor_model_parallel = False
            return made
