"""Probabilities of several tokens at each place: the functions beside a dense softmax, and ``local``'s outputs."""

import pytest
import torch

from verl_fn.backends.hf.logprobs import candidate_logprobs, logprobs_and_entropy, top_logprobs
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.outputs import check_needs
from verl_fn.backends.local import Local
from verl_fn.state import Key
from verl_fn.steps import constant, distill_top_k, loss, sgd
from verl_fn.testing import tiny_batch


@pytest.mark.parametrize("heat", [None, 0.7])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_a_softmax(bias, heat):
    stream = torch.Generator().manual_seed(1)
    hidden, weight, added = (torch.randn(*n, generator=stream).requires_grad_() for n in ((6, 5), (11, 5), (11,)))
    inputs = (hidden, weight, added if bias else None)
    temperature = None if heat is None else torch.full((6,), heat)
    targets, ids = torch.arange(6), torch.randint(0, 11, (6, 4), generator=stream)
    dense = torch.nn.functional.linear(*inputs).div(heat or 1.0).log_softmax(-1)
    own, _ = logprobs_and_entropy(*inputs, targets, temperature, chunk=4)
    found, expected = candidate_logprobs(*inputs, targets, own, ids, temperature), dense.gather(1, ids)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(6, 4, generator=stream)
    leaves = [t for t in inputs if t is not None]
    for g, e in zip(*(torch.autograd.grad((weights * t).sum(), leaves) for t in (found, expected)), strict=True):
        torch.testing.assert_close(g, e)
    values, top = top_logprobs(*inputs, 4, temperature, chunk=4)
    torch.testing.assert_close(values, dense.detach().topk(4).values)
    assert torch.equal(top, dense.topk(4).indices) and not values.requires_grad
    with pytest.raises(ValueError, match="the 12 likeliest tokens are asked for, and the vocabulary has 11"):
        top_logprobs(*inputs, 12)


def test_a_token_that_only_the_teacher_has_is_one_of_the_others():
    """Models with one tokenizer may have vocabularies filled up to different sizes."""
    hidden, weight = torch.randn(2, 5, generator=Key.from_seed(3).generator()), torch.zeros(3, 5)
    own = torch.full((2,), 1 / 3).log()
    found = candidate_logprobs(
        hidden, weight.requires_grad_(), None, torch.tensor([0, 1]), own, torch.tensor([[2, 3], [8, 0]])
    )
    assert found.isneginf().tolist() == [[False, True], [True, False]]
    torch.testing.assert_close(found.exp().sum(-1), torch.full((2,), 1 / 3))
    (gradient,) = torch.autograd.grad(found[~found.isinf()].sum(), weight)
    assert bool(gradient.isfinite().all())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, num_hidden_layers=1)


def test_outputs_of_a_model_do_not_depend_on_the_split(folder):
    batch = tiny_batch(rows=5)
    several, whole = (Local(folder, sgd(constant(0.1)), max_tokens=n) for n in (24, 1000))
    params = several.init(Key.from_seed(0)).params
    top = several.forward(params, batch, ("top_ids_3", "top_logprobs_3", "logprobs"))
    assert sorted(top.by_name) == ["logprobs", "top_ids_3", "top_logprobs_3"]
    batch = batch.with_tokens(candidates=torch.cat([top.top_ids_3, batch.tokens[:, None]], 1))
    ours, others = (
        one.forward(params, batch, ("candidate_logprobs",)).candidate_logprobs for one in (several, whole)
    )
    torch.testing.assert_close(ours, others)
    torch.testing.assert_close(ours, torch.cat([top.top_logprobs_3, top.logprobs[:, None]], 1))
    assert not ours[batch["response_mask"] == 0].any()


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_gradients_are_those_of_the_loss_as_a_function(folder, kl):
    batch, backend = tiny_batch(rows=4), Local(folder, sgd(constant(0.1)), max_tokens=24)
    state = backend.init(Key.from_seed(0))
    top = backend.forward(backend.init(Key.from_seed(1)).params, batch, ("top_ids_2", "top_logprobs_2"))
    batch = batch.with_tokens(candidates=top.top_ids_2, teacher_candidate_log_probs=top.top_logprobs_2)
    grads, metrics = backend.forward_backward(state, batch, distill_top_k(kl))
    other, _ = torch.func.grad(backend.loss_fn(batch, distill_top_k(kl)), has_aux=True)(state.params)
    for name, g in grads.items():
        torch.testing.assert_close(g, other[name], rtol=1e-4, atol=1e-6)
    assert metrics[f"distill/{kl}_kl"].value > 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids - 1, r"candidates of token \d+ are \[-1, -1\]; token ids must be at least 0"),
        (lambda ids: ids[:, 0], r"candidates is torch.int64\[\d+\]; it must be a per-token field with K ids"),
        (lambda ids: ids.float(), r"candidates is torch.float32\[\d+, 2\]"),
    ],
    ids=["negative", "one for each token", "floats"],
)
def test_candidates_that_are_no_ids_are_refused(folder, change, message):
    backend, batch = Local(folder, sgd(constant(0.1)), max_tokens=64), tiny_batch(rows=1)
    batch = batch.with_tokens(candidates=change(torch.zeros(batch.num_tokens, 2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=message):
        backend.forward(backend.init(Key.from_seed(0)).params, batch, ("candidate_logprobs",))


def test_a_backend_or_a_loss_that_cannot_have_them_is_refused(folder):
    with pytest.raises(ValueError, match=r"a loss cannot need \['top_logprobs_2'\]: it has no gradient"):
        check_needs("lm", loss(needs=["top_logprobs_2"])(lambda outputs, batch: None).needs)
    with pytest.raises(ValueError, match=r"this backend gives no \['candidate_logprobs', 'top_ids_2'\]; set actor"):
        check_needs("lm", ["candidate_logprobs", "top_ids_2"], forward=True, candidates=False)
    with pytest.raises(ValueError, match=r"a value model gives .* not \['top_ids_2'\]"):
        check_needs("value", ["top_ids_2"], forward=True)
