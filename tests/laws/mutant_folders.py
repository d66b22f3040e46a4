"""Broken training backends that lose or alter states when they move or save them, with the law that each breaks."""

from functools import partial

import attrs
import torch
from mock_backends import mock

from verl_fn.backends.mock import Mock
from verl_fn.state import Key, Params


class ForgetsMoments(Mock):
    def restore(self, folder):
        state = super().restore(folder)
        return attrs.evolve(state, optimizer=self.optimizer.init(state.params))


class ForgetsSchedule(Mock):
    def restore(self, folder):
        return attrs.evolve(super().restore(folder), scheduler=0)


class ForgetsKey(Mock):
    def restore(self, folder):
        return attrs.evolve(super().restore(folder), rng=Key.from_seed(0))


class RestoresViews(Mock):
    """Restored tables share one buffer, as those read from a file may."""

    def restore(self, folder):
        state = super().restore(folder)
        flat = torch.cat([t.flatten() for t in state.params.values()])
        parts = flat.split([t.numel() for t in state.params.values()])
        views = {name: p.view_as(t) for (name, t), p in zip(state.params.items(), parts, strict=True)}
        return attrs.evolve(state, params=Params(views))


class SpoilsWhatItSaves(Mock):
    def save(self, state, folder):
        super().save(state, folder)
        state.params["logits"].mul_(0.5)


class DropsMomentsOnPlace(Mock):
    def place(self, state, *, params=None, optimizer=None):
        return attrs.evolve(state, optimizer=self.optimizer.init(state.params))


FOLDERS = [
    (partial(mock, ForgetsMoments), "Restore"),
    (partial(mock, ForgetsSchedule), "Restore"),
    (partial(mock, ForgetsKey), "Restore"),
    (partial(mock, RestoresViews), "Restore"),
    (partial(mock, SpoilsWhatItSaves), "Restore"),
    (partial(mock, DropsMomentsOnPlace), "Signature"),
]
