"""Algorithms, estimators and losses of one's own on mocks: what they may return, and what is said if they do not."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from test_without_critic import KEY, TASK, step, workers

from verl_fn import steps
from verl_fn.algorithms import Algorithm, AlgorithmError, grpo, ppo, remax, sft
from verl_fn.algorithms.experience import sample_and_score, with_reference
from verl_fn.algorithms.own import check_fields, hints, in_run
from verl_fn.algorithms.policy import aggregation, estimator, policy_loss
from verl_fn.backends.protocol import Through
from verl_fn.config import GRPO, PPO, SFT, ConfigError, Outline, ReMax, Role, load, make_plan
from verl_fn.data.tasks import Task
from verl_fn.errors import ArgumentError
from verl_fn.runs.state import RunState, blank_state
from verl_fn.runs.steps import advance
from verl_fn.state import Key, Node, Outcome, TokenOutputs, node, read_only, tree
from verl_fn.steps import aggregate, dr_grpo, entropy, loss, row_mean, token_mean
from verl_fn.steps.aggregate import last_of_rows
from verl_fn.steps.losses.contract import LossError, described
from verl_fn.testing import LawViolation, check_advantage
from verl_fn.testing.advantages import estimator_batch


@node
class State(Node):
    actor: object
    key: Key
    step: int


@loss(needs=["logprobs"])
def reinforce(outputs, batch):
    return -batch["advantages"] * outputs.logprobs, {"own/mean": token_mean(batch, batch["advantages"])}


def init(states, key):
    return State(states["actor"], key, step=0)


def sample(state, problems, w):
    return sample_and_score(state.actor, problems, w, state.key.fold_in(state.step), state.step)


def learn(state, experience, w, rows=None, estimate=dr_grpo):
    batch = estimate(experience.batch)
    batch = aggregate(batch if rows is None else batch.take(rows), "token-mean")
    grads, metrics = w.trainers["actor"].forward_backward(state.actor, batch, reinforce)
    actor, more = w.trainers["actor"].apply_update(state.actor, grads)
    return State(actor, state.key, state.step + 1), metrics | more | {"plain": torch.tensor(2.0)}


def own(**functions):
    return in_run(Algorithm(**({"init": init, "sample": sample, "learn": learn} | functions)), "me")


def test_reports_are_completed():
    w = workers()
    measured = {"response_length/max": 99.0, "timing_s/reward": 7.5}
    _, _, report = step(own(learn=lambda *args: (lambda state, own: (state, own | measured))(*learn(*args))), w)
    assert {name: report[name] for name in measured} == measured, "a metric of learn replaces the run's own"
    assert report["actor/plain"] == 2.0 and report["actor/grad_norm"] > 0 and "own/mean" in report
    assert {"timing_s/gen", "timing_s/reward", "timing_s/learn", "timing_s/step", "perf/throughput"} <= report.keys()
    assert report["critic/score/max"] > report["critic/score/min"] and report["response_length/mean"] > 0
    assert all(isinstance(value, float) for value in report.values())


@pytest.mark.parametrize(
    ("rows", "left"), [(slice(None), 0), ([0, 1, 2, 5], 8), ([3, 3, 4], 10)], ids=["all", "some", "twice"]
)
def test_rows_that_learn_leaves_out_are_counted_as_dropped(rows, left):
    w = workers()
    rows = torch.arange(12)[rows]
    algorithm = own(learn=lambda state, experience, w: learn(state, experience, w, rows))
    state = RunState(algorithm.init({"actor": w.trainers["actor"].init(KEY)}, KEY), cursor=0)
    plan = make_plan(load(overrides=["data.train_batch_size=4", "trainer.total_training_steps=1"]))
    _, report, drawn = advance(algorithm, state, TASK, w, plan)
    assert isinstance(TASK, Task) and report["rollout/rows_asked"] == 12
    assert report.get("rollout/rows_dropped/learn", 0) == left
    assert report["rollout/rows_learned"] == 12 - left and "row_of_experience" not in drawn.experience.batch
    kept = drawn.experience.batch.take(torch.tensor(sorted(set(rows.tolist()))))
    assert report["rollout/tokens_learned"] == int(kept["response_mask"].sum())


def test_rows_without_weight_are_counted_as_dropped():
    def weightless(batch):
        batch = dr_grpo(batch)
        return batch.with_tokens(response_mask=batch["response_mask"] * batch.spread(batch["row_of_experience"] > 2))

    algorithm = own(learn=lambda state, experience, w: learn(state, experience, w, estimate=weightless))
    _, _, report = step(algorithm, workers())
    assert report["rollout/rows_dropped/learn"] == 3.0 and report["rollout/tokens_dropped/learn"] > 0


def test_rows_of_any_pass_and_with_weights_of_both_signs_are_learned_from():
    """Row 11 is in no pass, and row 10 has no weight; the weights of the other rows add up to 0."""

    def passes(state, experience, w):
        batch, actor = dr_grpo(experience.batch), state.actor
        weights = torch.zeros_like(batch["advantages"])
        weights[batch.last[:10]], weights[batch.last[:10] - 1] = 0.5, -0.5
        batch = batch.with_tokens(loss_weight=weights)
        for rows in (torch.arange(6), torch.arange(4, 11)):
            grads, metrics = w.trainers["actor"].forward_backward(actor, batch.take(rows), reinforce)
            actor, _ = w.trainers["actor"].apply_update(actor, grads)
        return State(actor, state.key, state.step + 1), metrics

    experience, _, report = step(own(learn=passes), workers())
    rest = experience.batch.take(torch.tensor([10, 11]))
    assert report["rollout/rows_dropped/learn"] == 2
    assert report["rollout/tokens_dropped/learn"] == int(rest["response_mask"].sum())


@pytest.mark.parametrize("call", ["loss_fn", "map"])
def test_rows_are_not_counted_where_learn_computes_gradients_itself(call):
    """A call that shows nothing of its rows may have had all of them."""

    def computes(state, experience, w):
        trainer = w.trainers["actor"]
        if call == "loss_fn":
            trainer.loss_fn(aggregate(dr_grpo(experience.batch), "token-mean"), reinforce)
        else:
            trainer.map(lambda: None)
        return learn(state, experience, w, rows=torch.arange(3))

    _, _, report = step(own(learn=computes), workers())
    assert not any(name.startswith("rollout/") and name.endswith("/learn") for name in report)


def test_rows_of_other_batches_are_not_counted():
    def elsewhere(state, experience, w):
        return learn(state, attrs.evolve(experience, batch=experience.batch.without("row_of_experience")), w)

    _, _, report = step(own(learn=elsewhere), workers())
    assert "rollout/rows_dropped/learn" not in report


def forgets(state, experience, w):
    return learn(state, experience, w)[0]


def ends_at(number):
    def ends(state, experience, w):
        after, report = learn(state, experience, w)
        return attrs.evolve(after, step=number), report

    return ends


def lists(state, experience, w):
    return learn(state, experience, w)[0], {"scores": [1.0, 2.0]}


def counts(state, experience, w):
    return learn(state, experience, w)[0], 3


def breaks(state, experience, w):
    def divided(batch):
        advantages = dr_grpo(batch)["advantages"] / torch.zeros(())
        return batch.with_tokens(advantages=advantages)

    return learn(state, experience, w, estimate=divided)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_advantages_of_responses_must_be_finite(value):
    """No loss reads the others; a single one of a response ends the run."""

    def learning(places):
        def estimate(batch):
            advantages = torch.where(places(batch), value, dr_grpo(batch)["advantages"])
            return batch.with_tokens(advantages=advantages)

        return own(learn=lambda state, experience, w: learn(state, experience, w, estimate=estimate))

    _, state, report = step(learning(lambda batch: batch["response_mask"] == 0), workers())
    _, plain, want = step(own(), workers())
    assert tree.equal(state.actor.params, plain.actor.params) and report["actor/loss"] == want["actor/loss"]
    with pytest.raises(AlgorithmError, match="not finite, on 1 tokens of a batch"):
        step(learning(lambda batch: torch.arange(batch.num_tokens) == batch.last[2]), workers())


def keeps(state, experience, w):
    _, report = learn(state, experience, w)
    return attrs.evolve(state, step=state.step + 1), report


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            keeps,
            r"keeps .* returns a state whose actor cannot be used: this TrainState .* was donated to apply_update",
        ),
        (forgets, r"forgets \(.*test_own_parts.py:\d+\) returns a State; learn returns the next state and a report"),
        *(
            (ends_at(step), f"ends .* returns a state of step {step} after step 0; it must add 1 to step")
            for step in (0, 2, -1, None)
        ),
        (lists, "lists .* reports a list as 'scores'; a report has one number for each name"),
        (counts, "counts .* returns a int as its report; it is a dict of numbers by name"),
        (breaks, "breaks .* learns from advantages that are not finite, on 7|breaks .* not finite, on .* tokens"),
    ],
)
def test_what_learn_must_not_return(function, message):
    with pytest.raises(AlgorithmError, match=message):
        step(own(learn=function), workers())


def test_a_handle_to_a_state_that_an_update_has_taken_over_is_not_returned():
    def kept(state, experience, w):
        after, report = learn(state, experience, w)
        return attrs.evolve(after, actor=SimpleNamespace(fate="this remote TrainState was donated.")), report

    with pytest.raises(AlgorithmError, match=r"kept .* whose actor cannot be used: this remote TrainState was"):
        step(own(learn=kept), workers())


@node
class Remembers(State):
    seen: object


@pytest.mark.parametrize(
    ("seen", "then", "message"),
    [
        ([], [0.5], r"\.seen\[0\] is a number and was nothing"),
        ({"a": 1.0}, {}, r"\.seen\['a'\] is nothing and was a number"),
        (None, 0.5, r"\.seen is a number and was nothing"),
        (torch.zeros(1), torch.zeros(2), r"\.seen is a tensor of torch.float32 and shape \(2,\) and was a tensor"),
        (True, 0.5, r"\.seen is a number and was a bool"),
        (0, 0.5, ""),
        (0.0, np.float64(0.5), ""),
        (torch.zeros(2), torch.ones(2), ""),
    ],
)
def test_a_state_keeps_the_structure_that_a_checkpoint_is_restored_into(seen, then, message):
    def remember(state, experience, w):
        after, report = learn(state, experience, w)
        return Remembers(after.actor, after.key, after.step, then), report

    algorithm = own(init=lambda states, key: Remembers(states["actor"], key, 0, seen), learn=remember)
    if message:
        with pytest.raises(
            AlgorithmError, match=f"remember .* whose {message}.*give every field its final structure"
        ):
            step(algorithm, workers())
    else:
        step(algorithm, workers())


def test_what_the_other_functions_must_not_be():
    with pytest.raises(AlgorithmError, match=r"returns a Batch; sample returns a verl_fn.algorithms.Experience"):
        step(own(sample=lambda state, problems, w: sample(state, problems, w).batch), workers())
    with pytest.raises(AlgorithmError, match=r"me returns None; it must return a verl_fn.algorithms.Algorithm"):
        in_run(None, "me")
    with pytest.raises(
        AlgorithmError, match=r"is the learn .*learn\(state, experience, workers\), and it takes \(w\)"
    ):
        own(learn=lambda w: None)
    with pytest.raises(AlgorithmError, match=r"is the init of an algorithm.* it takes \(states\)"):
        own(init=lambda states: None)


def test_with_lora_a_reference_is_the_frozen_base():
    """The state gets None for it, and with_reference takes the actor's base."""
    asked = []

    def of(name):
        def forward(params, batch, needs):
            asked.append((name, params))
            return w.trainers["actor"].forward(state.actor.params, batch, needs)

        return SimpleNamespace(forward=forward)

    w = workers()
    state = SimpleNamespace(actor=w.trainers["actor"].init(KEY), reference=None, anchor=SimpleNamespace(params="own"))
    batch = rewarded()
    watched = attrs.evolve(w, trainers={name: of(name) for name in ("actor", "anchor")})
    adapted = SimpleNamespace(**vars(state) | {"actor": SimpleNamespace(params=SimpleNamespace(base="frozen"))})
    assert "ref_log_prob" in with_reference(batch, adapted, watched)
    assert "ref_log_prob" in with_reference(batch, adapted, watched, "anchor")
    assert asked == [("actor", "frozen"), ("anchor", "own")]


