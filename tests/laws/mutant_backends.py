"""Broken training backends, each with the law that it breaks."""

import weakref
from functools import partial

import attrs
import torch

from verl_fn.backends.local import Local
from verl_fn.backends.mock.train import Mock
from verl_fn.state import (
    Grads,
    Key,
    Params,
    Sum,
    Weighted,
    concatenate,
    donate,
    snapshot,
    split_by_tokens,
    tree,
)
from verl_fn.steps import (
    Loss,
    adamw,
    constant,
)

VOCAB = 8


def optimizer(weight_decay=0.0):
    return adamw(constant(0.01), weight_decay=weight_decay)


def mock(cls=Mock, *, max_tokens=24, weight_decay=0.0):
    return cls(VOCAB, optimizer(weight_decay), max_tokens=max_tokens)


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


class MeanPerMicroBatch(Mock):
    """Divides by the weights of each micro-batch and then by the number of micro-batches."""

    def forward_backward(self, state, batch, loss):
        parts = list(split_by_tokens(batch, self.max_tokens))
        results = []
        for part in parts:
            weight = part["loss_weight"]
            mean = part.with_tokens(loss_weight=weight / weight.sum().clamp(min=1e-6))
            results.append(super().forward_backward(state, mean, loss))
        grads = sum((g for g, _ in results[1:]), results[0][0]).scale(1.0 / len(parts))
        return grads, super().forward_backward(state, batch, loss)[1]


class MeanOfMetrics(Mock):
    """Reports the mean over micro-batches of each one's metric."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        parts = [
            super(MeanOfMetrics, self).forward_backward(state, part, loss)[1]
            for part in split_by_tokens(batch, self.max_tokens)
        ]
        means = [part["actor/ppo_kl"].value for part in parts]
        return grads, metrics | {"actor/ppo_kl": Weighted(sum(means) / len(means), 1.0)}


class DropsAMicroBatch(Mock):
    """The last micro-batch's gradient (or the last rank's) never arrives."""

    def forward_backward(self, state, batch, loss):
        parts = list(split_by_tokens(batch, self.max_tokens))
        metrics = super().forward_backward(state, batch, loss)[1]
        return super().forward_backward(state, concatenate(parts[:-1] or parts), loss)[0], metrics


class HalvesGradients(Mock):
    """As an average over two ranks that should have been a sum."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return grads.scale(0.5), metrics


class Ascends(Mock):
    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return grads.scale(-1.0), metrics


class TransposesGradients(Mock):
    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return tree.map_tensors(lambda g: g.t().contiguous(), grads), metrics


class WrongForwardMode(Mock):
    """Its loss as a function has a derivative of its own in forward mode."""

    def loss_fn(self, batch, loss):
        fn = super().loss_fn(batch, loss)

        def doubled(params):
            total, metrics = fn(params)
            return _Doubled.apply(total), metrics

        return doubled


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad

    @staticmethod
    def jvp(ctx, tangent):
        return 2.0 * tangent


class SplitsGroups(Mock):
    """Takes no notice of which rows a loss keeps together."""

    def forward_backward(self, state, batch, loss):
        apart = Loss(tuple(attrs.evolve(term, together=None) for term in loss.terms))
        return super().forward_backward(state, batch, apart)


class IgnoresRowWeight(Mock):
    """Weighs all rows alike."""

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(state, batch.with_rows(row_weight=torch.full((len(batch),), 0.1)), loss)


class ForgetsTheOrder(Mock):
    """Gives the outputs in the order of its micro-batches."""

    def forward(self, params, batch, needs=("logprobs",)):
        rows = torch.cat(split_by_tokens(batch, self.max_tokens).rows)
        return super().forward(params, batch.take(rows), needs)


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


class KeepsAReference(Mock):
    """Holds on to the parameters of its last call, so that no donation finds them alone."""

    def forward_backward(self, state, batch, loss):
        self.last = state.params
        return super().forward_backward(state, batch, loss)


class NeverDonates(Mock):
    """Correct, but the old value stays usable, and twice the memory is used."""

    def apply_update(self, state, grads, *, donate=True):
        return super().apply_update(state, grads, donate=False)


class AlwaysDonates(Mock):
    def apply_update(self, state, grads, *, donate=True):
        return super().apply_update(state, grads)


class WritesThroughReferences(Mock):
    """Spends the old value, but updates its buffers without asking who else holds them."""

    def apply_update(self, state, grads, *, donate=True):
        if not donate:
            return super().apply_update(state, grads, donate=False)
        new, metrics = super().apply_update(state, grads, donate=False)
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
    def apply_update(self, state, grads, *, donate=True):
        new, metrics = super().apply_update(state, grads, donate=donate)
        if metrics["update_skipped"].value:
            new = attrs.evolve(new, scheduler=new.scheduler + 1)
        return new, metrics


