"""Steps of algorithms in float64, from their papers and from nothing of the project: model, losses, optimizer."""

import math

import torch
from torch.nn import functional as F


class Model:
    """A Qwen3 with AdamW, written out. Its parameters and the optimizer's averages are float64.

    Args:
        params: the initial parameters by name.
        rate: the learning rate as a function of the number of updates before.
    """

    def __init__(self, params, rate=None, *, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, clip_grad=1.0):
        self.params = {name: t.detach().double().requires_grad_() for name, t in params.items()}
        self.rate, self.betas, self.eps, self.decay, self.most = rate, betas, eps, weight_decay, clip_grad
        self.first = {name: torch.zeros_like(t) for name, t in self.params.items()}
        self.second = {name: torch.zeros_like(t) for name, t in self.params.items()}
        self.norms = []

    def hidden(self, rows):
        """The last hidden states of rows of tokens, padded on the right, which no earlier token sees."""
        p = self.params
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        x = p["model.embed_tokens.weight"][tokens]
        x = torch.where(tokens[..., None] == 0, x.detach(), x)  # transformers does not learn the padding token's
        size, length, _ = x.shape
        layer = 0
        while (at := f"model.layers.{layer}.") + "input_layernorm.weight" in p:
            w = {name.removeprefix(at): t for name, t in p.items() if name.startswith(at)}
            layer += 1
            h = norm(x, w["input_layernorm.weight"])
            width = len(w["self_attn.q_norm.weight"])
            q, k, v = (
                (h @ w[f"self_attn.{one}_proj.weight"].T).reshape(size, length, -1, width).transpose(1, 2)
                for one in "qkv"
            )
            q = rotated(norm(q, w["self_attn.q_norm.weight"]))
            k = rotated(norm(k, w["self_attn.k_norm.weight"]))
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            attention = (q @ k.transpose(2, 3) / math.sqrt(width)).masked_fill(~seen, -math.inf).softmax(-1)
            x = x + (attention @ v).transpose(1, 2).reshape(size, length, -1) @ w["self_attn.o_proj.weight"].T
            h = norm(x, w["post_attention_layernorm.weight"])
            gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
            x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        return norm(x, p["model.norm.weight"])

    def distributions(self, rows, temperature=1.0):
        """The log-probabilities of all tokens where each one of a response was drawn, ``[n, V]`` for each row."""
        head = self.params.get("lm_head.weight", self.params["model.embed_tokens.weight"])
        hidden = self.hidden([row.tokens for row in rows])
        return [
            (h[row.start - 1 : len(row.tokens) - 1] @ head.T / temperature).log_softmax(-1)
            for h, row in zip(hidden, rows, strict=True)
        ]

    def log_probs(self, rows, temperature=1.0):
        """The log-probability of each token of the responses."""
        return [drawn(d, row) for d, row in zip(self.distributions(rows, temperature), rows, strict=True)]

    def values(self, rows, last=False):
        """The value before each token of the responses was drawn; with ``last`` the value after the whole row."""
        hidden = self.hidden([row.tokens for row in rows])
        every = (hidden @ self.params["score.weight"].T + self.params.get("score.bias", 0.0))[..., 0]
        ends = [len(row.tokens) for row in rows]
        if last:
            return torch.stack([v[end - 1] for v, end in zip(every, ends, strict=True)])
        return [v[row.start - 1 : end - 1] for v, row, end in zip(every, rows, ends, strict=True)]

    def update(self, loss):
        """An update of AdamW (Loshchilov & Hutter 2019) with gradients clipped by their global norm."""
        grads = torch.autograd.grad(loss, list(self.params.values()), materialize_grads=True)
        size = math.sqrt(sum(float(g.square().sum()) for g in grads))
        rate, (b1, b2) = self.rate(len(self.norms)), self.betas
        self.norms.append(size)
        for (name, p), g in zip(self.params.items(), grads, strict=True):
            g = g * min(1.0, self.most / (size + 1e-6))
            self.first[name] = b1 * self.first[name] + (1 - b1) * g
            self.second[name] = b2 * self.second[name] + (1 - b2) * g.square()
            m, v = self.first[name] / (1 - b1 ** len(self.norms)), self.second[name] / (1 - b2 ** len(self.norms))
            new = p.detach() * (1 - rate * self.decay) - rate * m / (v.sqrt() + self.eps)
            self.params[name] = new.requires_grad_()


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x):
    """Rotary positions with the base 10000, first half against second half."""
    half, length = x.shape[-1] // 2, x.shape[-2]
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def drawn(distribution, row):
    return distribution.gather(1, torch.tensor(row.tokens[row.start :])[:, None])[:, 0]


# Aggregation: the loss of an update batch from the losses of its tokens, a tensor for each row