ANCHORED = """
import attrs
from verl_fn.algorithms import Algorithm
from verl_fn.config import Outline, Role
from verl_fn.state import Node, node

@attrs.frozen
class Options:
    pass

@node
class State(Node):
    actor: object
    reference: object
    key: object
    step: int

def mine(options: Options):
    roles = {"actor": Role(), "reference": Role(trained=False, copy_of="actor")}
    init = lambda states, key: State(states["actor"], states["reference"], key, 0)
    empty = lambda s, given, w: None
    return Algorithm(init=init, sample=empty, learn=empty, outline=Outline(roles))
"""


@pytest.mark.parametrize("rank", [0, 4])
def test_a_frozen_copy_is_given_to_init_with_and_without_lora(tmp_path, rank):
    (tmp_path / "mine.py").write_text(ANCHORED)
    more = [f"algorithm.name={tmp_path}/mine.py:mine", f"actor.lora_rank={rank}", "model.path=m"]
    plan = make_plan(load(overrides=more))
    assert ("reference" in plan.roles) == (rank == 0)
    assert blank_state(plan).algorithm.reference is None


@pytest.mark.parametrize("rank", [0, 4])
def test_a_frozen_role_that_is_no_copy_is_a_model_of_its_own(tmp_path, rank):
    (tmp_path / "mine.py").write_text(ANCHORED.replace(', copy_of="actor"', ""))
    plan = make_plan(
        load(overrides=[f"algorithm.name={tmp_path}/mine.py:mine", f"actor.lora_rank={rank}", "model.path=m"])
    )
    frozen = plan.roles["reference"]
    assert (frozen.folder, frozen.trained, frozen.lora) == (str(Path("m").resolve()), False, None)
    assert (plan.roles["actor"].lora is None) == (rank == 0) and "reference" not in plan.copies


