"""Two whole steps of every built-in algorithm, from the config to the parameters, against ``paper`` in float64.

Only draws are taken from the project, and orders of rows where they are random; both are checked. Learning rates are
large, so that ratios leave their clip ranges, and AdamW's epsilon as well, since an update with a tiny one is a sign.
"""

import contextlib
import functools
import re

import attrs
import paper
import pytest
import torch
from safetensors.torch import load_file

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.config import load, make_plan
from verl_fn.config.algorithms import GROUP_ESTIMATORS, POLICY_LOSSES
from verl_fn.data.judged import Judged, TaskPairs
from verl_fn.data.tasks import TASKS
from verl_fn.driver.ranks import local_workers
from verl_fn.rewards import Reward
from verl_fn.runs.state import algorithm_of, initial_state
from verl_fn.state import Key, Params
from verl_fn.steps import sgd

TASK = TASKS["count"]
PROMPTS, LONGEST, HEAT = 4, 6, 0.7
EOS = 2
OPTIM = {"betas": [0.8, 0.95], "eps": 0.1, "weight_decay": 0.1, "clip_grad": 2.0}
ACTOR = {"lr": 0.06, "lr_warmup_steps": 3, "lr_scheduler_type": "linear", "min_lr_ratio": 0.2}
CRITIC = {"lr": 0.03, "lr_warmup_steps": 2, "lr_scheduler_type": "constant", "min_lr_ratio": 0.0, "clip_grad": 3.0}
COMMON = [
    f"data.train_batch_size={PROMPTS}", f"data.max_response_length={LONGEST}", "rollout.n=3",
    f"rollout.temperature={HEAT}", "data.task=count", "driver.num_threads=1", "driver.device=cpu",
    "trainer.total_training_steps=2",
    "algorithm.ppo_mini_batch_size=3", "algorithm.ppo_epochs=2", "actor.ppo_max_token_len_per_gpu=64",
    "critic.ppo_max_token_len_per_gpu=48",
    *(f"actor.optim.{name}={value}" for name, value in (OPTIM | ACTOR).items()),
    *(f"critic.optim.{name}={value}" for name, value in (OPTIM | CRITIC).items()),
]  # fmt: skip


@attrs.define(eq=False)
class Row:
    """Tokens of which those from ``start`` on are a response."""

    tokens: list
    start: int
    group: int = 0
    parts: dict = attrs.field(factory=dict)

    @property
    def length(self):
        return len(self.tokens) - self.start


def score_of(text):
    """A reward that differs between responses, and two more; special tokens count nothing."""
    text = re.sub(r"<\w+>", "", text)
    return {
        "score": sum(place * ord(letter) for place, letter in enumerate(text, 1)) % 97 / 97,
        "long": float(len(text)),
        "odd": float(sum(map(ord, text)) % 2),
    }


def judge(answers):
    return [score_of(answer.text) | {"pred": answer.text} for answer in answers]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models of one layer whose distributions are far from uniform; two of them have value heads."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 24}
    folder, chars = tmp_path_factory.mktemp("models"), TASK.alphabet
    made = {
        name: new_model(folder / name, chars=chars, seed=seed, initializer_range=0.25, **sizes)
        for seed, name in enumerate(("actor", "other", "teacher"), 1)
    }
    for name, base in (("critic", "other"), ("judge", "teacher")):
        backend = Local(made[base], sgd(0.0), head="value")
        state = backend.load_pretrained()
        score = torch.sin(torch.arange(16.0) * len(name))[None] / 3
        params = Params({**state.params, "score.weight": score})
        backend.save(attrs.evolve(state, params=params), folder / name)
    return made | {name: folder / name for name in ("critic", "judge")}


def rate_of(optim, total):
    """Learning rates by hand: a warm-up from 0, then constant or a line down to a share of the rate."""

    def rate(count):
        warm = min(1.0, count / optim["lr_warmup_steps"]) if optim["lr_warmup_steps"] else 1.0
        done = min(1.0, max(0, count - optim["lr_warmup_steps"]) / (total - optim["lr_warmup_steps"]))
        rest = 1 - (1 - optim["min_lr_ratio"]) * done if optim["lr_scheduler_type"] == "linear" else 1.0
        return optim["lr"] * warm * rest

    return rate


class Watched:
    """A training backend that remembers the rows of each update."""

    def __init__(self, backend):
        self.backend, self.orders = backend, []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def forward_backward(self, state, batch, loss):
        self.orders.append(batch["row"].tolist())
        return self.backend.forward_backward(state, batch, loss)


