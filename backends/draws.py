"""Drawing tokens from logits, with the log-probs and near ties of each draw."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from verl_fn.backends.protocol import Sampling

# How much the logits of a row may differ between batches of different sizes; draws within this are near ties.
NOISE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# Probability 1 in fixed point: sums of whole numbers are exact in any order of addition.
ONE = 2.0**50


class Draws:
    """Draws tokens from logits, and records what is needed to compute their log-probs and near ties.

    Args:
        sampling: temperature, top-k and top-p.
        vocab: how many tokens there are; this number, ``nothing``, stands for a draw from NaN.
        noise: how much two computations of a logit may differ.

    Example:
        >>> draws = Draws(Sampling(max_tokens=1, top_k=2), 3, 1e-5)
        >>> draws.draw(torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([[0.4]]).double()).tolist()
        [1]
        >>> tokens, log_probs, full, near = draws.results()
        >>> log_probs.exp(), near
        (tensor([0.5000]), tensor([False]))
    """

    def __init__(self, sampling: Sampling, vocab: int, noise: float) -> None:
        self.temperature, self.nothing = sampling.temperature, vocab
        self.noise = noise / (sampling.temperature or 1.0)
        self.top_k = min(sampling.top_k, vocab) if sampling.top_k > 0 else vocab
        self.top_p = sampling.top_p
        self.cut = self.temperature > 0 and (sampling.top_k > 0 or self.top_p < 1.0)
        self._parts: list[tuple[Tensor, ...]] = []

    def draw(self, logits: Float[Tensor, "n V"], u: Float64[Tensor, "n 1"]) -> Int[Tensor, " n"]:
        """Returns the token of each row at the number ``u`` in [0, 1), and overwrites ``logits``."""
        if self.temperature == 0:
            return self._likeliest(logits)
        probs = torch.softmax(logits if self.temperature == 1 else logits.div_(self.temperature), -1)
        cut_probs, doubtful = self._cut(probs) if self.cut else (probs, None)
        # In the order of token ids, not of likelihood, where rounding could swap two neighbours.
        cdf = _fixed_point(cut_probs).cumsum(-1)
        total = cdf[:, -1:].clone()
        # 1 - u is never 0, so the goal is at least 1, and the first token to reach it has a probability above 0.
        goal = ((1.0 - u) * total).ceil().long()
        token = torch.searchsorted(cdf, goal).clamp(max=self.nothing - 1)
        prob = probs.gather(1, token)
        parts = (token, prob, cdf.gather(1, token), goal, total)
        self._parts.append(parts if doubtful is None else (*parts, doubtful))
        return self._checked(token, prob)

    def results(self) -> tuple[Tensor, ...]:
        """Returns the draws since the last call in order: tokens, log-probs with and without the cut, near ties."""
        parts = [torch.cat(part).flatten().cpu() for part in zip(*self._parts, strict=True)]
        self._parts.clear()
        if self.temperature == 0:
            tokens, probs, near = parts
            return tokens, probs.log(), probs.log(), near
        tokens, probs, above, goal, total = parts[:5]
        # Noise of e in every logit moves the CDF by at most 2 e F (1 - F).
        reach = 2 * self.noise * goal * (1.0 - goal / total)
        near = torch.minimum(above - goal, goal - (above - _fixed_point(probs))) < reach
        if self.cut:
            near = near | parts[5]
        return tokens, (probs * (ONE / total)).log().float(), probs.log(), near

    def _likeliest(self, logits: Float[Tensor, "n V"]) -> Int[Tensor, " n"]:
        best, ranked = logits.topk(2)
        token = ranked[:, :1].clone()
        prob = torch.softmax(logits, -1).gather(1, token)
        self._parts.append((token, prob, best[:, 0] - best[:, 1] < 2 * self.noise))
        return self._checked(token, prob)

    def _checked(self, token: Int[Tensor, "n 1"], prob: Float[Tensor, "n 1"]) -> Int[Tensor, " n"]:
        """Returns the tokens, or ``nothing`` where the logits were NaN."""
        return token.masked_fill(prob.isnan(), self.nothing)[:, 0]

    def _cut(self, probs: Float[Tensor, "n V"]) -> tuple[Float[Tensor, "n V"], Tensor]:
        """Returns the probabilities after top-k and then top-p, and whether noise could change the set of tokens.

        Tokens as likely as the last one in the set are in it too, so that the order of equal ones does not matter.
        """
        best = probs.topk(min(self.top_k + 1, self.nothing)).values
        last = best.new_full((len(best), 1), self.top_k - 1, dtype=torch.int64)
        doubtful = torch.zeros_like(last, dtype=torch.bool)
        if self.top_p < 1.0:
            mass = _fixed_point(best[:, : self.top_k]).cumsum(-1).double()
            mass = mass / mass[:, -1:].clone()
            last = (mass < self.top_p).sum(-1, keepdim=True).clamp(max=self.top_k - 1)
            reach = 2 * self.noise * self.top_p * (1.0 - self.top_p)
            doubtful = ((mass - self.top_p).abs() < reach).any(-1, keepdim=True)
        bound = best.gather(1, last)
        follower = best.gather(1, (last + 1).clamp(max=best.shape[1] - 1))
        swapped = (bound - follower < 2 * self.noise * bound) & (last + 1 < best.shape[1])
        return probs.where(probs >= bound, 0.0), doubtful | swapped


def _fixed_point(probs: Float[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Returns probabilities as whole numbers, in which ``ONE`` stands for 1."""
    return (probs * ONE).long()
