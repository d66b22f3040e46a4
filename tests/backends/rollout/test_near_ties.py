"""Draws that rounding could have decided otherwise: told, counted by row, and kept together at a cut."""

import torch

from verl_fn.backends.draws import Draws
from verl_fn.backends.protocol import Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, pack, requests_for


def drawn(sampling, logits, u):
    draws = Draws(sampling, len(logits), 1e-5)
    draws.draw(torch.tensor([logits]), torch.tensor([[u]], dtype=torch.float64))
    tokens, _, _, near = draws.results()
    return tokens.item(), near.item()


def test_near_ties_are_those_that_noise_decides():
    """1 - u is compared with the CDF, here 1/4, 1/2, 3/4, 1; noise of 1e-5 moves its middle by 5e-6."""
    flat = [0.0] * 4
    assert drawn(Sampling(1), flat, 0.5 + 4e-6) == (1, True)
    assert drawn(Sampling(1), flat, 0.5 - 4e-6) == (2, True)
    assert drawn(Sampling(1), flat, 0.5 + 6e-6) == (1, False)
    assert drawn(Sampling(1), flat, 0.5 - 6e-6) == (2, False)
    assert drawn(Sampling(1), flat, 0.6) == (1, False)
    assert drawn(Sampling(1, temperature=0.1), flat, 0.5 + 4e-5) == (1, True)
    assert drawn(Sampling(1), flat, 0.0) == (3, False)
    assert drawn(Sampling(1), flat, 1 - 2.0**-53) == (0, False)


def test_near_ties_of_greedy_and_cuts():
    greedy, pair, most = Sampling(1, temperature=0.0), Sampling(1, top_k=2), Sampling(1, top_p=0.75)
    assert drawn(greedy, [0.0, 1.0, 1.0 - 1e-5], 0.3) == (1, True)
    assert drawn(greedy, [0.0, 1.0, 1.0 - 1e-4], 0.3) == (1, False)
    assert drawn(pair, [2.0, 1.0, 1.0 - 1e-5], 0.9) == (0, True)
    assert drawn(pair, [2.0, 1.0, 1.0 - 1e-4], 0.9) == (0, False)
    probs = lambda *p: torch.tensor(p).log().tolist()  # noqa: E731
    assert drawn(most, probs(0.5, 0.25 - 1e-6, 0.2, 0.05), 0.9) == (0, True)
    assert drawn(most, probs(0.5, 0.24, 0.2, 0.06), 0.9) == (0, False)
    assert drawn(most, probs(0.5, 0.26, 0.2, 0.04), 0.001) == (1, False)


def test_a_cut_to_more_tokens_than_there_are_cuts_none():
    for sampling in (Sampling(1, top_k=50), Sampling(1, top_k=3), Sampling(1, top_k=50, top_p=0.999)):
        for u in (0.1, 0.5, 0.9):
            assert drawn(sampling, [0.0, 1.0, 2.0], u) == drawn(Sampling(1), [0.0, 1.0, 2.0], u)


def test_ties_at_a_cut_are_kept_whole():
    """Equals are all kept: no order among them could be told apart from noise."""
    draws = Draws(Sampling(1, top_k=1), 3, 1e-5)
    draws.draw(torch.tensor([[1.0, 1.0, 0.0]] * 2), torch.tensor([[0.2], [0.8]]).double())
    tokens, log_probs, _, near = draws.results()
    assert tokens.tolist() == [1, 0] and near.all()
    assert torch.allclose(log_probs, torch.tensor(0.5).log())


def test_near_ties_are_counted_by_row(tiny):
    """A flat model has a boundary every 1/13; at temperature 0 every one of its draws is a tie."""
    flat = Sampler(tiny)
    flat.publish(0, Weights.of({name: torch.zeros(shape) for name, shape in flat.decoder.shapes.items()}))
    batch, plain = (
        pack(flat.generate(requests_for([[1], [1, 4]], sampling, Key.from_seed(7))))
        for sampling in (Sampling(5, temperature=0.0), Sampling(5))
    )
    assert batch["near_ties"].tolist() == (batch.lengths - batch["prompt_length"]).tolist()
    assert plain["near_ties"].tolist() == [0, 0]


def test_a_kernel_draws_and_exact_log_probs_are_the_trainers():
    """A draw from logits that are not finite names no token, and its log-prob is of none."""
    kernel = lambda logits, u, temperature, noise: (torch.tensor([1, 3]), u.float(), u > 0.5)  # noqa: E731
    exact = lambda logits, tokens: logits.gather(1, tokens[:, None])[:, 0]  # noqa: E731
    logits, u = torch.tensor([[0.0, 2.0, 0.0], [1.0, 1.0, 5.0]]), torch.tensor([[0.2], [0.8]]).double()
    draws = Draws(Sampling(1), 3, 1e-5, exact, kernel)
    assert draws.draw(logits, u).tolist() == draws.draw(logits, u).tolist() == [1, 3]
    tokens, log_probs, full, near = draws.results()
    assert tokens.tolist() == [1, 3] * 2 and near.tolist() == [False, True] * 2
    assert log_probs.tolist() == full.tolist() == [2.0, 5.0] * 2
    greedy = Draws(Sampling(1, temperature=0.0), 3, 1e-5, exact, kernel)
    assert greedy.draw(logits, u).tolist() == [1, 2]
