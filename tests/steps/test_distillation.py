"""Distillation: on average over all tokens that a student can draw, its gradient is that of the divergence."""

import math

import pytest
import torch

from verl_fn.state import Batch, TokenOutputs
from verl_fn.steps import distill, distill_top_k
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


@pytest.mark.parametrize(("kl", "loss"), [("reverse", 3.25), ("forward", (math.exp(-3) + 2 + math.exp(2) - 3) / 2)])
def test_the_metrics_are_the_loss_and_the_sampled_reverse_divergence(kl, loss):
    """The student is 3 nats above its teacher at one token and 2 below at another; the last is of no response."""
    fields = {"response_mask": [[1.0, 1.0, 0.0]], "loss_weight": [[0.5, 0.5, 0.0]]}
    batch = Batch.from_rows([[1, 2, 3]], fields | {"teacher_log_probs": [[-4.0, -1.0, -9.0]]})
    _, metrics = distill(kl)(TokenOutputs({"logprobs": torch.tensor([-1.0, -3.0, -1.0])}), batch)
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx({"distill/loss": loss, "distill/reverse_kl": 0.5}, rel=1e-6)


def test_other_divergences_are_refused():
    for make in (distill, distill_top_k):
        with pytest.raises(ValueError, match="kl is 'jensen'; it must be reverse or forward"):
            make("jensen")


def two_models(vocabulary=9, places=5):
    """Log-probs of a teacher, and logits of a student with a gradient, in float64."""
    stream = torch.Generator().manual_seed(8)
    teacher, student = (
        2.0 * torch.randn(places, vocabulary, generator=stream, dtype=torch.float64) for _ in range(2)
    )
    return teacher.log_softmax(-1), student.requires_grad_()


def top_k_values(kl, count, teacher, student):
    top = teacher.topk(count, -1)
    batch = Batch.from_rows(
        [[7]] * len(teacher), {n: [[1.0]] * len(teacher) for n in ("response_mask", "loss_weight")}
    )
    batch = batch.with_tokens(teacher_candidate_log_probs=top.values)
    outputs = TokenOutputs({"candidate_logprobs": student.log_softmax(-1).gather(-1, top.indices)})
    return distill_top_k(kl)(outputs, batch)


def exact_divergence(kl, teacher, student):
    s = student.log_softmax(-1)
    return {"reverse": s.exp() * (s - teacher), "forward": teacher.exp() * (teacher - s)}[kl].sum(-1)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_with_the_whole_vocabulary_it_is_the_divergence(kl):
    teacher, student = two_models()
    values, metrics = top_k_values(kl, 9, teacher, student)
    exact = exact_divergence(kl, teacher, student)
    torch.testing.assert_close(values, exact, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(v.sum(), student, retain_graph=True)[0] for v in (values, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    found = {name: metric.value for name, metric in metrics.items()}
    total, mean = float(exact.sum().detach()), float(exact.mean().detach())
    expected = {"distill/loss": total, f"distill/{kl}_kl": mean, "distill/teacher_mass": 1.0}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_more_tokens_come_nearer_to_the_divergence_and_equal_models_are_at_0(kl):
    teacher, student = two_models()
    exact = exact_divergence(kl, teacher, student)
    before = torch.zeros(5, dtype=torch.float64)
    for count in range(1, 9):
        values, _ = top_k_values(kl, count, teacher, student)
        assert bool((values >= before - 1e-12).all() and (values <= exact + 1e-12).all())
        before = values
    same = teacher.clone().requires_grad_()
    values, _ = top_k_values(kl, 3, teacher, same)
    (gradient,) = torch.autograd.grad(values.sum(), same)
    assert float(values.detach().abs().max()) < 1e-12 and float(gradient.abs().max()) < 1e-12


def test_the_rest_counts():
    """A student that agrees on the candidates' shares among themselves, but not on their mass, is not at 0."""
    teacher = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    student = torch.tensor([[0.4, 0.2, 0.4]], dtype=torch.float64).log()
    assert float(top_k_values("forward", 2, teacher, student)[0]) > 0.1


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_a_candidate_that_the_student_lacks_is_one_of_the_others(kl):
    teacher = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    batch = Batch.from_rows([[7]], {"response_mask": [[1.0]], "loss_weight": [[1.0]]})
    results = []
    for given in ([0.4, 0.3, 0.0], [0.4, 0.3]):
        student = torch.tensor([given], dtype=torch.float64).log().requires_grad_()
        known = batch.with_tokens(teacher_candidate_log_probs=teacher[:, : len(given)])
        values, metrics = distill_top_k(kl)(TokenOutputs({"candidate_logprobs": student}), known)
        (gradient,) = torch.autograd.grad(values.sum(), student)
        results.append((values.detach(), gradient[:, :2], metrics["distill/teacher_mass"].value))
        assert not gradient[:, 2:].any()
    torch.testing.assert_close(*results)