def averaged(losses, mode="token-mean", scale=None):
    if mode == "token-mean":
        return torch.cat(losses).mean()
    if mode == "token-sum":
        return torch.cat(losses).sum()
    if mode == "seq-mean-token-sum":
        return sum(row.sum() for row in losses) / len(losses)
    if mode == "seq-mean-token-sum-norm":
        return sum(row.sum() for row in losses) / (len(losses) * scale)
    return sum(row.mean() for row in losses) / len(losses)  # seq-mean-token-mean


# KL


def kl_estimate(kind, log_probs, reference):
    d = log_probs - reference
    name = {"kl": "k1", "low_var_kl": "k3", "mse": "k2"}.get(kind.rstrip("+"), kind.rstrip("+"))
    k3 = ((-d).exp() - 1 + d).clamp(max=10.0)  # as in verl
    value = {"k1": d, "k2": d.square() / 2, "k3": k3, "abs": d.abs()}[name]
    if kind.endswith("+"):  # the value of one, the gradient of k2
        return value.detach() + d.detach() * (d - d.detach())
    return value


# Advantages: a tensor for each row


def whitened(rows):
    flat = torch.cat(rows)
    return [(row - flat.mean()) / (flat.var() + 1e-8).sqrt() for row in rows]


def to_go(rewards, gamma=1.0):
    returns, rest = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        rest = rewards[t] + gamma * rest
        returns[t] = rest
    return returns


def in_groups(fn, rewards, rows):
    """A number for each row, from a function of the total rewards and the rows of its group."""
    found = [None] * len(rows)
    for group in dict.fromkeys(row.group for row in rows):
        places = [i for i, row in enumerate(rows) if row.group == group]
        scores = torch.stack([rewards[i].sum() for i in places])
        for place, value in zip(places, fn(scores, [rows[i] for i in places]), strict=True):
            found[place] = value
    return [value.expand(len(reward)) for value, reward in zip(found, rewards, strict=True)]


def standardized(scores, rows=None):
    return (scores - scores.mean()) / (scores.std() + 1e-6)


def centred(scores, rows=None):
    return scores - scores.mean()


def leave_one_out(scores, rows):
    return scores - (scores.sum() - scores) / (len(scores) - 1)


def by_length(scores, rows):
    lengths = torch.tensor([float(row.length) for row in rows])
    return scores - (lengths * scores).sum() / lengths.sum()


def best_of_k(scores, rows):
    second, best = scores.sort().values[-2:]
    return torch.where(scores == best, best - second, 0.0) / (scores.std() + 1e-6)


def group_policy_gradient(rewards, rows):
    found = in_groups(centred, rewards, rows)
    useful = {row.group for row, advantage in zip(rows, found, strict=True) if advantage[0] != 0}
    alpha = len(rows) / sum(row.group in useful for row in rows)
    return [alpha * advantage for advantage in found]


def decoupled(rows, names, weights):
    """GDPO: every reward is compared in its group by itself."""
    parts = []
    for name, weight in zip(names, weights, strict=True):
        own = [torch.tensor([row.parts[name]], dtype=torch.float64) for row in rows]
        parts.append([weight * a[0] for a in in_groups(standardized, own, rows)])
    return whitened([sum(a).expand(row.length) for *a, row in zip(*parts, rows, strict=True)])


def optimal_baseline(rewards, rows, distributions, weights=None):
    """Each place is compared with that place of the rows that have it, by the energy of their gradients so far."""
    energy = []
    for i, (distribution, row) in enumerate(zip(distributions, rows, strict=True)):
        p = distribution.detach().exp()
        own = 1 - 2 * drawn(p, row) + p.square().sum(-1)
        energy.append((own if weights is None else own * weights[i].square()).cumsum(0))
    returns, found = [to_go(r) for r in rewards], []
    longest = {g: sorted((r.length for r in rows if r.group == g), reverse=True) for g in {r.group for r in rows}}
    for row, own in zip(rows, returns, strict=True):
        advantage = own.clone()
        for t in range(row.length):
            if t >= longest[row.group][1]:  # only the longest response goes on
                continue
            both = [(e[t], r[t]) for e, r, o in zip(energy, returns, rows, strict=True)
                    if o.group == row.group and o.length > t]  # fmt: skip
            advantage[t] = own[t] - sum(e * r for e, r in both) / sum(e for e, _ in both)
        found.append(advantage)
    return found


def generalised(rewards, values, gamma, lam):
    """GAE: the whitened advantages, and the returns that the critic learns."""
    found = []
    for reward, value in zip(rewards, values, strict=True):
        after = torch.cat([value[1:], value.new_zeros(1)])
        found.append(to_go(reward + gamma * after - value, gamma * lam))
    return whitened(found), [a + v for a, v in zip(found, values, strict=True)]


# Losses of policies: a tensor for each row


def ppo_clip(new, old, a, low, high, cap=3.0):
    ratio = (new - old).exp()
    plain = -torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    return torch.where(a < 0, torch.min(plain, -cap * a), plain)


