"""Sharded backends that are broken on purpose; ranks tell which law notices."""

import attrs
import torch
from rank_cases import KEY, loss_for, optimizer
from torch.distributed.fsdp import FSDPModule

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.fsdp.sharding import locals_of
from verl_fn.backends.local import Local
from verl_fn.state import Weighted
from verl_fn.steps import bradley_terry
from verl_fn.testing import LawViolation, check_backend, tiny_batch, tiny_pairs
from verl_fn.testing.backend_case import BackendCase
from verl_fn.testing.backends import check_gradients, check_layouts


class IgnoresParameters(Fsdp):
    """Points at the first state that it ever saw."""

    def _pointing_at(self, params):
        self.__dict__.setdefault("first", params)
        return super()._pointing_at(self.first)


class DropsARank(Fsdp):
    """The last rank's rows count for nothing."""

    def _share(self, batch, *rest):
        share = super()._share(batch, *rest)
        if self.layout.rank < self.layout.size - 1 or "loss_weight" not in batch:
            return share

        def silent(staged):
            return attrs.evolve(
                staged, batch=staged.batch.with_tokens(loss_weight=torch.zeros(staged.batch.num_tokens))
            )

        return attrs.evolve(share, staged=[silent(staged) for staged in share.staged])


class Averages(Fsdp):
    """Gradients are divided by the number of ranks, as FSDP does by itself."""

    def _hollow(self, *args):
        model = super()._hollow(*args)
        for module in self._modules.skeleton.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(self.layout.size))
        return model


class NormOfOneRank(Fsdp):
    """Every rank clips by the norm of its own shards."""

    def apply_update(self, state, grads, *, donate=True, **settings):
        new, found = super().apply_update(state, grads, donate=donate, **settings)
        return new, found | {"grad_norm": Weighted(float(self.own_norm), 1.0)}

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        self.own_norm = locals_of(grads).global_norm()
        return grads, found


class AliasedGradients(Fsdp):
    """Gives the same buffers out again while the first are held."""

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        kept = self.__dict__.setdefault("kept", grads)
        for name, g in kept.items():
            g._local_tensor.copy_(grads[name]._local_tensor)
        return kept, found


# Parts of ``check_backend``, for mutants that only its last checks catch.
PARTS = {
    "gradients": lambda case, other: check_gradients(case, case.trained("first")),
    "layouts": lambda case, other: check_layouts(case, other, case.trained("first")),
}


def mutant(folder, name, part=None):
    """Returns the law that a broken backend breaks, of all or of a part."""
    backend, other = globals()[name](folder, optimizer(), max_tokens=24), Local(folder, optimizer(), max_tokens=24)
    try:
        if part is None:
            check_backend(backend, other, loss=loss_for("lm"), tolerance=1e-5)
        else:
            case = BackendCase(backend, loss_for("lm"), tiny_batch(), 1e-5, KEY, get_here)
            PARTS[part](case, attrs.evolve(case, backend=other))
    except LawViolation as error:
        return error.law


class SplitsGroups(Fsdp):
    """Deals rows as if no loss ever kept any together."""

    def _share(self, batch, wanted, state=None, together=None):
        return super()._share(batch, wanted, state)


def split_groups(folder):
    """What a loss of pairs says where a backend splits them: it has a row without its other."""
    backend = SplitsGroups(folder, optimizer(), head="value", max_tokens=30)
    try:
        backend.forward_backward(backend.init(KEY), tiny_pairs(pairs=5), bradley_terry())
    except ValueError as error:
        return str(error)