def test_a_copy_is_frozen_and_of_another_role():
    with pytest.raises(ConfigError, match=r'a copy of actor is frozen: Role\(trained=False, copy_of="actor"\)'):
        Role(copy_of="actor")
    for other in ("policy", "reference"):
        with pytest.raises(ConfigError, match=f"role reference: copy_of is '{other}', which is no other role; there"):
            Outline({"actor": Role(), "reference": Role(trained=False, copy_of=other)})


# Estimators


def scaled(batch, factor=1.0, name=""):
    advantages = dr_grpo(batch)["advantages"] * factor
    return batch.with_tokens(advantages=advantages, returns=advantages)


def by_row(batch):
    rows = batch.sum_rows(batch["token_level_rewards"])
    return batch.with_rows(advantages=rows, returns=rows)


def short(batch):
    rows = batch.sum_rows(batch["token_level_rewards"])
    return batch.with_tokens(advantages=rows, returns=rows)


def mixed(batch):
    return batch.with_tokens(advantages=batch["token_level_rewards"] - batch["score"])


def nan(batch):
    return scaled(batch, float("nan"))


def outside(batch):
    bad = torch.where(batch["response_mask"] == 0, float("nan"), 1.0)
    return batch.with_tokens(advantages=bad, returns=bad)


def with_signal(batch):
    return scaled(batch).take(torch.arange(len(batch)) > 0)