FOLDERS = {"reference": "actor", "reward_model": "judge"}


class Steps:
    """The steps of one algorithm in the project, and models in float64 that start from the same parameters."""

    def __init__(self, stack, models, name, *more, updates=8, clip_grad=2.0):
        warm_up = ACTOR["lr_warmup_steps"] if updates > 2 else 0
        more += (f"algorithm.name={name}", f"model.path={models['actor']}", f"actor.optim.lr_warmup_steps={warm_up}")
        more += (f"actor.optim.clip_grad={clip_grad}",)
        plan = make_plan(load(overrides=[*COMMON, *more]))
        w = stack.enter_context(local_workers(plan))
        self.trainers = {role: Watched(backend) for role, backend in w.trainers.items()}
        self.w = attrs.evolve(w, trainers=self.trainers, reward=Reward(judge, w.tokenizer, w.end_tokens))
        self.algorithm, self.state = algorithm_of(plan), initial_state(plan, self.w).algorithm
        self.source = TaskPairs(TASK) if plan.learns_from in ("pairs", "labels") else TASK
        settings = {
            "actor": OPTIM | ACTOR | {"lr_warmup_steps": warm_up, "clip_grad": clip_grad},
            "critic": OPTIM | CRITIC,
        }
        self.models, self.further = {}, 2 * PROMPTS
        for role in plan.roles:
            optim = settings.get(role, {})
            written = load_file(models[FOLDERS.get(role, role)] / "model.safetensors")
            # A reward model begins as the policy with a head of its own.
            params = {name: written.get(name, t) for name, t in getattr(self.state, role).params.items()}
            options = {key: optim[key] for key in OPTIM if optim}
            self.models[role] = paper.Model(params, rate_of(optim, updates) if optim else None, **options)

    def scale(self, role, factor):
        """Multiplies the parameters of a role, as if its folder had others."""
        state = getattr(self.state, role)
        params = attrs.evolve(state.params, leaves={name: t * factor for name, t in state.params.items()})
        self.state = attrs.evolve(self.state, **{role: attrs.evolve(state, params=params)})
        self.models[role] = paper.Model(params)

    def more(self, count):
        """Problems that are in no step."""
        self.further += count
        return self.source.train(Key.from_seed(5), self.further - count, count)

    def draw(self):
        """Draws the experience of a step; returns its problems and rows."""
        step = self.state.step
        problems = self.source.train(Key.from_seed(5), step * PROMPTS, PROMPTS)
        workers = attrs.evolve(self.w, more=self.more)
        experience = self.algorithm.sample(self.state, problems, workers)
        batch = experience.batch
        self.experience = attrs.evolve(experience, batch=batch.with_rows(row=torch.arange(len(batch))))
        masks = batch.rows("response_mask")
        groups = batch["group"].tolist() if "group" in batch else [0] * len(batch)
        rows = [
            Row(tokens.tolist(), mask.tolist().index(1.0), group)
            for tokens, mask, group in zip(batch.rows(), masks, groups, strict=True)
        ]
        assert all(mask[row.start :].all() for mask, row in zip(masks, rows, strict=True))
        for row in rows:
            row.parts = score_of(self.text(row))
        return problems, rows

    def text(self, row):
        return self.w.tokenizer.decode(row.tokens[row.start :])

    def check_draws(self, problems, rows, temperature=HEAT):
        """The rows answer the problems, and the weights of this very step drew them at the temperature."""
        prompts = {p.id: [1, *self.w.tokenizer.encode(p.prompt, add_special_tokens=False)] for p in problems}
        for row in rows:
            assert row.tokens[: row.start] == prompts[row.group]
            assert row.length == LONGEST or row.tokens[-1] == EOS
        ours = [t[row.start :] for t, row in zip(self.experience.batch.rows("rollout_log_probs"), rows, strict=True)]
        close(ours, self.models["actor"].log_probs(rows, temperature))

    def learn(self):
        """Learns in the project; returns the orders of rows of the actor's updates, and the metrics."""
        for trainer in self.trainers.values():
            trainer.orders.clear()
        self.state, self.report = self.algorithm.learn(self.state, self.experience, self.w)
        return self.trainers["actor"].orders

    def check(self):
        """The parameters of all models are those of the paper."""
        for role, model in self.models.items():
            params = getattr(self.state, role).params
            assert list(params) == list(model.params)
            for name, expected in model.params.items():
                # Processors round differently.
                torch.testing.assert_close(params[name].double(), expected.detach(), rtol=0, atol=3e-6)


