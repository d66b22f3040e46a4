"""The parts of a step on mocks: its ledger, its record, recorded samples, and what its state is made of."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from run_configs import tiny_run
from test_ledger import SAMPLING, asked, mock

from verl_fn.algorithms import AlgorithmError, Experience, Workers
from verl_fn.backends.protocol import Capabilities
from verl_fn.runs import RunError, state
from verl_fn.runs.journal import Recorded, first_difference
from verl_fn.runs.recorder import ask
from verl_fn.runs.state import RunState, at_rest, check_blank, differing_fields, offloaded_roles
from verl_fn.runs.steps import before_update, counts_of, ledger, rows_of
from verl_fn.state import END_REASONS, Batch, Key, node, pack, requests_for
from verl_fn.state.node import Node


def workers(**more):
    parts = {"trainers": {}, "rollout": mock(), "reward": lambda batch, problems: batch, "tokenizer": None}
    return Workers(**parts | {"sampling": SAMPLING} | more)


def test_a_lag_is_counted_over_sampled_tokens_alone():
    fields = {"response_mask": [[0.0, 1.0, 1.0], [0.0, 1.0]], "versions": [[-1, 3, 7], [-1, 6]]}
    batch = Batch.from_rows([[5, 6, 7], [5, 6]], fields)
    report = ledger([counts_of(batch)], batch, step=8, asked=2)
    assert [report[f"training/rollout_lag/{name}"] for name in ("mean", "min", "max")] == [8 / 3, 1.0, 5.0]
    assert (report["rollout/rows_learned"], report["rollout/tokens_learned"]) == (2, 3)
    assert report["rollout/rows_dropped/algorithm"] == report["rollout/tokens_dropped/algorithm"] == 0
    empty = batch.take([])
    report = ledger([counts_of(batch)], empty, 8, 3, {"odd": counts_of(batch.take([1]))})
    assert not any("lag" in name for name in report)
    told = {name.removeprefix("rollout/"): n for name, n in report.items()}
    assert told == {
        "rows_learned": 0, "rows_dropped/engine": 1, "rows_dropped/algorithm": 1, "rows_dropped/odd": 1,
        "tokens_learned": 0, "tokens_dropped/algorithm": 2, "tokens_dropped/odd": 1,
    }  # fmt: skip
    for other in ({"rows": 1}, batch.without("versions")):
        assert ledger([], other, 8, 3) == before_update(other) == {}
    assert before_update(empty) == {"training/rollout_before_update": 0.0}


def test_conversations_are_counted_by_how_they_ended():
    """The second has two rows; what its end was is in the last one. The third's environment failed."""
    failed = END_REASONS.index("env_crashed")
    per_row = {
        "group": [0, 0, 0, 1], "conversation": [0, 1, 1, 0], "env_turns": [2, 1, 4, 1],
        "env_end": [END_REASONS.index("done"), *[END_REASONS.index("length")] * 2, failed],
    }  # fmt: skip
    fields = {"response_mask": [[0.0, 1.0]] * 4, "versions": [[-1, 1]] * 4}
    batch = Batch.from_rows([[5, 6]] * 4, fields, per_row)
    report = ledger([counts_of(batch)], batch.take([0, 1, 2]), 1, 4)
    assert report["env/turns/mean"] == pytest.approx((2 + 4 + 1) / 3) and report["rollout/rows_split"] == 1
    ended = {name: report[f"env/ended/{name}"] for name in END_REASONS}
    assert ended == dict.fromkeys(END_REASONS, 0.0) | dict.fromkeys(("done", "length", "env_crashed"), 1 / 3)
    reasons = ("engine", "algorithm", "env_crashed", "env_timed_out")
    rows = [report[f"rollout/rows_dropped/{reason}"] for reason in reasons]
    assert rows == [1, 0, 1, 0] and report["rollout/tokens_dropped/env_crashed"] == 1


def test_a_step_that_samples_nothing_has_no_ledger():
    w = workers()
    drawn = ask(lambda w: Experience(Batch.from_rows([[1]]), 1, {}), [0], w, ahead=False).drawn
    assert rows_of(drawn, [], 0, w) == {} and (drawn.samples, drawn.asked) == ((), 0)


def test_problems_may_be_taken_until_samples_are_waited_for():
    """What was fetched before says nothing about the number of problems."""

    def sample(w):
        assert w.get("a value of the trainers") == "a value of the trainers"
        assert w.more(2) == [0, 1]
        batch = asked(w, [5], [6])
        w.get(batch)
        return Experience(batch, 2, {})

    submitted = []
    w = workers(
        more=lambda count: list(range(count)), processes=SimpleNamespace(submit=lambda call: submitted.append(call()))
    )
    waiting = ask(sample, range(3), w, ahead=True)
    assert (waiting.problems, waiting.asked) == (5, 2) == (submitted[0].problems, submitted[0].asked)
    assert ask(sample, range(3), w, ahead=False).problems == 5


# Recorded samples


