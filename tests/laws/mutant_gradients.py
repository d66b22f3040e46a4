"""Broken training backends with wrong gradients, metrics or outputs, with the law that each breaks."""

from functools import partial

import attrs
import torch
from mock_backends import WithoutLossFn, mock

from verl_fn.backends.mock import Mock
from verl_fn.state import Grads, Weighted, concatenate, split_by_tokens, tree
from verl_fn.steps import Loss


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


class HalvesGradients(WithoutLossFn):
    """As an average over two ranks that should have been a sum."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return grads.scale(0.5), metrics


class Ascends(WithoutLossFn):
    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return grads.scale(-1.0), metrics


class TransposesGradients(WithoutLossFn):
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


class SpeaksOfPrompts(Mock):
    def forward(self, params, batch, needs=("logprobs",)):
        outputs = super().forward(params, batch, needs)
        return tree.map_tensors(lambda t: torch.where(batch["response_mask"] == 0, -1.0, t), outputs)


class RenamesGradients(Mock):
    """Names as a wrapped module has them."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        return Grads({f"module.{name}": g for name, g in grads.items()}), metrics

    def apply_update(self, state, grads, *, donate=True, **settings):
        own = Grads({name.removeprefix("module."): g for name, g in grads.items()})
        return super().apply_update(state, own, donate=donate, **settings)


class DecaysInTheGradient(WithoutLossFn):
    """Adds a gradient towards zero that is not the loss's."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        pull = float(batch["loss_weight"].sum())
        return grads + Grads({name: 0.1 * pull * t for name, t in state.params.items()}), metrics


class ForgetsAnEntry(WithoutLossFn):
    """Has no gradient for one row of the table, as where a parameter is left out."""

    def forward_backward(self, state, batch, loss):
        grads, metrics = super().forward_backward(state, batch, loss)
        grads["logits"][5] = 0.0
        return grads, metrics


class GradientsAtTemperatureOne(WithoutLossFn):
    """The loss is that of the batch's temperature."""

    def forward_backward(self, state, batch, loss):
        metrics = super().forward_backward(state, batch, loss)[1]
        return super().forward_backward(state, batch.without("temperature"), loss)[0], metrics


class LossFnAtTemperatureOne(Mock):
    def loss_fn(self, batch, loss):
        return super().loss_fn(batch.without("temperature"), loss)


class WeighsByMagnitude(Mock):
    """Takes negative weights for positive ones."""

    def _positive(self, batch):
        return batch.with_tokens(loss_weight=batch["loss_weight"].abs())

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(state, self._positive(batch), loss)

    def loss_fn(self, batch, loss):
        return super().loss_fn(self._positive(batch), loss)


class WeighsRowsByMagnitude(WeighsByMagnitude):
    def _positive(self, batch):
        return batch.with_rows(row_weight=batch["row_weight"].abs())


class FillsZeroWeights(Mock):
    """Takes a batch whose weights are all 0 for one without weights."""

    def forward_backward(self, state, batch, loss):
        if not batch["loss_weight"].any():
            batch = batch.with_tokens(loss_weight=batch["response_mask"])
        return super().forward_backward(state, batch, loss)


GRADIENTS = [
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
    (partial(mock, SpeaksOfPrompts), "Signature"),
    (partial(mock, RenamesGradients), "Signature"),
    (partial(mock, DecaysInTheGradient), "Derivative"),
    (partial(mock, ForgetsAnEntry), "Derivative"),
    (partial(mock, GradientsAtTemperatureOne), "Derivative"),
    (partial(mock, LossFnAtTemperatureOne), "Derivative"),
    (partial(mock, WeighsByMagnitude), "Derivative"),
    (partial(mock, WeighsRowsByMagnitude), "Split invariance"),
    (partial(mock, FillsZeroWeights), "Zero"),
]