def close(ours, expected, tolerance=2e-5):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=0, atol=tolerance)


@pytest.fixture
def steps(models):
    made = []

    def make(*args, **options):
        made.append(Steps(stack, models, *args, **options))
        return made[-1]

    with contextlib.ExitStack() as stack:
        yield make
    for model in (model for run in made for model in run.models.values() if model.norms):
        assert min(model.norms) < model.most, "gradients that are all clipped do not show their size"


def score_rewards(rows):
    """The score of each row on its last token."""
    return [torch.tensor([0.0] * (row.length - 1) + [row.parts["score"]], dtype=torch.float64) for row in rows]


def chunks(count, size):
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def check_orders(orders, count=12, shuffled=False):
    """Two passes of two minibatches, of three prompts and of one; each pass has every row once."""
    size = -(-count * 3 // 4)
    assert [len(order) for order in orders] == [size, count - size] * 2
    passes = [orders[0] + orders[1], orders[2] + orders[3]]
    assert all(sorted(order) == list(range(count)) for order in passes)
    if not shuffled:
        assert orders == chunks(count, size) * 2
    return passes


class Terms:
    """What is added to the loss of a policy: the KL to a reference and the entropy."""

    def __init__(self, reference=None, kind="k3", kl=0.0, entropy=0.0):
        self.reference, self.kind, self.kl, self.entropy = reference, kind, kl, entropy

    def options(self):
        kl = [
            f"algorithm.kl_loss_type={self.kind}",
            f"algorithm.kl_loss_coef={self.kl}",
            "algorithm.use_kl_loss=true",
        ]
        return [*(kl if self.kl else ()), f"algorithm.entropy_coeff={self.entropy}"]

    def of(self, order, new, distributions):
        """The terms of each token, a tensor for each row."""
        terms = [torch.zeros_like(n) for n in new]
        for place, (row, d) in enumerate(zip(order, distributions, strict=True)):
            if self.kl:
                terms[place] = self.kl * paper.kl_estimate(self.kind, new[place], self.reference[row])
            terms[place] = terms[place] + self.entropy * (d.exp() * d).sum(-1)
        return terms


def update_policy(run, rows, advantages, loss, orders, terms=None, **averaging):
    """The updates of a policy. ``loss`` is of one row, or with ``loss.whole`` of all rows of an update."""
    model = run.models["actor"]
    old = [t.detach() for t in model.log_probs(rows, HEAT)]
    for order in orders:
        part, a, q = ([values[i] for i in order] for values in (rows, advantages, old))
        distributions = model.distributions(part, HEAT)
        new = [paper.drawn(d, row) for d, row in zip(distributions, part, strict=True)]
        whole = hasattr(loss, "whole")
        losses = loss.whole(new, q, a, distributions) if whole else list(map(loss, new, q, a))
        if terms is not None:
            losses = [one + other for one, other in zip(losses, terms.of(order, new, distributions), strict=True)]
        model.update(paper.averaged(losses, **averaging))


@attrs.frozen
class Whole:
    """A loss of all rows of an update together."""

    whole: object


CLIPPED = functools.partial(paper.ppo_clip, low=0.2, high=0.2)
CLIP = {"gspo": 0.01, "geo_mean": 0.03, "dppo_tv": 0.01, "dppo_kl": 0.0005}


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if not name.endswith("_cov")])
def test_policy_losses(name, steps):
    low, high = CLIP.get(name, 0.04), 1.5 * CLIP.get(name, 0.04)
    mode = "seq-mean-token-mean" if name in ("gspo", "geo_mean") else "token-mean"
    run = steps(
        "grpo", f"algorithm.policy_loss={name}", f"algorithm.clip_ratio_low={low}",
        f"algorithm.clip_ratio_high={high}", "algorithm.dro_beta=0.3",
        f"algorithm.loss_agg_mode={mode}", "algorithm.shuffle=true",
    )  # fmt: skip
    seen = []
    for _ in range(2):
        problems, rows = run.draw()
        run.check_draws(problems, rows)
        orders = run.learn()
        seen += check_orders(orders, shuffled=True)
        advantages = paper.in_groups(paper.standardized, score_rewards(rows), rows)
        loss = functools.partial(paper.POLICY_LOSSES[name], low=low, high=high)
        update_policy(run, rows, advantages, loss, orders, mode=mode)
        run.check()
    assert len(set(map(tuple, seen))) == 4, "each pass of each step has an order of its own"
    if name in (*CLIP, "ppo_clip", "cispo"):
        assert 0.0 < run.report["actor/pg_clipfrac"] < 1.0