def gspo(new, old, a, low, high):
    s = (new - old).mean().exp()
    return -torch.min(s * a, s.clamp(1 - low, 1 + high) * a)


def sapo(new, old, a, low, high):
    tau = torch.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau * torch.sigmoid(tau * ((new - old).exp() - 1))


def cispo(new, old, a, low, high):
    return -(new - old).exp().clamp(1 - low, 1 + high).detach() * a * new


def plain(new, old, a, low, high):
    return -a * new


def dro(new, old, a, low, high, beta=0.3):
    return -(a * new - beta / 2 * (new - old).square())


def dppo(distance):
    def loss(new, old, a, low, high):
        p, q = new.detach().exp(), old.exp()
        wrong = torch.where(a > 0, (p > q) & (distance(p, q) > high), (p < q) & (distance(p, q) > low))
        return torch.where(wrong, 0.0, -a * (p / q).clamp(max=20.0) * new)

    return loss


def total_variation(p, q):
    return (p - q).abs()


def binary_kl(p, q):
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def geo_mean(new, old, a, low, high):
    """One advantage for the row; the loss of the row stands at each of its tokens."""
    d = new - old
    ratio = torch.where(a > 0, torch.min(d, d.clamp(-low, high)), torch.max(d, d.clamp(-low, high))).mean().exp()
    return (-a.mean() * ratio).expand(len(a))


POLICY_LOSSES = {
    "ppo_clip": ppo_clip, "gspo": gspo, "sapo": sapo, "cispo": cispo, "gpg": plain, "reinforce": plain, "dro": dro,
    "dppo_tv": dppo(total_variation), "dppo_kl": dppo(binary_kl), "geo_mean": geo_mean,
}  # fmt: skip


def covariance(new, advantages):
    x, y = torch.cat(new).detach(), torch.cat(advantages)
    return (x - x.mean()) * (y - y.mean())


def largest(values, share, rows):
    """Which tokens have the largest values, by row, with all that are as large as the last of them."""
    last = values.topk(max(1, int(share * len(values)))).values[-1]
    return (values > last - 1e-9).split([len(row) for row in rows])


def clip_cov(new, old, advantages, low, high, lowest, highest):
    """Every token whose covariance lies between the bounds, unless it is clipped, has no gradient."""
    ratio, a = (torch.cat(new) - torch.cat(old)).detach().exp(), torch.cat(advantages)
    free = -a * ratio.clamp(1 - low, 1 + high) <= -a * ratio
    c = covariance(new, advantages)
    out = ((c > lowest) & (c < highest) & free).split([len(row) for row in new])
    parts = zip(out, new, old, advantages, strict=True)
    return [torch.where(o, 0.0, ppo_clip(n, q, a, low, high, math.inf)) for o, n, q, a in parts]


def kl_cov(new, old, advantages, share, weight):
    chosen = largest(covariance(new, advantages), share, new)
    parts = zip(chosen, new, old, advantages, strict=True)
    return [-a * (n - q).exp() + torch.where(c, weight * (n - q).abs(), 0.0) for c, n, q, a in parts]


def of_highest_entropy(distributions, advantages, share):
    """Advantages of the tokens of the highest entropy alone."""
    entropies = torch.cat([-(d.exp() * d).sum(-1) for d in distributions]).detach()
    kept = largest(entropies, share, advantages)
    return [torch.where(k, a, 0.0) for k, a in zip(kept, advantages, strict=True)]


# Losses of preferences, from the log-probabilities of each row


def preference(kind, chosen, rejected, chosen_ref, rejected_ref, beta, smoothing, margin=1.0):
    h = (chosen.sum() - chosen_ref.sum()) - (rejected.sum() - rejected_ref.sum())
    if kind == "dpo":
        return -F.logsigmoid(beta * h)
    if kind == "cdpo":
        return -(1 - smoothing) * F.logsigmoid(beta * h) - smoothing * F.logsigmoid(-beta * h)
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    if kind == "simpo":
        return -F.logsigmoid(beta * (chosen.mean() - rejected.mean()) - margin)
    odds = [m - torch.log1p(-m.exp()) for m in (chosen.mean(), rejected.mean())]
    return -chosen.mean() - beta * F.logsigmoid(odds[0] - odds[1])  # orpo


def kahneman_tversky(ratios, labels, point, beta, good, bad):
    losses = [
        good * (1 - torch.sigmoid(beta * (r - point))) if label else bad * (1 - torch.sigmoid(beta * (point - r)))
        for r, label in zip(ratios, labels, strict=True)
    ]
    return sum(losses) / len(losses)


def divergence(student, teacher, ids, kl):
    """KL of two distributions over the tokens of ``ids`` and all others as one."""
    p, q = (
        torch.cat([d.exp().gather(1, ids), 1 - d.exp().gather(1, ids).sum(1, keepdim=True)], 1)
        for d in (student, teacher)
    )
    p, q = (p, q) if kl == "reverse" else (q, p)
    return (p * (p / q).log()).sum(1)