def test_recorded_samples_are_given_call_by_call_to_the_same_prompts():
    calls = [asked(workers(), *prompts) for prompts in ([[5], [6]], [[7]])]
    engine = Recorded(calls)
    assert engine.capabilities == Capabilities() and engine.version is None
    engine.publish(4, None)
    assert engine.version == 4
    engine.sleep()
    engine.wake(["weights"])
    assert engine.version is None
    requests = requests_for([[5], [6]], SAMPLING, Key.from_seed(0))
    assert torch.equal(pack(engine.generate(requests, version=9)).tokens, calls[0].tokens)
    # An environment begins a conversation by a request without a prompt.
    begun = [attrs.evolve(request, prompt=()) for request in requests_for([[7]], SAMPLING, Key.from_seed(0))]
    assert torch.equal(pack(list(engine.stream(begun))).tokens, calls[1].tokens)
    with pytest.raises(RunError, match=r"more often than when it was recorded \(2 times\)"):
        engine.generate(begun)
    for prompts in ([[5], [9]], [[5]]):
        with pytest.raises(RunError, match="the recorded samples are of other prompts, row 1 first"):
            Recorded(calls).generate(requests_for(prompts, SAMPLING, Key.from_seed(0)))
    routed = calls[1].with_tokens(routed_experts=torch.zeros(len(calls[1].tokens), 1, 1, dtype=torch.long))
    assert Recorded([calls[0], routed]).capabilities.routed_experts


def test_the_first_difference_of_two_lines_is_by_name():
    before = {"samples": {"tokens": "a"}, "state": {"actor": {".params['w']": "a"}, "rest": {".step": 1}}}
    now = {"samples": {"tokens": "a"}, "state": {"actor": {".params['w']": "b"}, "rest": {".step": 2}}}
    assert first_difference(before, now, "samples") is None
    assert first_difference(before, now, "state") == "state actor.params['w']: differs from the journal"
    now["samples"]["score"] = "x"
    for one, other in ((before, now), (now, before)):
        assert first_difference(one, other, "samples") == "samples score: differs from the journal"


# State


def test_roles_rest_on_the_cpu_for_two_reasons(tiny, tmp_path, monkeypatch):
    """Their own setting, or an engine on the same GPU; ranks of their own GPU's keep theirs."""
    made = tiny_run(tiny, tmp_path, "algorithm.name=ppo")
    own = ["critic.strategy=fsdp", "critic.fsdp_config.offload_policy=true"]
    plan, moved = tiny_run(tiny, tmp_path, "algorithm.name=ppo", *own), []
    place = lambda state, params, optimizer: moved.append((state, params, optimizer)) or "moved"  # noqa: E731
    trainers = {name: SimpleNamespace(place=place) for name in plan.roles}
    for shares, rests in ((False, {"critic"}), (True, {"actor", "critic"})):
        monkeypatch.setattr(state, "offloads", lambda plan, gpu, shares=shares: shares)
        w = workers(trainers=trainers, processes=SimpleNamespace(gpu_memory=1))
        for name in plan.roles:
            assert at_rest(name, name, plan, w) == ("moved" if name in rests else name)
    assert moved == [(name, "cpu", "cpu") for name in ("critic", "actor", "critic")]
    assert offloaded_roles(plan, 1) == {"actor"} and offloaded_roles(made, 1) == {"actor", "critic"}
    apart = attrs.evolve(made, ray=attrs.evolve(made.ray, separate=("critic",)))
    assert offloaded_roles(apart, 1) == {"actor", "critic"}, "in one process all share"
    on_ray = attrs.evolve(apart, driver=attrs.evolve(apart.driver, kind="ray"))
    assert offloaded_roles(on_ray, 1) == {"actor"} and offloaded_roles(made, None) == frozenset()


@node
class Own(Node):
    key: Key
    step: int
    actor: object


class Odd(Own):
    pass


def test_states_that_cannot_be_saved_are_refused_before_models_are_loaded(tiny, tmp_path, monkeypatch):
    plan = tiny_run(tiny, tmp_path, "algorithm.name=grpo", "rollout.n=2")
    key = Key.from_seed(0)
    for kind, message in (
        (lambda **fields: Own(**fields), None),
        (lambda **fields: Odd(**fields), r"is a Odd, and a run saves only nodes: .* class Odd\(Node\)"),
        (lambda **fields: SimpleNamespace(**fields), "is a SimpleNamespace, and a run saves only nodes"),
        (lambda key, step, **fields: Lacks(step), "Lacks, has no field actor, key; it needs key, step and .*actor"),
    ):
        made = kind(key=key, step=0, actor=None)
        monkeypatch.setattr(state, "blank_state", lambda plan, made=made: RunState(made, cursor=0))
        if message is None:
            check_blank(plan)
        else:
            with pytest.raises(AlgorithmError, match=message):
                check_blank(plan)

    def fails(error):
        def raises(plan):
            raise error

        return raises

    # What reads training states is looked at when they are there; an evaluation has only some of the roles.
    for error in (AttributeError("params"), TypeError("None"), KeyError("actor")):
        monkeypatch.setattr(state, "blank_state", fails(error))
        check_blank(plan)
    monkeypatch.setattr(state, "blank_state", fails(AlgorithmError("no such option")))
    with pytest.raises(AlgorithmError, match="no such option"):
        check_blank(plan)
    check_blank(attrs.evolve(plan, roles={}))


@node
class Lacks(Node):
    step: int


def test_fields_that_other_settings_begin_otherwise(tiny, tmp_path):
    def plan(*more):
        return tiny_run(tiny, tmp_path, "algorithm.name=ppo", "algorithm.use_kl_in_reward=true", *more)

    same = plan("actor.optim.lr=0.5", "trainer.total_training_steps=9")
    assert differing_fields(plan(), same) == []
    assert differing_fields(plan(), plan("trainer.seed=3")) == ["key"]
    (kl,) = differing_fields(plan(), plan("algorithm.kl_ctrl.kl_coef=0.5"))
    assert kl == "kl" and "key" in differing_fields(tiny_run(tiny, tmp_path, "algorithm.name=sft"), plan())