def unmasked(batch):
    return scaled(batch).with_tokens(response_mask=torch.zeros_like(batch["response_mask"]))


def of_verl(token_level_rewards, response_mask, index, epsilon=1e-6):
    return token_level_rewards, token_level_rewards


@pytest.fixture
def here(monkeypatch):
    """References to the functions of this file."""
    monkeypatch.setattr(
        "verl_fn.algorithms.policy.load_object", lambda reference, key: globals()[reference.partition(":")[2]]
    )


def rewarded():
    w = workers()
    return sample(State(w.trainers["actor"].init(KEY), KEY, 0), TASK.train(KEY, 0, 4), w).batch


def test_options_of_an_estimator(here):
    batch = rewarded()
    plain, doubled = (
        estimator(GRPO(adv_estimator="me:scaled", adv_estimator_kwargs=kwargs))(batch)["advantages"]
        for kwargs in ({}, {"factor": 2.0})
    )
    assert torch.equal(doubled, 2 * plain) and bool(plain.any())
    with pytest.raises(
        ConfigError, match=r"me:scaled takes \(batch, factor, name\), and is called with \(batch, fac="
    ):
        estimator(GRPO(adv_estimator="me:scaled", adv_estimator_kwargs={"fac": 2.0}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "by_row",
            r"me:by_row writes advantages for each row; batch.spread\(values\) makes one value",
        ),
        ("nan", "adv_estimator: me:nan writes advantages that are inf or nan, first in row 0 of 12"),
        ("unmasked", "adv_estimator: me:unmasked changes response_mask, which metrics and minibatches go by"),
        ("with_signal", "adv_estimator: me:with_signal changes the rows, which .* get advantages of 0"),
        (
            "of_verl",
            r"me:of_verl takes \(token_level_rewards, response_mask, index, epsilon\), and is called",
        ),
    ],
)
def test_what_an_estimator_must_not_do(here, name, message):
    with pytest.raises(ConfigError, match=message):
        estimator(GRPO(adv_estimator=f"me:{name}"))(rewarded())


def test_an_estimator_is_not_blamed_for_a_batch_without_tokens_that_count(here):
    batch = rewarded()
    batch = batch.with_tokens(response_mask=torch.zeros_like(batch["response_mask"]))
    assert not estimator(GRPO(adv_estimator="me:unmasked"))(batch)["response_mask"].any()


def test_what_an_estimator_writes_on_tokens_that_do_not_count_is_no_error(here):
    assert "advantages" in estimator(GRPO(adv_estimator="me:outside"))(rewarded())


@pytest.mark.parametrize("name", ["short", "mixed"])
def test_rows_in_place_of_tokens_are_explained(here, name):
    with pytest.raises(ConfigError, match=rf"adv_estimator: me:{name} fails with: .* batch has 12 rows and \d+ to"):
        estimator(GRPO(adv_estimator=f"me:{name}"))(rewarded())


class Conversing(Through):
    """An engine whose samples are conversations with an environment, of one turn each."""

    def generate(self, requests, *, version=None):
        samples = super().generate([attrs.evolve(r, prompt=(4, 5)) for r in requests], version=version)
        return [attrs.evolve(s, outcome=Outcome(s.number, "done", 0.5, 1.0, 1)) for s in samples]


