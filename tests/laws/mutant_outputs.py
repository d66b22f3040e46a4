"""Broken training backends whose outputs are of other tokens or another temperature; their gradients fit them."""

from functools import partial

import attrs
import torch
from mock_backends import mock

from verl_fn.backends.mock import Mock
from verl_fn.steps import entropy, value_clip


class Misreads(Mock):
    """Computes with another batch than the one it was given."""

    def read(self, batch):
        raise NotImplementedError

    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(params, self.read(batch), needs)

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(state, self.read(batch), loss)

    def loss_fn(self, batch, loss):
        return super().loss_fn(self.read(batch), loss)


def rolled(batch, by):
    return attrs.evolve(batch, tokens=torch.cat([row.roll(by) for row in batch.rows()]))


class OneTokenLate(Misreads):
    """Gives at each token the output of the next one."""

    def read(self, batch):
        return rolled(batch, -1)


class OneTokenEarly(Misreads):
    """Gives at each token the output of the one before."""

    def read(self, batch):
        return rolled(batch, 1)


class SeesTheFuture(Misreads):
    """Normalises by something of the whole row."""

    def read(self, batch):
        return batch.with_rows(temperature=batch["temperature"] * (1.0 + 0.01 * batch.sum_rows(batch.tokens)))


class IgnoresTemperature(Misreads):
    def read(self, batch):
        return batch.without("temperature")


class MultipliesByTemperature(Misreads):
    def read(self, batch):
        return batch.with_rows(temperature=1.0 / batch["temperature"]) if "temperature" in batch else batch


class AssumesATemperature(Misreads):
    """Has another default than 1."""

    def read(self, batch):
        return batch if "temperature" in batch else batch.with_rows(temperature=torch.full((len(batch),), 0.7))


OUTPUTS = [
    (partial(mock, OneTokenLate), "Outputs"),
    (partial(mock, OneTokenEarly), "Outputs"),
    (partial(mock, SeesTheFuture), "Outputs"),
    (partial(mock, IgnoresTemperature), "Outputs"),
    (partial(mock, MultipliesByTemperature), "Outputs"),
    (partial(mock, AssumesATemperature), "Outputs"),
]
# Each with a loss that needs other outputs than log-probs.
OTHER_OUTPUTS = [
    (partial(mock, OneTokenLate), value_clip()),
    (partial(mock, OneTokenEarly), value_clip()),
    (partial(mock, OneTokenLate), entropy()),
    (partial(mock, OneTokenEarly), entropy()),
    (partial(mock, IgnoresTemperature), entropy()),
]
