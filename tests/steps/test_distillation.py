"""Distillation: on average over all tokens that a student can draw, its gradient is that of the divergence."""

import pytest
import torch

from verl_fn.state import Batch, TokenOutputs
from verl_fn.steps import distill
from verl_fn.testing import compare_loss, tiny_batch


def with_teacher(key):
    batch = tiny_batch(key)
    return batch.with_tokens(teacher_log_probs=batch["ref_log_prob"])


def of_reverse(outputs, row):
    return 0.5 * (outputs.logprobs - row["teacher_log_probs"]) ** 2


def of_forward(outputs, row):
    ratio = torch.exp(row["teacher_log_probs"] - outputs.logprobs)
    return ratio - 1 - torch.log(ratio)


@pytest.mark.parametrize(("kl", "reference"), [("reverse", of_reverse), ("forward", of_forward)])
def test_values_and_gradients(kl, reference):
    compare_loss(distill(kl), reference, with_teacher)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_the_mean_gradient_is_that_of_the_divergence(kl):
    """Every token of a vocabulary of 7 is a row of its own, weighted by its probability under the student."""
    stream = torch.Generator().manual_seed(4)
    logits, of_teacher = (torch.randn(7, generator=stream, dtype=torch.float64) for _ in range(2))
    teacher = of_teacher.log_softmax(0)
    student = logits.clone().requires_grad_()
    exact = {
        "reverse": lambda s: (s.exp() * (s - teacher)).sum(),
        "forward": lambda s: (teacher.exp() * (teacher - s)).sum(),
    }[kl](student.log_softmax(0))
    (expected,) = torch.autograd.grad(exact, student)
    weights = logits.log_softmax(0).exp()
    batch = Batch.from_rows(
        [[i] for i in range(7)],
        {name: [[x] for x in values.tolist()] for name, values in
         {"response_mask": torch.ones(7), "loss_weight": weights, "teacher_log_probs": teacher}.items()},
    )  # fmt: skip
    batch = batch.with_tokens(teacher_log_probs=teacher, loss_weight=weights)
    values, metrics = distill(kl)(TokenOutputs({"logprobs": student.log_softmax(0)}), batch)
    (gradient,) = torch.autograd.grad((weights * values).sum(), student)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    if kl == "forward":
        # The value of k3 is an estimate of the reverse divergence whatever its gradient.
        reverse = (weights * (logits.log_softmax(0) - teacher)).sum()
        torch.testing.assert_close((weights * values).sum().detach(), reverse)
    assert set(metrics) == {"distill/loss", "distill/reverse_kl"}


def test_other_divergences_are_refused():
    with pytest.raises(ValueError, match="kl is 'jensen'; it must be reverse or forward"):
        distill("jensen")
