"""Broken training backends with wrong updates and donations, with the law that each breaks."""

from functools import partial

import attrs
import torch
from mock_backends import mock

from verl_fn.backends.mock import Mock
from verl_fn.state import Sum, donate, tree
from verl_fn.steps import adamw, apply_update, chain, clip_by_global_norm, linear, sgd


class KeepsAReference(Mock):
    """Holds on to the parameters of its last call, so that no donation finds them alone."""

    def forward_backward(self, state, batch, loss):
        self.last = state.params
        return super().forward_backward(state, batch, loss)


class NeverDonates(Mock):
    """Correct, but the old value stays usable, and twice the memory is used."""

    def apply_update(self, state, grads, *, donate=True, **settings):
        return super().apply_update(state, grads, donate=False, **settings)


class AlwaysDonates(Mock):
    def apply_update(self, state, grads, *, donate=True, **settings):
        return super().apply_update(state, grads, **settings)


class KeepsItsOwnOptimizer(Mock):
    """Updates by its own optimizer, whatever optimizer the call is given."""

    def apply_update(self, state, grads, *, donate=True, optimizer=None):
        return super().apply_update(state, grads, donate=donate)


class WritesThroughReferences(Mock):
    """Spends the old value, but updates its buffers without asking who else holds them."""

    def apply_update(self, state, grads, *, donate=True, **settings):
        if not donate:
            return super().apply_update(state, grads, donate=False, **settings)
        new, metrics = super().apply_update(state, grads, donate=False, **settings)
        old = attrs.evolve(state)
        _spend(state, grads)
        params, slots = tree.map(_overwritten, (old.params, old.optimizer), (new.params, new.optimizer))
        return attrs.evolve(new, params=params, optimizer=slots), metrics


def _spend(*values):
    for value in values:
        donate(value, "apply_update")


def _overwritten(old, new):
    return old.copy_(new) if isinstance(old, torch.Tensor) else new


class AdvancesScheduleOnSkip(Mock):
    def apply_update(self, state, grads, *, donate=True, **settings):
        new, metrics = super().apply_update(state, grads, donate=donate, **settings)
        if metrics["update_skipped"].value:
            new = attrs.evolve(new, scheduler=new.scheduler + 1)
        return new, metrics


class NeverSkips(Mock):
    """Takes what is not finite for zero."""

    def apply_update(self, state, grads, *, donate=True, **settings):
        if not donate:
            grads = tree.map_tensors(torch.nan_to_num, grads)
        return super().apply_update(state, grads, donate=donate, **settings)


class KeepsQuietAboutSkips(Mock):
    def apply_update(self, state, grads, *, donate=True, **settings):
        new, metrics = super().apply_update(state, grads, donate=donate, **settings)
        return new, metrics | {"update_skipped": Sum(0)}


class SkipsNanOnly(Mock):
    """Takes infinities for zero."""

    def apply_update(self, state, grads, *, donate=True, **settings):
        if not donate and not any(g.isnan().any() for g in grads.values()):
            grads = tree.map_tensors(lambda g: torch.nan_to_num(g, posinf=0.0, neginf=0.0), grads)
        return super().apply_update(state, grads, donate=donate, **settings)


class ChangesGradients(Mock):
    """Applies other gradients than those that it was given, and donates both."""

    def change(self, g):
        raise NotImplementedError

    def apply_update(self, state, grads, *, donate=True, **settings):
        changed = tree.map_tensors(self.change, grads)
        if donate:
            _spend(grads)
        return super().apply_update(state, changed, donate=donate, **settings)


class AscendsInTheUpdate(ChangesGradients):
    def change(self, g):
        return -g


class ClipsElements(ChangesGradients):
    """Clips each element instead of the norm."""

    def change(self, g):
        return torch.where(g.isfinite(), g.clamp(-0.05, 0.05), g)


class AppliesAnother(Mock):
    """Applies another optimizer than its own."""

    applied = None

    def apply_update(self, state, grads, *, donate=True, optimizer=None):
        return apply_update(optimizer or self.applied, state, grads, donate=donate)


class NeverClips(AppliesAnother):
    applied = chain(clip_by_global_norm(1e9), sgd(0.1))


class IgnoresTheSchedule(AppliesAnother):
    applied = adamw(0.01, weight_decay=0.0)


CLIPPED = chain(clip_by_global_norm(0.1), sgd(0.1))
DECAYING = adamw(linear(0.01, total_steps=1000), weight_decay=0.0)


UPDATES = [
    (partial(mock, KeepsAReference), "Donation"),
    (partial(mock, NeverDonates), "Donation"),
    (partial(mock, AlwaysDonates), "Donation"),
    (partial(mock, WritesThroughReferences), "Donation"),
    (partial(mock, AdvancesScheduleOnSkip), "Zero"),
    (partial(mock, NeverSkips), "Zero"),
    (partial(mock, KeepsQuietAboutSkips), "Zero"),
    (partial(mock, SkipsNanOnly), "Zero"),
    (partial(mock, AscendsInTheUpdate), "Update"),
    (partial(mock, NeverClips, tx=CLIPPED), "Update"),
    (partial(mock, ClipsElements, tx=CLIPPED), "Update"),
    (partial(mock, IgnoresTheSchedule, tx=DECAYING), "Update"),
    (partial(mock, KeepsItsOwnOptimizer), "Update"),
    (partial(mock, tx=adamw(0.01, weight_decay=0.1)), "Zero"),
]