def in_runs(monkeypatch):
    """Returns the fields of the batches that estimators get in steps of algorithms, all of them together."""
    seen = set()

    def noted(of):
        def estimate(batch, *args, **kwargs):
            seen.update(batch.per_token, batch.per_row)
            return of(batch, *args, **kwargs)

        return estimate

    for name in ("gae", "dr_grpo", "optimal_token_baseline", "remax"):
        monkeypatch.setattr(steps, name, noted(getattr(steps, name)))

    def judge(answers):
        return [{"score": 0.5, "acc": 1.0, "pred": a.text, "style": 0.1, "truth": 0.2} for a in answers]

    plain = workers(judge)
    talking = attrs.evolve(plain, rollout=Conversing(plain.rollout), converses=True)
    trainer = plain.trainers["actor"]
    exact = GRPO(adv_estimator="optimal_token_baseline", rollout_is="token", use_kl_in_reward=True)
    for w, algorithm in (
        (plain, ppo(PPO())),
        (plain, remax(ReMax())),
        (plain, grpo(exact)),
        (talking, grpo(GRPO(adv_estimator="dr_grpo"))),
    ):
        w = attrs.evolve(w, trainers=dict.fromkeys(algorithm.outline.roles, trainer))
        state = algorithm.init({name: trainer.init(KEY) for name in w.trainers}, KEY)
        algorithm.step(state, TASK.train(KEY, 0, 4), w)
    return seen


def test_the_batch_of_check_advantage_has_the_fields_of_runs(monkeypatch):
    batch = estimator_batch()
    # An environment has an accuracy of its own, and the functions' is one more number.
    assert {*batch.per_token, *batch.per_row} == in_runs(monkeypatch) - {"reward/acc"}


def test_an_estimator_may_read_the_score():
    def by_score(batch):
        rewards = batch.spread(batch["score"]) * last_of_rows(batch, batch["response_mask"])
        return batch.with_tokens(advantages=dr_grpo(batch.with_tokens(token_level_rewards=rewards))["advantages"])

    check_advantage(by_score)


# Losses


def maker(weight):
    return reinforce + weight * entropy()


@pytest.mark.parametrize("needs", ["logprobs", reinforce.terms[0].fn], ids=["a name", "no arguments"])
def test_needs_is_a_list(needs):
    with pytest.raises(LossError, match=r'write @loss\(needs=\["logprobs"\]\)'):
        loss(needs)


def with_defaults(weight=0.25):
    return maker(weight)


def test_options_of_a_loss(here):
    # All options of a function may have defaults.
    assert [term.factor for term in policy_loss(GRPO(policy_loss="me:with_defaults")).terms] == [1.0, 0.25]
    with pytest.raises(ConfigError, match=r"maker is a function, .* or set algorithm\.policy_loss_kwargs"):
        policy_loss(GRPO(policy_loss="me:maker"))
    made = policy_loss(GRPO(policy_loss="me:maker", policy_loss_kwargs={"weight": 0.5}))
    assert [term.factor for term in made.terms] == [1.0, 0.5]
    misspelled = r"me:maker takes \(weight\), and is called with \(wieght\); did you mean weight\?"
    for name, said in (("reinforce", "is a loss and takes no options, but wieght are given"), ("maker", misspelled)):
        with pytest.raises(ConfigError, match=said):
            policy_loss(GRPO(policy_loss=f"me:{name}", policy_loss_kwargs={"wieght": 0.5}))


@loss(needs=["logprobs"])
def measures_itself(outputs, batch):
    return -outputs.logprobs, {"actor/ppo_kl": token_mean(batch, torch.full_like(outputs.logprobs, 7.0))}


@loss(needs=["entropy"])
def of_entropy(outputs, batch):
    return outputs.entropy, {}


@loss(needs=["logprobs"], level="row")
def of_responses(outputs, batch):
    ratios = batch.sum_rows((outputs.logprobs - batch["old_log_probs"]) * batch["response_mask"]).exp()
    return -ratios, {"ratio": row_mean(batch, ratios.detach())}


def test_what_a_loss_of_the_user_makes_useless_is_noted(here):
    """Weights of tokens do for values of rows, and a single update for a loss that reads ratios, and for no other."""
    by_row = 'algorithm.loss_agg_mode has no effect with algorithm.policy_loss = "me:of_responses", which averages'
    mode = "seq-mean-token-sum"

    def noted(name, prompts=64, lag=0, **more):
        return list(hints(GRPO(policy_loss=f"me:{name}", ppo_mini_batch_size=64, **more), prompts, lag))

    assert [note.startswith(by_row) for note in noted("of_responses", 128, loss_agg_mode=mode)] == [True]
    assert noted("of_responses", 128) == noted("of_responses", 128, loss_agg_mode=mode, entropy_coeff=0.1) == []
    assert noted("reinforce", 128, loss_agg_mode=mode) == []
    (single,) = noted("of_responses")
    assert single.startswith("a step has one update (algorithm.ppo_mini_batch_size = 64 of 64 prompts), in which all")
    assert noted("of_responses", lag=1) == noted("of_responses", ppo_epochs=2) == noted("reinforce") == []
    assert list(hints(GRPO(loss_agg_mode=mode), 64, 0)) == list(hints(SFT(), 64, 0)) == []


@loss(needs=["logits"])
def of_logits(outputs, batch):
    return outputs.logits, {}


def test_needs_that_no_model_gives_are_found_before_a_run(here):
    check_fields(GRPO(policy_loss="me:of_entropy"))
    with pytest.raises(ConfigError, match=r"the needs of me:of_logits: a lm model gives \[.*\], not \['logits'\]"):
        check_fields(GRPO(policy_loss="me:of_logits"))