COVARIANCE = {
    "clip_cov": (
        ["clip_cov_ratio=1.0", "clip_cov_lb=0.05", "clip_cov_ub=0.6", "clip_ratio=0.03"],
        lambda new, old, a, d: paper.clip_cov(new, old, a, 0.03, 0.03, 0.05, 0.6),
    ),
    "kl_cov": (
        ["kl_cov_ratio=0.25", "ppo_kl_coef=0.7"],
        lambda new, old, a, d: paper.kl_cov(new, old, a, 0.25, 0.7),
    ),
    "ppo_clip": (
        ["top_entropy_quantile=0.3"],
        lambda new, old, a, d: list(map(CLIPPED, new, old, paper.of_highest_entropy(d, a, 0.3))),
    ),
}


@pytest.mark.parametrize("name", COVARIANCE)
def test_losses_that_select_tokens_of_an_update(name, steps):
    options, loss = COVARIANCE[name]
    run = steps("grpo", f"algorithm.policy_loss={name}", *(f"algorithm.{option}" for option in options))
    for _ in range(2):
        _, rows = run.draw()
        orders = run.learn()
        check_orders(orders)
        advantages = paper.in_groups(paper.standardized, score_rewards(rows), rows)
        update_policy(run, rows, advantages, Whole(loss), orders)
        run.check()


def of_groups(fn):
    return lambda rewards, rows, _: paper.in_groups(fn, rewards, rows)


# Each estimator with a way to average and an estimator of the KL in the loss.
ESTIMATORS = {
    "grpo": (of_groups(paper.standardized), "token-mean", "k3"),
    "dr_grpo": (of_groups(paper.centred), "seq-mean-token-sum-norm", "k2"),
    "grpo_passk": (of_groups(paper.best_of_k), "seq-mean-token-sum", "k1"),
    "rloo": (of_groups(paper.leave_one_out), "seq-mean-token-mean", "abs"),
    "opo": (of_groups(paper.by_length), "token-sum", "k3+"),
    "gpg": (lambda rewards, rows, _: paper.group_policy_gradient(rewards, rows), "seq-mean-token-mean", "k1+"),
    "gdpo": (
        lambda rewards, rows, _: paper.decoupled(rows, ("long", "odd"), (2.0, 0.5)),
        "seq-mean-token-sum-norm", "abs+",
    ),
    "reinforce_plus_plus": (
        lambda rewards, rows, _: paper.whitened([paper.to_go(r, 0.9) for r in rewards]), "token-mean", "k2+",
    ),
    "reinforce_plus_plus_baseline": (
        lambda rewards, rows, _: paper.whitened(paper.in_groups(paper.centred, rewards, rows)), "token-mean", "kl",
    ),
    "optimal_token_baseline": (paper.optimal_baseline, "seq-mean-token-mean", "mse"),
    "tir_optimal_token_baseline": (paper.optimal_baseline, "token-mean", "low_var_kl"),
}  # fmt: skip


def test_all_estimators_are_here():
    assert set(ESTIMATORS) == {*GROUP_ESTIMATORS, "reinforce_plus_plus"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name, steps):
    """With the KL to a reference in the reward, if the estimator reads it, and in the loss, and an entropy bonus.

    The reference is not the first policy: at a KL of 0 rounding decides the derivative of ``abs``.
    """
    estimate, mode, kind = ESTIMATORS[name]
    terms = Terms(kind=kind, kl=0.2, entropy=0.05)
    scale = 11.0 if name == "dr_grpo" else None
    run = steps(
        "grpo", f"algorithm.adv_estimator={name}", f"algorithm.loss_agg_mode={mode}", "algorithm.gamma=0.9",
        'algorithm.gdpo_reward_keys=["long", "odd"]', "algorithm.gdpo_reward_weights=[2.0, 0.5]",
        f"algorithm.loss_scale_factor={scale}" if scale else "algorithm.clip_ratio=0.2",
        f"algorithm.use_kl_in_reward={str(name != 'gdpo').lower()}", "algorithm.kl_ctrl.kl_coef=0.3",
        "algorithm.kl_penalty=k2", *terms.options(),
        clip_grad={"token-sum": 30, "seq-mean-token-sum": 5}.get(mode, 2),
    )  # fmt: skip
    run.scale("reference", 0.98)
    for _ in range(2):
        _, rows = run.draw()
        terms.reference = [t.detach() for t in run.models["reference"].log_probs(rows, HEAT)]
        distributions = [d.detach() for d in run.models["actor"].distributions(rows, HEAT)]
        kl = [paper.kl_estimate("k2", paper.drawn(d, r), q)
              for d, r, q in zip(distributions, rows, terms.reference, strict=True)]  # fmt: skip
        rewards = [reward - 0.3 * one for reward, one in zip(score_rewards(rows), kl, strict=True)]
        orders = run.learn()
        check_orders(orders)
        advantages = estimate(rewards, rows, distributions)
        update_policy(run, rows, advantages, CLIPPED, orders, terms, mode=mode, scale=scale or LONGEST)
        run.check()
    assert max(float(one.max()) for one in kl) > 0.01


