"""Drawing tokens from logits, with the log-probs and near ties of each draw, and the samples made of draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from verl_fn.backends.protocol import Request, Sample, Sampling

# How much the logits of a row may differ between batches of different sizes; draws within this are near ties.
NOISE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# Probability 1 in fixed point: sums of whole numbers are exact in any order of addition.
ONE = 2.0**50
# The most logits of one draw, a bound of its memory: it needs 20 bytes for each.
LOGITS = 2**25


class Draws:
    """Draws tokens from logits, and records what is needed to compute their log-probs and near ties.

    Args:
        sampling: temperature, top-k and top-p.
        vocab: how many tokens there are; this number, ``nothing``, stands for a draw from NaN.
        noise: how much two computations of a logit may differ.
        exact: ``(logits, tokens) -> log-probs`` before top-k and top-p, if these are to equal the trainer's in every
            bit; by default they are made of the probabilities that draw.
        kernel: for GPUs, ``hf.kernels.draw``; it draws unless top-k, top-p or the likeliest token are asked for.

    Example:
        >>> draws = Draws(Sampling(max_tokens=1, top_k=2), 3, 1e-5)
        >>> draws.draw(torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([[0.4]]).double()).tolist()
        [1]
        >>> tokens, log_probs, full, near = draws.results()
        >>> log_probs.exp(), near
        (tensor([0.5000]), tensor([False]))
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab: int,
        noise: float,
        exact: Callable[[Tensor, Tensor], Tensor] | None = None,
        kernel: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.temperature, self.nothing = sampling.temperature, vocab
        self.noise = noise / (sampling.temperature or 1.0)
        self.top_k = min(sampling.top_k, vocab) if sampling.top_k > 0 else vocab
        self.top_p = sampling.top_p
        self.cut = sampling.cuts
        self._exact = exact if self.temperature > 0 else None
        self._kernel = kernel if self.temperature > 0 and not self.cut else None
        self._parts: list[tuple[Tensor, ...]] = []

    def draw(self, logits: Float[Tensor, "n V"], u: Float64[Tensor, "n 1"]) -> Int[Tensor, " n"]:
        """Returns the token of each row at the number ``u`` in [0, 1); float32 logits may be overwritten."""
        if self._kernel is not None:
            self._parts.append(self.columns(logits, u[:, 0]))
            return self._parts[-1][0]
        parts = self._drawn(logits.float(), u)
        self._parts.append(parts)
        return self._checked(*(part[:, 0] for part in parts[:2]))

    def columns(self, logits: Float[Tensor, "n V"], u: Float64[Tensor, " n"]) -> tuple[Tensor, ...]:
        """Draws as ``draw`` does, and returns what ``results`` would, on the device of the logits.

        Args:
            logits: in any dtype; float32 ones may be overwritten.
            u: the number in [0, 1) of each row.
        """
        if self._kernel is not None:
            tokens, log_probs, near = self._kernel(logits, u, self.temperature, self.noise)
            if self._exact is not None:
                log_probs = self._exact(logits, tokens.clamp(max=self.nothing - 1))
            return tokens, log_probs, log_probs, near
        size = max(1, LOGITS // logits.shape[1])
        parts = [
            self._drawn(some.float(), of_them)
            for some, of_them in zip(logits.split(size), u[:, None].split(size), strict=True)
        ]
        whole = [torch.cat(part).flatten() for part in zip(*parts, strict=True)]
        return self._checked(whole[0], whole[1]), *self._columns(whole)[1:]

    def results(self) -> tuple[Tensor, ...]:
        """Returns the draws since the last call in order: tokens, log-probs with and without the cut, near ties."""
        parts = [torch.cat(part).flatten().cpu() for part in zip(*self._parts, strict=True)]
        self._parts.clear()
        return tuple(parts) if self._kernel is not None else self._columns(parts)

    def _drawn(self, logits: Float[Tensor, "n V"], u: Float64[Tensor, "n 1"]) -> tuple[Tensor, ...]:
        """Draws, and returns what ``_columns`` needs; the first two are tokens and their probabilities."""
        if self.temperature == 0:
            return self._likeliest(logits)
        whole = logits.clone() if self._exact is not None else logits
        probs = torch.softmax(logits if self.temperature == 1 else logits.div_(self.temperature), -1)
        cut_probs, doubtful = self._cut(probs) if self.cut else (probs, None)
        # In the order of token ids, not of likelihood, where rounding could swap two neighbours.
        cdf = _fixed_point(cut_probs).cumsum(-1)
        total = cdf[:, -1:].clone()
        # 1 - u is never 0, so the goal is at least 1, and the first token to reach it has a probability above 0.
        goal = ((1.0 - u) * total).ceil().long()
        token = torch.searchsorted(cdf, goal).clamp(max=self.nothing - 1)
        prob = probs.gather(1, token)
        parts: tuple[Tensor, ...] = (token, prob, cdf.gather(1, token), goal, total)
        parts += () if doubtful is None else (doubtful,)
        if self._exact is not None:
            parts += (self._exact(whole, token[:, 0])[:, None],)
        return parts

    def _columns(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.temperature == 0:
            tokens, probs, near = parts
            return tokens, probs.log(), probs.log(), near
        tokens, probs, above, goal, total = parts[:5]
        # Noise of e in every logit moves the CDF by at most 2 e F (1 - F).
        reach = 2 * self.noise * goal * (1.0 - goal / total)
        near = torch.minimum(above - goal, goal - (above - _fixed_point(probs))) < reach
        if self.cut:
            near = near | parts[5]
        cut, full = (probs * (ONE / total)).log().float(), probs.log()
        if self._exact is not None:
            full = parts[-1]
            cut = cut if self.cut else full
        return tokens, cut, full, near

    def _likeliest(self, logits: Float[Tensor, "n V"]) -> tuple[Tensor, ...]:
        best, ranked = logits.topk(2)
        token = ranked[:, :1].clone()
        prob = torch.softmax(logits, -1).gather(1, token)
        return token, prob, best[:, 0] - best[:, 1] < 2 * self.noise

    def _checked(self, token: Int[Tensor, " n"], prob: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Returns the tokens, or ``nothing`` where the logits were NaN."""
        return token.masked_fill(prob.isnan(), self.nothing)

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


class Answers:
    """Groups draws by row, and makes the sample of a row that has ended.

    Args:
        requests: are drawn alike; row i belongs to request ``i // n``.

    Example:
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> answers = Answers(requests_for([[5], [6]], Sampling(max_tokens=2), Key.from_seed(0)))
        >>> draws = torch.tensor([7, 8, 2]), torch.zeros(3), torch.zeros(3), torch.zeros(3)
        >>> answers.collect(torch.tensor([1, 0, 1]), draws, torch.tensor([3, 3, 4]))
        >>> sample = answers.sample(1, finished=True)
        >>> sample.tokens.tolist(), sample.versions.tolist()
        ([7, 2], [3, 4])
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests: list[Request] = []
        self._prompts: list[Tensor] = []
        self._parts: dict[int, list[tuple[Tensor, ...]]] = {}
        self.add(requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Adds requests; their rows follow the rows of earlier ones."""
        self._requests += requests
        self._prompts += [torch.tensor(request.prompt) for request in requests]

    def collect(self, rows: Int[Tensor, " d"], draws: Sequence[Tensor], versions: Int[Tensor, " d"]) -> None:
        """Adds draws, in the order of the steps.

        Args:
            rows: the row of each draw.
            draws: for each draw its token, its log-prob with and without the cut, and whether it is a near tie; where
                experts are recorded, also the experts of the token before it.
            versions: for each draw the version of the weights.
        """
        # A stable sort by row groups the draws of each row and keeps their order.
        order = rows.argsort(stable=True)
        present, counts = rows[order].unique_consecutive(return_counts=True)
        columns = [t[order].split(counts.tolist()) for t in (*draws, versions)]
        for row, *part in zip(present.tolist(), *columns, strict=True):
            self._parts.setdefault(row, []).append(tuple(part))

    def sample(
        self, row: int, finished: bool, length: int | None = None, before: Int[Tensor, "p l k"] | None = None
    ) -> Sample:
        """Returns the sample of a row.

        Args:
            finished: whether it ended by itself.
            length: how many of its draws count; by default all.
            before: if experts are recorded, the experts of the prompt's tokens but the last.
        """
        parts = self._parts.pop(row)
        columns = (t[0] if len(t) == 1 else torch.cat(t) for t in zip(*parts, strict=True))
        tokens, log_probs, full, near, *routed, versions = (column[:length] for column in columns)
        sampling = self._requests[0].sampling
        place, number = divmod(row, sampling.n)
        return Sample(
            request=self._requests[place].id,
            number=number,
            prompt=self._prompts[place],
            tokens=tokens,
            log_probs=log_probs,
            full_log_probs=full if sampling.cuts else None,
            mask=torch.ones(len(tokens)),
            versions=versions,
            finish_reason="stop" if finished else "length",
            temperature=sampling.temperature or 1.0,
            near_ties=int(near.sum()),
            routed_experts=None if before is None else torch.cat([before, routed[0], routed[0][-1:]]),
            images=self._requests[place].images,
        )


@attrs.frozen(eq=False)
class Drawn:
    """Draws in the order of the steps.

    Attributes:
        rows: the row of each draw.
        places: the number of tokens of the row before the draw.
        columns: for each draw its token, its log-prob with and without the cut, and whether it is a near tie.
    """

    rows: Tensor
    places: Tensor
    columns: tuple[Tensor, ...]


def last_draws(parts: Sequence[tuple[Drawn, int]]) -> tuple[Drawn, Tensor]:
    """Returns the draws of each row by place, and the version of each.

    vLLM may discard a draw and make it again later, at the same place. Only the last one is returned.

    Args:
        parts: draws, in the order of the steps, with the version of the weights that made them.

    Example:
        >>> t = torch.tensor
        >>> before = Drawn(t([0, 1, 0]), t([4, 7, 5]), (t([10, 20, 11]),))
        >>> after = Drawn(t([0]), t([5]), (t([12]),))
        >>> drawn, versions = last_draws([(before, 3), (after, 4)])
        >>> drawn.rows.tolist(), drawn.columns[0].tolist(), versions.tolist()
        ([0, 0, 1], [10, 12, 20], [3, 4, 3])
    """
    rows, places = (torch.cat([getattr(drawn, name) for drawn, _ in parts]) for name in ("rows", "places"))
    versions = torch.cat([torch.full_like(drawn.rows, version) for drawn, version in parts])
    columns = [torch.cat(column) for column in zip(*(drawn.columns for drawn, _ in parts), strict=True)]
    order = torch.argsort(rows * 2**32 + places, stable=True)
    keys = torch.stack([rows[order], places[order]])
    last = torch.ones(len(order), dtype=torch.bool)
    last[:-1] = (keys[:, 1:] != keys[:, :-1]).any(0)
    kept = order[last]
    return Drawn(rows[kept], places[kept], tuple(column[kept] for column in columns)), versions[kept]