@loss(needs=["logprobs"])
def scalar(outputs, batch):
    return (-batch["advantages"] * outputs.logprobs).sum(), {}


@loss(needs=["logprobs"])
def of_rows(outputs, batch):
    return -batch.sum_rows(outputs.logprobs), {}


@loss(needs=["logprobs"], level="row")
def at_rows(outputs, batch):
    return -batch.sum_rows(outputs.logprobs), {}


@loss(needs=["candidate_logprobs"])
def over_candidates(outputs, batch):
    return -outputs.candidate_logprobs.sum(-1), {}


@loss(needs=["logprobs"])
def in_place(outputs, batch):
    batch["old_log_probs"].mul_(2.0)
    return -batch["advantages"] * outputs.logprobs, {}


@loss(needs=["logprobs"])
def beside_its_needs(outputs, batch):
    return outputs.logprobs - outputs.entropy, {}


def plain_tensor(batch):
    return batch["token_level_rewards"]


def grouped(batch):
    """Takes two rows for five responses to each problem, of which there are none here."""
    scores = batch.sum_rows(batch["token_level_rewards"]).view(5, -1)
    return scaled(batch, scores.mean())


def logarithm(batch):
    """Is nan for rewards that are not positive."""
    return batch.with_tokens(advantages=batch["token_level_rewards"].log())


def as_rows(batch):
    return batch.with_tokens(advantages=batch["token_level_rewards"].sum(1))


@loss(needs=["logprobs"])
def sums_rows(outputs, batch):
    return outputs.logprobs.sum(1), {}


@loss(needs=["logprobs"])
def misspelled(outputs, batch):
    return -torch.clmap(outputs.logprobs, max=0.0), {}


@loss(needs=["logprobs"])
def undefined(outputs, batch):
    return -outputs.logprobs * margin, {}  # noqa: F821


def without_module(batch):
    import no_such_module  # noqa: F401

    return batch


def of_a_rare_field(batch):
    """Reads a field that a reward function writes, None in a batch without it."""
    rare = next((batch[name] for name in ("reward/rare",) if name in batch), None)
    return batch.with_tokens(advantages=batch.spread(rare.float()))


def of_large_groups(batch):
    """Sets a variable for groups of three rows and more only."""
    if batch["group"].bincount().max() > 2:
        base = batch["score"].mean()
    return batch.with_tokens(advantages=batch.spread(batch["score"] - base))


# Parts that raise an error of their own on the small batch; they may suit a batch of the run, or its machine.
FAILING = ("grouped", "as_rows", "sums_rows", "of_a_rare_field", "without_module", "of_large_groups")


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("policy_loss", "scalar", r"the loss scalar \(.*\) has the shape \(\), but the batch has 19 tokens"),
        ("policy_loss", "of_rows", r"the loss of_rows \(.*\) has the shape \(2,\), but the batch has 19 tokens"),
        ("policy_loss", "in_place", "the loss in_place .* writes into old_log_probs in place"),
        ("policy_loss", "beside_its_needs", "me:beside_its_needs: these outputs have no 'entropy', only"),
        ("policy_loss", "at_rows", None),
        ("policy_loss", "over_candidates", None),
        ("adv_estimator", "plain_tensor", "me:plain_tensor returns a Tensor; an estimator returns batch.with_tokens"),
        ("adv_estimator", "centres", "me:centres writes into token_level_rewards in place"),
        ("adv_estimator", "by_row", "me:by_row writes advantages for each row"),
        ("adv_estimator", "short", "me:short fails with: .* batch has 2 rows and 19 tokens"),
        ("adv_estimator", "mixed", "me:mixed fails with: .* batch has 2 rows and 19 tokens"),
        ("policy_loss", "misspelled", "me:misspelled fails with AttributeError: .*clmap. .at .*py:"),
        ("policy_loss", "undefined", "me:undefined fails with NameError: name 'margin' is not defined"),
        ("adv_estimator", "without_module", None),
        ("adv_estimator", "of_large_groups", None),
        ("adv_estimator", "of_a_rare_field", None),
        ("adv_estimator", "grouped", None),
        ("adv_estimator", "logarithm", None),
        ("adv_estimator", "unmasked", "me:unmasked changes response_mask"),
        ("adv_estimator", "scaled", None),
        ("adv_estimator", "as_rows", None),
        ("policy_loss", "sums_rows", None),
    ],
)
def test_what_parts_return_is_found_before_a_run(here, key, name, message):
    """What depends on numbers of the batch is not, since a batch of the run has others."""
    found = pytest.raises(ConfigError, match=f"algorithm.{key}: {message}") if message else contextlib.nullcontext()
    with found:
        notes = check_fields(GRPO(**{key: f"me:{name}"}))
        assert len(notes) == (name in FAILING), notes
        start = f"algorithm.{key}: me:{name} fails on a made-up batch of two rows: "
        said = notes.values()
        assert all(note.startswith(start) and f"({__file__}:" in note.replace("at ", "") for note in said), notes