def adapted(coefficient, kl, target, horizon):
    """The next coefficient of Ziegler et al. 2019; ``kl`` has a tensor for each row."""
    mean = sum(float(row.mean()) for row in kl) / len(kl)
    return coefficient * (1 + min(max(mean / target - 1, -0.2), 0.2) * len(kl) / horizon)


ADAPTIVE = [
    "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.4",
    "algorithm.kl_ctrl.target_kl=0.11", "algorithm.kl_ctrl.horizon=50", "algorithm.kl_penalty=k3",
]  # fmt: skip


def penalized(run, rows, rewards, coefficient):
    """Rewards less the KL to the reference, and that KL, for each row."""
    ours, reference = (run.models[role].log_probs(rows, HEAT) for role in ("actor", "reference"))
    kl = [paper.kl_estimate("k3", one, other).detach() for one, other in zip(ours, reference, strict=True)]
    return [reward - coefficient * one for reward, one in zip(rewards, kl, strict=True)], kl


def test_the_adaptive_controller_of_grpo(steps):
    run, coefficient = steps("grpo", *ADAPTIVE, "algorithm.adv_estimator=dr_grpo"), 0.4
    for _ in range(2):
        _, rows = run.draw()
        assert run.state.kl.value == pytest.approx(coefficient, rel=1e-6)
        rewards, kl = penalized(run, rows, score_rewards(rows), coefficient)
        orders = run.learn()
        assert run.report["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient, rel=1e-6)
        update_policy(run, rows, paper.in_groups(paper.centred, rewards, rows), CLIPPED, orders)
        run.check()
        coefficient = adapted(coefficient, kl, 0.11, 50)
    assert run.state.kl.value == pytest.approx(coefficient, rel=1e-6)
    assert 0.088 < sum(float(row.mean()) for row in kl) / len(kl) < 0.132, "the change is within its bounds"


@pytest.mark.parametrize("judge", ["function", "reward_model"])
def test_ppo(judge, models, steps):
    """A critic of another model and with other settings, which learns a step before the policy does."""
    terms = Terms(entropy=0.1)
    more = (
        ["algorithm.critic_warmup=1", *ADAPTIVE]
        if judge == "function"
        else [f"algorithm.reward_model={models['judge']}"]
    )
    run = steps(
        "ppo", "algorithm.gamma=0.95", "algorithm.lam=0.8", "algorithm.cliprange_value=0.01", *terms.options(), *more,
        f"critic.path={models['critic']}", "algorithm.clip_ratio_c=1.5", "algorithm.clip_ratio=0.04",
        "algorithm.loss_agg_mode=seq-mean-token-sum", updates=4 if judge == "function" else 8, clip_grad=12,
    )  # fmt: skip
    critic, coefficient = run.models["critic"], 0.4
    for step in range(2):
        _, rows = run.draw()
        rewards = score_rewards(rows)
        if judge == "reward_model":
            scores = run.models["reward_model"].values(rows, last=True)
            rewards = [
                torch.cat([r[:-1] * 0, score[None]]) for r, score in zip(rewards, scores.detach(), strict=True)
            ]
        if "reference" in run.models:
            rewards, kl = penalized(run, rows, rewards, coefficient)
            coefficient = adapted(coefficient, kl, 0.11, 50)
        values = [v.detach() for v in critic.values(rows)]
        advantages, returns = paper.generalised(rewards, values, 0.95, 0.8)
        orders = run.learn()
        if step or judge != "function":
            loss = functools.partial(paper.ppo_clip, low=0.04, high=0.04, cap=1.5)
            update_policy(run, rows, advantages, loss, orders, terms, mode="seq-mean-token-sum")
        else:
            assert orders == []
        for order in chunks(12, 9) * 2:
            new = critic.values([rows[i] for i in order])
            losses = []
            for value, i in zip(new, order, strict=True):
                near = values[i] + (value - values[i]).clamp(-0.01, 0.01)
                losses.append(torch.max((value - returns[i]).square(), (near - returns[i]).square()) / 2)
            critic.update(paper.averaged(losses, "seq-mean-token-sum"))
        assert run.trainers["critic"].orders == chunks(12, 9) * 2
        run.check()
    assert 0.0 < run.report["critic/vf_clipfrac"] < 1.0 and 0.0 < run.report["actor/pg_clipfrac"] < 1.0
    if judge == "function":
        assert run.state.kl.value == pytest.approx(coefficient, rel=1e-6)


def greedy(run, prompt):
    """The most likely response."""
    row = Row(list(prompt), len(prompt))
    while row.length < LONGEST and (not row.length or row.tokens[-1] != EOS):
        longer = Row([*row.tokens, 0], len(row.tokens))
        row.tokens.append(int(run.models["actor"].distributions([longer])[0][0].argmax()))
    return row


@pytest.mark.parametrize("name", ["rloo", "remax"])
def test_algorithms_with_baselines_of_their_own(name, steps):
    run = steps(name, "algorithm.clip_ratio=0.2")
    for _ in range(2):
        problems, rows = run.draw()
        run.check_draws(problems, rows)
        if name == "rloo":
            advantages = paper.in_groups(paper.leave_one_out, score_rewards(rows), rows)
        else:
            prompts = {row.group: tuple(row.tokens[: row.start]) for row in rows}
            baselines = {g: score_of(run.text(greedy(run, prompt)))["score"] for g, prompt in prompts.items()}
            advantages = [
                paper.to_go(r) - baselines[row.group] for r, row in zip(score_rewards(rows), rows, strict=True)
            ]
        orders = run.learn()
        check_orders(orders)
        update_policy(run, rows, advantages, CLIPPED, orders)
        run.check()


@pytest.mark.parametrize("calls", [10, 1])
def test_dapo(calls, steps):
    """Groups without a signal are replaced, long responses are penalized, and the clip range is wider above.

    With one call there is no replacement, so three groups are left, which are one minibatch.
    """
    run = steps("dapo", "algorithm.overlong_buffer.len=4", "algorithm.overlong_buffer.penalty_factor=0.7",
                "algorithm.loss_agg_mode=seq-mean-token-mean", "algorithm.clip_ratio_c=10",
                f"algorithm.filter_groups.max_num_gen_batches={calls}")  # fmt: skip
    run.w = attrs.evolve(run.w, reward=Reward(judge_some, run.w.tokenizer, run.w.end_tokens))
    for _ in range(2):
        problems, rows = run.draw()
        groups, first = list(dict.fromkeys(row.group for row in rows)), [p.id for p in problems if p.id % 4 != 1]
        assert groups[:3] == first and len(groups) == (4 if calls > 1 else 3)
        assert not any(group % 4 == 1 for group in groups)
        penalties = [0.7 * min(1.0, max(0, row.length - (LONGEST - 4)) / 4) for row in rows]
        rewards = [reward.clone() for reward in score_rewards(rows)]
        for reward, penalty in zip(rewards, penalties, strict=True):
            reward[-1] -= penalty
        orders = run.learn()
        assert orders == chunks(len(rows), 9) * 2
        loss = functools.partial(paper.ppo_clip, low=0.2, high=0.28, cap=10.0)
        advantages = paper.in_groups(paper.standardized, rewards, rows)
        update_policy(run, rows, advantages, loss, orders, mode="seq-mean-token-mean")
        run.check()
    assert 0.0 < run.report["actor/pg_clipfrac"] < 1.0


def judge_some(answers):
    return [
        one | {"score": 0.5} if a.problem.id % 4 == 1 else one for a, one in zip(answers, judge(answers), strict=True)
    ]


IMPORTANCE = {
    "token": (["rollout_is_threshold=1.1", "rollout_is_threshold_lower=0.9"], lambda r: r.clamp(0.9, 1.1)),
    "sequence": (["rollout_is_threshold=1.0"], lambda r: r.prod().clamp(0.0, 1.0).expand(len(r))),
    "geometric": (["rollout_is_threshold=1.0", "rollout_is_threshold_lower=0.97", "rollout_is_outside=mask"],
                  lambda r: within(r.log().mean().exp(), 0.97, 1.0).expand(len(r))),
}  # fmt: skip


def within(ratio, low, high):
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@pytest.mark.parametrize(
    ("estimator", "level"), [*(("grpo", level) for level in IMPORTANCE), ("optimal_token_baseline", "token")]
)
def test_importance_weights(estimator, level, steps):
    """Of an engine that drew with other probabilities than the trainer's."""
    options, weigh = IMPORTANCE[level]
    options = [f"rollout_is={level}", f"adv_estimator={estimator}", *options]
    run = steps("grpo", *(f"algorithm.{option}" for option in options))
    _, rows = run.draw()
    batch = run.experience.batch
    noise = 0.2 * torch.sin(torch.arange(batch.num_tokens) * 1.7)
    batch = batch.with_tokens(rollout_log_probs=batch["rollout_log_probs"] + noise)
    run.experience = attrs.evolve(run.experience, batch=batch)
    distributions = [d.detach() for d in run.models["actor"].distributions(rows, HEAT)]
    drawn = [t[row.start :].double() for t, row in zip(batch.rows("rollout_log_probs"), rows, strict=True)]
    weights = [weigh((paper.drawn(d, row) - q).exp()) for d, row, q in zip(distributions, rows, drawn, strict=True)]
    values, counts = torch.cat(weights).round(decimals=9).unique(return_counts=True)
    assert len(values) > 3 and counts.max() > LONGEST, "the bounds act on some rows and not on others"
    orders = run.learn()
    if estimator == "grpo":
        advantages = paper.in_groups(paper.standardized, score_rewards(rows), rows)
    else:
        advantages = paper.optimal_baseline(score_rewards(rows), rows, distributions, weights)
    update_policy(run, rows, [a * w for a, w in zip(advantages, weights, strict=True)], CLIPPED, orders)
    run.check()


# Algorithms that learn from data, and those that imitate


def answers_of(run, problems):
    """The rows of problems with responses: begin token, prompt, response, end token."""
    code = functools.partial(run.w.tokenizer.encode, add_special_tokens=False)
    rows = []
    for problem in problems:
        prompt = [1, *code(problem.prompt)]
        responses = problem.responses if isinstance(problem, Judged) else [(problem.answer, True)]
        rows += [
            Row([*prompt, *code(text), EOS], len(prompt), problem.id, {"good": good}) for text, good in responses
        ]
    return rows


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_sft(mode, steps):
    run = steps("sft", f"algorithm.loss_agg_mode={mode}", "algorithm.loss_scale_factor=8", updates=2, clip_grad=3)
    for _ in range(2):
        problems, rows = run.draw()
        assert [(row.tokens, row.start) for row in rows] == [(r.tokens, r.start) for r in answers_of(run, problems)]
        run.learn()
        run.models["actor"].update(paper.averaged([-one for one in run.models["actor"].log_probs(rows)], mode, 8))
        run.check()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *(("dpo", {"beta": 0.6}), ("cdpo", {"beta": 0.6}), ("ipo", {"beta": 0.4}), ("orpo", {}), ("simpo", {})),
        *(("orpo", {"beta": 0.6}), ("simpo", {"beta": 0.6, "simpo_gamma": 0.3})),
    ],
)
def test_preferences(kind, given, steps):
    options = [f"algorithm.{name}={value}" for name, value in given.items()]
    beta, margin = given.get("beta", 2.0 if kind == "simpo" else 0.1), given.get("simpo_gamma", 1.0)
    run = steps("dpo", f"algorithm.loss_type={kind}", "algorithm.label_smoothing=0.2", *options, updates=2,
                clip_grad=30 if kind == "ipo" else 4)  # fmt: skip
    for _ in range(2):
        problems, rows = run.draw()
        expected = answers_of(run, problems)
        assert [(row.tokens, row.start) for row in rows] == [(row.tokens, row.start) for row in expected]
        new = run.models["actor"].log_probs(rows)
        old = run.models["reference"].log_probs(rows) if "reference" in run.models else new
        run.learn()
        losses = [paper.preference(kind, new[i], new[i + 1], old[i].detach(), old[i + 1].detach(), beta, 0.2, margin)
                  for i in range(0, len(rows), 2)]  # fmt: skip
        run.models["actor"].update(sum(losses) / len(losses))
        run.check()


