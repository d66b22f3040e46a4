"""Every policy loss and every estimator that a config can name takes steps of GRPO, on mocks."""

import functools
import pickle

import attrs
import pytest
import torch

from verl_fn import steps
from verl_fn.algorithms import Workers, grpo, make, policy_optimization, ppo
from verl_fn.algorithms.experience import batch_report, selecting, update_report
from verl_fn.algorithms.policy import select_tokens, selected_by
from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.config import GRPO, PPO
from verl_fn.config.algorithms import BUILT_IN, GROUP_ESTIMATORS, POLICY_LOSSES
from verl_fn.data.tasks import TASKS
from verl_fn.rewards import Reward, by_rules
from verl_fn.state import Batch, Key, Max, Min, Sampling, Sum, Weighted, tree
from verl_fn.steps import adamw, minibatches
from verl_fn.steps.aggregate import last_of_rows
from verl_fn.testing import Mock, MockRollout, sample_table, tiny_batch, tiny_outputs

TASK = TASKS["count"]
TOKENIZER = char_tokenizer(TASK.alphabet)


class Scored:
    """A reward that differs between responses, and two parts of it."""

    def __init__(self):
        self.rule = Reward(by_rules, TOKENIZER)

    def __call__(self, batch, problems):
        batch = self.rule(batch, problems)
        lengths = batch.sum_rows(batch["response_mask"])
        spelling = 0.37 * batch.sum_rows(batch.tokens * batch["response_mask"]) % 1.0
        rewards = batch.spread(batch["score"] + spelling) * last_of_rows(batch, batch["response_mask"])
        batch = batch.with_tokens(token_level_scores=rewards, token_level_rewards=rewards.clone())
        return batch.with_rows(**{"reward/spelling": spelling, "reward/length": lengths})


@attrs.define
class Watched:
    """A backend that remembers what it was asked for."""

    backend: Mock
    forwards: list = attrs.field(factory=list)
    updates: list = attrs.field(factory=list)

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def forward(self, params, batch, needs):
        self.forwards.append((tuple(needs), len(batch)))
        return self.backend.forward(params, batch, needs)

    def forward_backward(self, state, batch, loss):
        self.updates.append(batch)
        return self.backend.forward_backward(state, batch, loss)


def run(options, steps=2, algorithm=grpo):
    actor = Watched(Mock(len(TOKENIZER), adamw(0.1), max_tokens=64))
    trainers = {"actor": actor, "critic": Mock(len(TOKENIZER), adamw(0.1))} if algorithm is ppo else {"actor": actor}
    sampling = Sampling(max_tokens=8, n=4, stop_token_ids=(TOKENIZER.eos_token_id,))
    workers = Workers(trainers, MockRollout(sample_table), Scored(), TOKENIZER, sampling)
    algorithm, key = algorithm(options), Key.from_seed(0)
    state = algorithm.init({role: backend.init(key) for role, backend in trainers.items()}, key)
    before = tree.digest(state.actor.params)
    for step in range(steps):
        problems = TASK.train(key.fold_in("data"), 4 * step, 4)
        state, report = algorithm.step(state, problems, workers)
    assert tree.digest(state.actor.params) != before
    assert torch.tensor([value for name, value in report.items() if name.startswith("actor/")]).isfinite().all()
    return state, report, actor


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce_plus_plus"])
def test_every_estimator_takes_steps(name):
    _, report, actor = run(GRPO(adv_estimator=name), steps=1)
    assert report["critic/advantages/max"] > report["critic/advantages/min"]
    needs = {needs for needs, _ in actor.forwards}
    assert needs == {("logprobs", "entropy") + ("sum_pi_squared",) * name.endswith("token_baseline")}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_every_policy_loss_takes_steps(name, share):
    options = GRPO(policy_loss=name, dro_beta=0.1, ppo_mini_batch_size=2, ppo_epochs=2, top_entropy_quantile=share)
    state, report, actor = run(options)
    assert "actor/pg_loss" in report and state.step == 2
    needs = selected_by(options)
    # Each of the four updates of a step selects in its whole batch of eight rows, at the weights it starts from.
    of_updates = [call for call in actor.forwards if call[0] != ("logprobs", "entropy") or call[1] == 8]
    assert of_updates == ([(needs, 8)] * 8 if needs else [])


