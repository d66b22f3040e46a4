"""Applies torch.func to a loss: gradients by row, their noise, and a linear prediction of an update's effect.

    python examples/gradients_by_row.py

The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, equation 2.9) is the variance of the gradients of
single rows over the squared norm of their mean: about the batch size, in rows, beyond which more rows help little.
"""

import tempfile

import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.state import Batch, Key, Params
from verl_fn.steps import Loss, aggregate, cross_entropy, sgd

ROWS, RATE = 16, 0.01


def gradients_by_row(backend: Local, params: Params, batch: Batch, loss: Loss) -> Params:
    """Returns the gradient of each row, stacked in a new first dimension.

    The gradient of one row is the gradient of the loss with a weight of zero in all other rows.
    """
    by_row = torch.stack([torch.where(batch.row_ids == row, batch["loss_weight"], 0.0) for row in range(len(batch))])

    def gradient(weights: torch.Tensor) -> Params:
        fn = backend.loss_fn(batch.with_tokens(loss_weight=weights), loss)
        return torch.func.grad(lambda p: fn(p)[0])(params)

    return torch.func.vmap(gradient)(by_row)


def noise_scale(by_row: Params) -> float:
    """Returns the trace of the covariance of the rows' gradients over the squared norm of their mean (unbiased)."""
    # The batch's loss is a mean over rows, so a row's own loss is its share of it times the number of rows.
    rows = torch.cat([len(g) * g.flatten(1) for g in by_row.values()], dim=1).double()
    variance = float(rows.var(dim=0).sum())
    return variance / (float(rows.mean(dim=0).square().sum()) - variance / len(rows))


def main() -> dict[str, float]:
    """Prints the noise scale and both changes of the loss, and returns them."""
    with tempfile.TemporaryDirectory() as folder:
        backend = Local(new_model(folder, chars="abcdefgh", hidden_size=32), sgd(RATE))
        state = backend.init(Key.from_seed(0))
        # Each row repeats one letter, so there is something to learn.
        rows = [[1, *[3 + row % 8] * (4 + row % 3), 2] for row in range(ROWS)]
        batch = Batch.from_rows(rows, {"response_mask": [[0.0] + [1.0] * (len(row) - 1) for row in rows]})
        batch, loss = aggregate(batch, "seq-mean-token-mean"), cross_entropy()
        by_row = gradients_by_row(backend, state.params, batch, loss)

        fn = backend.loss_fn(batch, loss)
        before, predict = torch.func.linearize(lambda params: fn(params)[0], state.params)
        grads, _ = backend.forward_backward(state, batch, loss)
        new, _ = backend.apply_update(state, grads, donate=False)
        step = Params({name: new.params[name] - t for name, t in state.params.items()})
        report = {
            "gradient noise scale, in rows": noise_scale(by_row),
            "sum of the rows' gradients against the batch's, largest gap": max(
                float((by_row[name].sum(0) - g).abs().max()) for name, g in grads.items()
            ),
            "predicted change of the loss": float(predict(step)),
            "actual change of the loss": float(fn(new.params)[0] - before),
        }
    for name, value in report.items():
        print(f"{name}: {value:.6g}")
    return report


if __name__ == "__main__":
    main()