def test_kto(steps):
    """Problems have one to three responses; the reference point is of responses to the next problem."""
    run = steps("dpo", "algorithm.loss_type=kto", "algorithm.beta=0.6", "algorithm.desirable_weight=1.5",
                "algorithm.undesirable_weight=0.7", updates=2, clip_grad=4)  # fmt: skip

    class Labelled:
        def train(self, key, start, count):
            return tuple(
                attrs.evolve(pair, chosen=pair.chosen * (i % 2 + 1), rejected=pair.rejected[: i % 3 != 0])
                for i, pair in enumerate(TaskPairs(TASK).train(key, start, count))
            )

    run.source = Labelled()
    for _ in range(2):
        problems, _ = run.draw()
        rows = answers_of(run, problems)
        prompts, replies = {}, {}
        for row in rows:
            prompts[row.group] = row.tokens[: row.start]
            replies.setdefault(row.group, row.tokens[row.start :])
        after = dict(zip(prompts, [*list(prompts)[1:], next(iter(prompts))], strict=True))
        others = [Row(prompts[row.group] + replies[after[row.group]], row.start) for row in rows]
        of_roles = [run.models[role].log_probs(rows + others) for role in ("actor", "reference")]
        ratios = [(new - old.detach()).sum() for new, old in zip(*of_roles, strict=True)]
        point = max(0.0, float(sum(ratios[len(rows) :]).detach()) / len(others))
        run.learn()
        assert run.report["kto/reference_point"] == pytest.approx(point, abs=1e-5)
        labels = [row.parts["good"] for row in rows]
        loss = paper.kahneman_tversky(ratios[: len(rows)], labels, point, 0.6, 1.5, 0.7)
        run.models["actor"].update(loss)
        run.check()