def marks(batch):
    return batch.with_tokens(advantages=batch["token_level_rewards"] > 0)


def test_advantages_that_are_true_or_false_become_numbers(here):
    batch = estimator_batch()
    estimated = estimator(GRPO(adv_estimator="me:marks"))(batch)
    assert estimated["advantages"].dtype == torch.float32
    assert torch.equal(estimated["advantages"], (batch["token_level_rewards"] > 0).float())


entropy_first = -0.01 * of_entropy + reinforce


def test_a_loss_reports_the_kl_of_the_update_unless_it_does_so_itself(here):
    batch = estimator_batch().with_tokens(old_log_probs=torch.zeros(estimator_batch().num_tokens))
    batch = batch.with_tokens(advantages=torch.ones(batch.num_tokens))
    outputs = TokenOutputs({name: torch.full((batch.num_tokens,), -0.5) for name in ("logprobs", "entropy")})
    reported = {
        name: policy_loss(GRPO(policy_loss=f"me:{name}"))(outputs, batch)[1]
        for name in ("reinforce", "measures_itself", "of_entropy", "at_rows")
    }
    assert reported["at_rows"]["actor/ppo_kl"].value == 0.5
    assert reported["reinforce"]["actor/ppo_kl"].value == 0.5 and "own/mean" in reported["reinforce"]
    assert reported["measures_itself"]["actor/ppo_kl"].value == 7.0 and reported["of_entropy"] == {}
    second = policy_loss(GRPO(policy_loss="me:entropy_first"))
    assert second(outputs, batch)[1]["actor/ppo_kl"].value == 0.5 and second.terms[0].factor == -0.01
    assert "reinforce (" in described(policy_loss(GRPO(policy_loss="me:reinforce")).terms[0].fn)


def test_a_loss_with_the_parameters_of_verl_says_what_a_loss_takes():
    with pytest.raises(LossError, match=r"the loss mine .* takes \(old_log_prob, log_prob, .*a loss takes \(outp"):

        @loss(needs=["logprobs"])
        def mine(old_log_prob, log_prob, advantages, response_mask):
            return log_prob, {}


def test_a_field_for_each_row_in_a_loss_is_explained():
    @loss(needs=["logprobs"])
    def mine(outputs, batch):
        return batch["score"] * outputs.logprobs, {}

    w = workers()
    state, batch = w.trainers["actor"].init(KEY), aggregate(rewarded())
    with pytest.raises(RuntimeError) as error:
        w.trainers["actor"].forward_backward(state, batch, mine)
    assert any("goes with fields for each token as batch.spread(field)" in note for note in error.value.__notes__)


def per_problem(batch):
    """Every problem weighs the same, and in it every token."""
    _, group = batch["group"].unique(return_inverse=True)
    tokens = torch.zeros(int(group.max()) + 1).index_add(0, group, batch.sum_rows(batch["response_mask"]))
    return batch["response_mask"] / (batch.spread(tokens[group]) * len(tokens))


def too_few(batch):
    return torch.ones(len(batch))


def endless(batch):
    return torch.full((batch.num_tokens,), torch.inf)


def test_a_denominator_of_ones_own(here):
    mode = aggregation(GRPO(loss_agg_mode="me:per_problem"))
    batch = aggregate(rewarded(), mode)
    problems = batch["group"].unique()
    weights = batch.sum_rows(batch["loss_weight"])
    assert [float(weights[batch["group"] == one].sum()) for one in problems] == pytest.approx([0.25] * 4)
    with pytest.raises(TypeError, match=r"too_few .* returns \(12,\); it must return a tensor with a finite weight"):
        aggregate(rewarded(), aggregation(GRPO(loss_agg_mode="me:too_few")))
    with pytest.raises(TypeError, match=r"endless .* returns inf or nan; it must return a tensor with"):
        aggregate(rewarded(), aggregation(GRPO(loss_agg_mode="me:endless")))
    with pytest.raises(ConfigError, match="me:of_verl must be a function from an update batch"):
        aggregation(GRPO(loss_agg_mode="me:of_verl"))


# What check_advantage lets an estimator add


def penalized(batch):
    lengths = batch.sum_rows((batch["response_mask"] != 0).float())
    advantages = dr_grpo(batch)["advantages"] - 0.01 * batch.spread(lengths) * batch["response_mask"]
    return batch.with_tokens(advantages=advantages, returns=advantages)


def against_half(batch):
    mask = batch["response_mask"] != 0
    rows = batch.sum_rows(torch.where(mask, batch["token_level_rewards"], 0.0)) - 0.5
    advantages = torch.where(mask, batch.spread(rows), 0.0)
    return batch.with_tokens(advantages=advantages, returns=advantages)