def test_ppo_takes_them_too():
    _, report, _ = run(PPO(policy_loss="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.0), algorithm=ppo)
    assert "actor/pg_clipfrac" in report


def test_what_is_selected_is_in_the_update_batch():
    _, _, actor = run(GRPO(policy_loss="kl_cov", kl_cov_ratio=0.25, top_entropy_quantile=0.3))
    for batch in actor.updates:
        tokens = int(batch["response_mask"].sum())
        assert int(batch["cov_selected"].sum()) >= int(0.25 * tokens) > 0
        assert 0 < int(batch["high_entropy"].sum()) < tokens
        assert not batch["advantages"][batch["high_entropy"] == 0].any()


def test_importance_weights_reach_the_token_baseline():
    _, _, actor = run(GRPO(adv_estimator="optimal_token_baseline", rollout_is="token"), steps=1)
    assert "rollout_is_weights" in actor.updates[0]


def test_rows_are_weighted_where_the_loss_has_values_of_rows():
    _, _, actor = run(GRPO(policy_loss="geo_mean", ppo_mini_batch_size=1), steps=1)
    assert len(actor.updates) > 1
    assert [float(part["row_weight"].sum()) for part in actor.updates] == pytest.approx([1.0] * len(actor.updates))
    _, _, actor = run(GRPO(), steps=1)
    assert "row_weight" not in actor.updates[0]


def test_a_selection_travels_to_another_process():
    options = GRPO(policy_loss="clip_cov", clip_cov_ratio=0.3, clip_cov_lb=0.0, top_entropy_quantile=0.5)
    choose = functools.partial(select_tokens, options=options)
    batch, key = tiny_batch(), Key.from_seed(3)
    outputs = tiny_outputs(batch, selected_by(options))
    there = pickle.loads(pickle.dumps(choose))
    assert tree.equal(there(batch, outputs, key), choose(batch, outputs, key))


def test_dro_needs_its_weight():
    with pytest.raises(ValueError, match=r"policy_loss.*dro needs algorithm.dro_beta"):
        GRPO(policy_loss="dro")


@attrs.define
class Asked:
    """An engine that remembers the keys of its requests."""

    engine: MockRollout = attrs.field(factory=lambda: MockRollout(sample_table))
    keys: list = attrs.field(factory=list)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, requests, *, version=None):
        self.keys += [(tree.digest(r.key), r.sampling.temperature) for r in requests]
        return self.engine.generate(requests, version=version)


@pytest.mark.parametrize("name", [name for name, cls in BUILT_IN.items() if cls().outline.learns_from == "samples"])
def test_every_step_draws_with_keys_of_its_own(name):
    """The same problems again, with the same weights."""
    algorithm, key, engine = make(name, BUILT_IN[name]()), Key.from_seed(0), Asked()
    trainers = {role: Mock(len(TOKENIZER), adamw(0.1)) for role in algorithm.outline.roles}
    sampling = Sampling(max_tokens=8, n=4, stop_token_ids=(TOKENIZER.eos_token_id,))
    more = lambda count: TASK.train(key, 50 + len(engine.keys), count)  # noqa: E731
    w = Workers(trainers, engine, Scored(), TOKENIZER, sampling, more=more)
    state = algorithm.init({role: backend.init(key) for role, backend in trainers.items()}, key)
    for step in range(2):
        algorithm.sample(attrs.evolve(state, step=step), TASK.train(key, 0, 4), w)
    assert len(set(engine.keys)) == len(engine.keys) >= 8


def test_every_update_and_every_step_selects_with_a_key_of_its_own():
    options = GRPO(policy_loss="clip_cov", clip_cov_ratio=0.3, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    actor, key = Mock(8, adamw(0.1)), Key.from_seed(0)
    w = Workers({"actor": actor}, MockRollout(sample_table), None, TOKENIZER, Sampling(8))
    state, batch = actor.init(key), tiny_batch(rows=12)
    selects = [selecting(actor, options, w, key.fold_in(step)) for step in range(2)]
    chosen = [tuple(select(state, batch, number)["cov_selected"].tolist()) for select in selects for number in (0, 1)]
    assert len(set(chosen)) == 4


def test_every_step_selects_and_shuffles_with_a_key_of_its_own(monkeypatch):
    keys = []

    def select(backend, options, w, key):
        keys.append(tree.digest(key))
        return selecting(backend, options, w, key)

    def cut(batch, rows, *, epochs, shuffle):
        keys.append(tree.digest(shuffle))
        return minibatches(batch, rows, epochs=epochs, shuffle=shuffle)

    monkeypatch.setattr(policy_optimization, "selecting", select)
    monkeypatch.setattr(steps, "minibatches", cut)
    run(GRPO(shuffle=True))
    assert len(set(keys)) == len(keys) == 4


def test_metrics_of_updates_are_their_means():
    updates = [({"actor/pg_loss": Sum(loss)}, {"lr": Weighted(lr, 1.0), "perf/copies": Sum(3)})
               for loss, lr in ((1.0, 0.5), (4.0, 0.1))]  # fmt: skip
    expected = {"actor/pg_loss": 2.5, "critic/lr": 0.3, "perf/copies/critic": 3.0}
    assert update_report("critic", updates) == pytest.approx(expected)
    # The mean of a metric is over the updates that have it: only the first one of an exact run measures the entropy.
    updates[0][0]["actor/entropy"] = Weighted(0.5, 1.0)
    assert update_report("critic", updates) == pytest.approx(expected | {"actor/entropy": 0.5})
    extremes = [({"top": Max(top), "low": Min(top)}, {}) for top in (1.0, 3.0, 2.0)]
    assert update_report("actor", extremes) == {"actor/top": 3.0, "actor/low": 1.0}


def test_metrics_of_a_batch_by_hand():
    """Values where the model drew nothing count nowhere."""
    fields = {"response_mask": [[0.0, 1.0, 1.0], [0.0, 1.0]], "token_level_rewards": [[9.0, 1.0, 2.0], [9.0, -1.0]],
              "advantages": [[9.0, 1.0, 2.0], [9.0, 6.0]], "returns": [[9.0, 0.5, 1.0], [9.0, 4.5]],
              "values": [[9.0, 0.5, 3.0], [9.0, 2.5]], "entropys": [[9.0, 0.3, 0.6], [9.0, 0.9]],
              "old_log_probs": [[0.0, -1.0, -1.0], [0.0, -1.0]]}  # fmt: skip
    fields["rollout_log_probs"] = fields["old_log_probs"]
    rows = {"score": [4.0, 1.0], "finished": [1.0, 0.0], "near_ties": [0, 2], "prompt_length": [1, 1]}
    report = batch_report(Batch.from_rows([[1, 2, 3], [1, 2]], fields, rows | {"acc": [1.0, 0.0], "group": [0, 0]}))
    expected = {
        "critic/rewards/mean": 1.0, "critic/rewards/max": 3.0, "critic/rewards/min": -1.0, "critic/score/mean": 2.5,
        "critic/advantages/mean": 3.0, "critic/advantages/max": 6.0, "critic/returns/mean": 2.0,
        "critic/values/max": 3.0, "critic/vf_explained_var": 1.0 - (8 / 3) / (57 / 18), "actor/entropy": 0.6,
        "response_length/mean": 1.5, "response_length/clip_ratio": 0.5, "training/rollout_near_ties": 1.0,
        "training/acc": 0.5, "perf/total_num_tokens": 5.0,
    }  # fmt: skip
    assert {name: report[name] for name in expected} == pytest.approx(expected)