def test_reward_model(steps):
    run = steps("reward_model", "algorithm.center_rewards_coefficient=0.2", updates=2)
    for _ in range(2):
        problems, _ = run.draw()
        rows = answers_of(run, problems)
        run.learn()
        chosen, rejected = run.models["actor"].values(rows, last=True).reshape(-1, 2).unbind(1)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected) + 0.2 * (chosen + rejected) ** 2
        run.models["actor"].update(loss.mean())
        run.check()


def test_rejection(steps):
    """Scores are coarse, so that several responses of a group are the best, and some are just good enough."""
    mode = "seq-mean-token-sum"
    run = steps("rejection", "algorithm.min_score=0.75", f"algorithm.loss_agg_mode={mode}", updates=2, clip_grad=60)
    answers, kept, ties = [], [], 0

    def coarse(given):
        answers.extend(given)
        most = [0.5 if answer.problem.id % 4 == 1 else 1.0 for answer in given]
        scores = [round(4 * one["score"]) / 4 for one in judge(given)]
        return [{"score": min(one, limit), "pred": ""} for one, limit in zip(scores, most, strict=True)]

    run.w = attrs.evolve(run.w, reward=Reward(coarse, run.w.tokenizer, run.w.end_tokens))
    for _ in range(2):
        answers.clear()
        problems, rows = run.draw()
        best = []
        for problem in problems:
            of_group = [a.text for a in answers if a.problem == problem]
            scores = [one["score"] for one in coarse([a for a in answers if a.problem == problem])]
            ties += scores.count(max(scores)) > 1
            best += [(problem.id, of_group[scores.index(max(scores))])] if max(scores) >= 0.75 else []
        assert [(row.group, run.text(row).removesuffix("<eos>")) for row in rows] == best
        kept.append(len(rows))
        run.learn()
        if rows:  # without any, nothing changes
            run.check_draws(problems, rows)
            # As data of fine-tuning, so at temperature 1.
            losses = [-one for one in run.models["actor"].log_probs(rows)]
            run.models["actor"].update(paper.averaged(losses, mode))
        run.check()
    assert 0 < sum(kept) < 2 * PROMPTS and ties


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_distill(kl, top_k, models, steps):
    run = steps("distill", f"algorithm.teacher={models['teacher']}", f"algorithm.kl={kl}", f"algorithm.top_k={top_k}",
                "algorithm.loss_agg_mode=seq-mean-token-sum", updates=2, clip_grad=24)  # fmt: skip
    for _ in range(2):
        problems, rows = run.draw()
        run.check_draws(problems, rows)
        run.learn()
        losses = []
        for student, teacher, row in zip(
            *(run.models[role].distributions(rows, HEAT) for role in ("actor", "teacher")), rows, strict=True
        ):
            if top_k:
                losses.append(paper.divergence(student, teacher.detach(), teacher.topk(top_k).indices, kl))
            else:
                kind = {"reverse": "k2", "forward": "k3"}[kl]
                losses.append(paper.kl_estimate(kind, paper.drawn(student, row), paper.drawn(teacher, row).detach()))
        run.models["actor"].update(paper.averaged(losses, "seq-mean-token-sum"))
        run.check()