class NeverSkips(Mock):
    """Takes what is not finite for zero."""

    def apply_update(self, state, grads, *, donate=True):
        if not donate:
            grads = tree.map_tensors(torch.nan_to_num, grads)
        return super().apply_update(state, grads, donate=donate)


class KeepsQuietAboutSkips(Mock):
    def apply_update(self, state, grads, *, donate=True):
        new, metrics = super().apply_update(state, grads, donate=donate)
        return new, metrics | {"update_skipped": Sum(0)}


class DecaysInTheGradient(Mock):
    """Adds a gradient towards zero that is not the loss's."""

    @property
    def loss_fn(self):
        # Without it the law Derivative, which this mutant also breaks, is not checked.
        raise AttributeError("this backend has no loss_fn")

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        pull = float(batch["loss_weight"].sum())
        return grads + Grads({name: 0.1 * pull * t for name, t in state.params.items()}), metrics


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


class SpeaksOfPrompts(Mock):
    def forward(self, params, batch, needs=("logprobs",)):
        outputs = super().forward(params, batch, needs)
        return tree.map_tensors(lambda t: torch.where(batch["response_mask"] == 0, -1.0, t), outputs)


class RenamesGradients(Mock):
    """Names as a wrapped module has them."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return Grads({f"module.{name}": g for name, g in grads.items()}), metrics

    def apply_update(self, state, grads, *, donate=True):
        own = Grads({name.removeprefix("module."): g for name, g in grads.items()})
        return super().apply_update(state, own, donate=donate)


BACKENDS = [
    (partial(mock, IgnoresParameters), "Persistence"),
    (partial(mock, CachesByTensor), "Donation"),
    (partial(mock, CachesByStep), "Persistence"),
    (partial(mock, WritesToBatch), "Purity"),
    (partial(mock, WritesToParameters), "Purity"),
    (partial(mock, DrawsFromGlobalGenerator), "Purity"),
    (partial(mock, InitFromGlobalGenerator), "Purity"),
    (partial(mock, MeanPerMicroBatch), "Split invariance"),
    (partial(mock, MeanOfMetrics), "Split invariance"),
    (partial(mock, DropsAMicroBatch), "Split invariance"),
    (partial(mock, HalvesGradients), "Derivative"),
    (partial(mock, Ascends), "Derivative"),
    (partial(mock, TransposesGradients), "Derivative"),
    (partial(mock, WrongForwardMode), "Derivative"),
    (partial(mock, SplitsGroups), "Split invariance"),
    (partial(mock, IgnoresRowWeight), "Split invariance"),
    (partial(mock, ForgetsTheOrder), "Purity"),
    (partial(mock, ReusesGradients), "Persistence"),
    (partial(mock, ReusesOutputs), "Persistence"),
    (partial(mock, KeepsAReference), "Donation"),
    (partial(mock, NeverDonates), "Donation"),
    (partial(mock, AlwaysDonates), "Donation"),
    (partial(mock, WritesThroughReferences), "Donation"),
    (partial(mock, AdvancesScheduleOnSkip), "Zero"),
    (partial(mock, NeverSkips), "Zero"),
    (partial(mock, KeepsQuietAboutSkips), "Zero"),
    (partial(mock, DecaysInTheGradient), "Zero"),
    (partial(mock, weight_decay=0.1), "Zero"),
    (partial(mock, ForgetsMoments), "Restore"),
    (partial(mock, ForgetsSchedule), "Restore"),
    (partial(mock, ForgetsKey), "Restore"),
    (partial(mock, RestoresViews), "Restore"),
    (partial(mock, SpoilsWhatItSaves), "Restore"),
    (partial(mock, DropsMomentsOnPlace), "Signature"),
    (partial(mock, SpeaksOfPrompts), "Signature"),
    (partial(mock, RenamesGradients), "Signature"),
]


# As the other backend


class TransposesTheTable(Mock):
    """Keeps its table the other way round, and maps it only when it saves: a round trip does not show it."""

    def save(self, state, folder):
        super().save(_transposed(state), folder)

    def restore(self, folder):
        return _transposed(super().restore(folder))


def _transposed(state):
    return tree.map_tensors(lambda t: t.t().contiguous(), state)


class IgnoresTemperature(Mock):
    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(params, batch.without("temperature"), needs)

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(state, batch.without("temperature"), loss)


LAYOUTS = [
    partial(mock, TransposesTheTable),
    partial(mock, IgnoresTemperature),
    partial(mock, DropsAMicroBatch),
    partial(mock, MeanPerMicroBatch),
    partial(mock, ForgetsMoments),
    partial(mock, ForgetsSchedule),
]
