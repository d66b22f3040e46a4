"""Broken training backends whose results depend on more than the arguments, with the law that each breaks."""

import time
import weakref
from functools import partial

import attrs
import torch
from mock_backends import mock

from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock
from verl_fn.state import Grads, snapshot, tree


class IgnoresParameters(Mock):
    """Computes with the first parameters it ever saw."""

    seen = None

    def _first(self, params):
        self.seen = self.seen or snapshot(params)
        return self.seen

    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(self._first(params), batch, needs)

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(attrs.evolve(state, params=self._first(state.params)), batch, loss)


class CachesByTensor(Mock):
    """Keeps a compute copy, and replaces it only for other tensor objects, so updates in place go unnoticed."""

    of = None

    def _copy(self, params):
        if self.of is None or self.of() is not params["logits"]:
            self.of, self.copy = weakref.ref(params["logits"]), snapshot(params)
        return self.copy

    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(self._copy(params), batch, needs)

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(attrs.evolve(state, params=self._copy(state.params)), batch, loss)


class CachesByStep(Mock):
    """Keeps a compute copy for as long as the step is the same."""

    of = None

    def forward_backward(self, state, batch, loss):
        if self.of != state.step:
            self.of, self.copy = state.step, snapshot(state.params)
        return super().forward_backward(attrs.evolve(state, params=self.copy), batch, loss)


class StaleLocal(Local):
    """Never refreshes its bf16 copy."""

    def _compute_tensors(self, params):
        return dict(self._cast) if self._cast else super()._compute_tensors(params)


class StaleChecksums(Local):
    """Identifies the weights that engines keep by checksums that it took once; ``what`` is ``apart`` or ``kept``."""

    identity, what = None, "apart"

    def weights(self, params):
        source = super().weights(params)
        given = getattr(source, self.what)
        self.identity = self.identity or given.identify()
        return attrs.evolve(source, **{self.what: attrs.evolve(given, identify=lambda: self.identity)})


class StaleTower(StaleChecksums):
    what = "kept"


class WritesToBatch(Mock):
    """Changes a field in place, which has an effect in the first call only."""

    def forward_backward(self, state, batch, loss):
        batch["advantages"].clamp_(-0.5, 0.5)
        return super().forward_backward(state, batch, loss)


class WritesToParameters(Mock):
    def forward(self, params, batch, needs=("logprobs",)):
        params["logits"].clamp_(-1.0, 1.0)
        return super().forward(params, batch, needs)


class DrawsFromGlobalGenerator(Mock):
    """Dropout."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return tree.map_tensors(lambda g: g * (torch.rand(g.shape) > 0.1), grads), metrics


class InitFromGlobalGenerator(Mock):
    def init(self, key):
        state = super().init(key)
        return attrs.evolve(state, params=tree.map_tensors(torch.randn_like, state.params))


class ReusesGradients(Mock):
    """Returns the same buffers at every call."""

    buffers = None

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        self.buffers = self.buffers or dict(snapshot(grads))
        for name, g in grads.items():
            self.buffers[name].copy_(g)
        return Grads(dict(self.buffers)), metrics


class ReusesOutputs(Mock):
    buffers = None

    def forward(self, params, batch, needs=("logprobs",)):
        outputs = super().forward(params, batch, needs)
        if self.buffers is None or len(self.buffers.logprobs) != len(outputs.logprobs):
            self.buffers = outputs
        self.buffers.logprobs.copy_(outputs.logprobs)
        return self.buffers


class SharesAModel(Mock):
    """Puts the parameters where the call of another thread puts its own."""

    params = None

    def _shared(self, params):
        self.params = params
        time.sleep(0.005)  # as long as a model computes, in which another call may come
        return self.params

    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(self._shared(params), batch, needs)

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(attrs.evolve(state, params=self._shared(state.params)), batch, loss)
        self.params = None
        return grads, metrics


class OneCallAtATime(Mock):
    """Fails where a second call comes before the first one is done."""

    busy = False

    def forward(self, params, batch, needs=("logprobs",)):
        if self.busy:
            raise RuntimeError("the model is in use")
        self.busy = True
        time.sleep(0.005)
        outputs = super().forward(params, batch, needs)
        self.busy = False
        return outputs


PURITY = [
    (partial(mock, IgnoresParameters), "Persistence"),
    (partial(mock, CachesByTensor), "Persistence"),
    (partial(mock, CachesByStep), "Persistence"),
    (partial(mock, WritesToBatch), "Purity"),
    (partial(mock, WritesToParameters), "Purity"),
    (partial(mock, DrawsFromGlobalGenerator), "Purity"),
    (partial(mock, InitFromGlobalGenerator), "Purity"),
    (partial(mock, ReusesGradients), "Persistence"),
    (partial(mock, ReusesOutputs), "Persistence"),
    (partial(mock, SharesAModel), "Purity"),
    (partial(mock, OneCallAtATime), "Purity"),
]