@pytest.mark.parametrize("function", [penalized, against_half])
def test_baselines_and_penalties_are_known_to_the_law_of_zero(function):
    check_advantage(function, equal_rewards=False)
    check_advantage(function, zero_rewards=False)
    for more in ({}, {"equal_rewards": False, "zero_rewards": True}):
        with pytest.raises(LawViolation, match=r"with neither rewards nor values .* pass zero_rewards=False"):
            check_advantage(function, **more)


def test_an_algorithm_with_more_models_or_other_data_says_how_it_begins_and_samples():
    """One with an actor that learns from samples only says how it learns."""

    def learn(state, experience, w):
        return state, {}

    state = Algorithm(learn=learn).init({"actor": "weights"}, Key.from_seed(3))
    assert (state.actor, state.key.bits, state.step) == ("weights", Key.from_seed(3).bits, 0)
    with pytest.raises(AlgorithmError, match="roles actor, reference needs an init, a function of states and key"):
        Algorithm(learn=learn, outline=Outline({"actor": Role(), "reference": Role(trained=False)}))
    with pytest.raises(AlgorithmError, match="learns from answers needs a sample, a function of state, problems"):
        Algorithm(learn=learn, outline=Outline(learns_from="answers"))


def test_a_held_out_loss_has_weights_of_ones_own(here):
    w = attrs.evolve(workers(), gives_likeliest=False)
    state, problems = SimpleNamespace(actor=w.trainers["actor"].init(KEY)), TASK.train(KEY, 0, 4)
    mean, half = (
        sft(SFT(loss_agg_mode=mode)).evaluate(state, problems, w)["val/loss"] for mode in ("token-mean", "me:halved")
    )
    assert half == pytest.approx(mean / 2) and mean > 0


def halved(batch):
    return batch["response_mask"] / batch["response_mask"].sum() / 2


# What is done in place


def centres(batch):
    batch["token_level_rewards"].sub_(batch["token_level_rewards"].mean())
    return scaled(batch)


def clips(batch):
    batch["score"][batch["score"] > 0.5] = 0.5
    return batch["response_mask"]


WRITES = {
    "a method": lambda t: t.mul_(2.0),
    "a view": lambda t: t[1:].mul_(2.0),
    "an output": lambda t: torch.mul(t, 2.0, out=t),
    "data": lambda t: t.data.mul_(2.0),
    "other data": lambda t: setattr(t, "data", t * 2.0),
    "numpy": lambda t: np.multiply(t.numpy(), 2.0, out=t.numpy()),
    "dlpack": lambda t: torch.from_dlpack(t).mul_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_every_way_of_writing_in_place_is_seen(write, mode):
    with mode():
        batch = rewarded()
        with (
            pytest.raises(ArgumentError, match="mine writes into token_level_rewards in place"),
            read_only("mine", ArgumentError, batch),
        ):
            WRITES[write](batch["token_level_rewards"])
        with read_only("mine", ArgumentError, batch, more=torch.zeros(2, requires_grad=True)):
            batch["token_level_rewards"] * 2.0


def test_an_estimator_may_not_write_in_place(here):
    with pytest.raises(ConfigError, match=r"adv_estimator: me:centres writes into token_level_rewards in place"):
        estimator(GRPO(adv_estimator="me:centres"))(rewarded())


def test_a_function_of_weights_may_not_write_in_place():
    with pytest.raises(
        ArgumentError, match=r"clips \(.*test_own_parts.py:\d+\), a function of .* into score in place"
    ):
        aggregate(rewarded(), clips)


@pytest.mark.parametrize("name", ["old_log_probs", "logprobs"])
def test_a_loss_may_not_write_in_place(name):
    @loss(needs=["logprobs"])
    def mine(outputs, batch):
        (outputs.logprobs.detach() if name == "logprobs" else batch[name]).mul_(2.0)
        return outputs.logprobs * batch["advantages"], {}

    w = workers()
    batch = aggregate(dr_grpo(rewarded()))
    batch = batch.with_tokens(old_log_probs=torch.zeros(batch.num_tokens))
    with pytest.raises(LossError, match=f"the loss mine .* writes into {name} in place"):
        w.trainers["actor"].forward_backward(w.trainers["actor"].init(KEY), batch, mine)


def test_neither_sample_nor_learn_may_write_in_place():
    """What they write into is logged after them: rewards and scores."""

    def shifts(state, problems, w):
        experience = sample(state, problems, w)
        experience.batch["token_level_rewards"].sub_(0.5)
        return experience

    def halves(state, experience, w):
        experience.batch["score"].mul_(0.5)
        return learn(state, experience, w)

    with pytest.raises(AlgorithmError, match=r"shifts \(.*\) writes into token_level_rewards in place"):
        step(own(sample=shifts), workers())
    with pytest.raises(AlgorithmError, match=r"halves \(.*\) writes into score in place"):
        step(own(learn=halves), workers())
