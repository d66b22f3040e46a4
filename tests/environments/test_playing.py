"""A worker's side of environments in this process: which calls an instance gets, and what it may return."""

import functools
import random
from types import SimpleNamespace

import pytest

from verl_fn.environments import Done
from verl_fn.pool import playing
from verl_fn.pool.playing import CLOSES, Server, checked, opening, scores
from verl_fn.pool.worker import Failed

PROBLEM = {"prompt": "2+3?", "answer": "5", "id": 0}
USER = {"role": "user", "content": "x"}


class Noting:
    """Notes its calls, and draws a number in each."""

    calls = ()

    def __init__(self, name="a"):
        self.name = name

    def reset(self, problem):
        self.calls.append(("reset", self.name, problem.prompt, random.random()))
        return [USER]

    def step(self, reply):
        self.calls.append(("step", reply, random.random()))
        if reply == "raise":
            raise ValueError("odd")
        return Done(len(reply)) if reply.startswith("end") else [USER]

    def close(self):
        self.calls.append(("close",))
        if self.name == "sticks":
            raise OSError("it sticks")


class Ranked(Noting):
    @staticmethod
    def score_group(instances):
        return [Done(float(i)) for i, _ in enumerate(instances)]


@pytest.fixture
def served():
    """A server of an environment, what it has sent, and the calls of its instances."""

    def made(cls=Noting, *names):
        cls.calls, sent = [], []
        return Server(functools.partial(cls, *names), sent.append), sent, cls.calls

    return made


def names(calls):
    return [(call[0], call[1]) if call[0] == "step" else call[0] for call in calls]


def test_an_instance_gets_the_last_reply_or_the_whole_conversation_again(served):
    server, sent, calls = served()
    server.answer(3, 7, 1, PROBLEM, [])
    server.answer(4, 7, 1, PROBLEM, ["a"])
    assert sent == [[3, None], [3, {"messages": [USER]}], [4, None], [4, {"messages": [USER]}]]
    assert names(calls) == ["reset", ("step", "a")]
    # One reply was lost with another process.
    sent.clear()
    server.answer(5, 7, 1, PROBLEM, ["a", "b", "c"])
    assert names(calls)[2:] == ["close", "reset", ("step", "a"), ("step", "b"), ("step", "c")]
    assert sent == [[CLOSES, None], *[[5, None]] * 4, [5, {"messages": [USER]}]]
    again = [call for call in calls if call[:2] in (("reset", "a"), ("step", "a"))]
    assert again[:2] == again[2:], "with the same random numbers"
    sent.clear()
    server.answer(6, 7, 1, PROBLEM, ["a", "b", "c", "end"])
    assert names(calls)[-2:] == [("step", "end"), "close"]
    assert sent == [[6, None], [CLOSES, None], [6, {"end": [3.0, 1.0]}]]


def test_conversations_have_numbers_of_their_own_by_seed_and_turn(served):
    drawn = {}
    for number, seed in ((1, 5), (2, 5), (3, 6)):
        server, _, calls = served()
        server.answer(0, number, seed, PROBLEM, ["a"])
        drawn[number] = [call[-1] for call in calls]
    assert drawn[1] == drawn[2] and not set(drawn[1]) & set(drawn[3]) and len(set(drawn[1])) == 2


def test_instances_that_fail_or_are_left_are_closed_whatever_that_raises(served, capsys):
    server, sent, calls = served(Noting, "sticks")
    server.answer(0, 7, 1, PROBLEM, ["raise"])
    assert names(calls)[-1] == "close" and sent[-1][0] == 0 and sent[-1][1].startswith("raised ValueError: odd")
    assert "close of Noting raised OSError: it sticks" in capsys.readouterr().err
    for number in (8, 9):
        server.answer(0, number, 1, PROBLEM, [])
    del calls[:]
    server.forget()
    server.forget()
    assert names(calls) == ["close", "close"]
    assert capsys.readouterr().err.count("it sticks") == 2
    for other in (SimpleNamespace(close="no method"), object()):
        playing.close(other)
    assert capsys.readouterr().err == ""


def test_a_group_is_scored_when_all_have_ended_and_closed_even_if_that_fails(served):
    server, sent, calls = served(Ranked)
    for number, reply in ((1, "end"), (2, "end!")):
        server.answer(0, number, 5, PROBLEM, [reply])
    assert "close" not in names(calls)
    del sent[:]
    server.score(9, 3, [(1, 5, PROBLEM, ["end"]), (2, 5, PROBLEM, ["end!"])])
    assert sent[0] == [9, None] and sent[-1] == [9, {"ends": [[0.0, 0.0], [1.0, 1.0]]}]
    assert names(calls)[-2:] == ["close", "close"] and names(calls).count("reset") == 2
    del sent[:], calls[:]
    server.score(9, 3, [(1, 5, PROBLEM, ["end"]), (2, 5, PROBLEM, ["goes on"])])
    assert "did not end a conversation again" in sent[-1][1] and names(calls).count("close") == 2


def test_first_messages_are_a_list_and_may_hold_what_the_model_has_said():
    said = [USER, {"role": "assistant", "content": "5", "tool_calls": [{"id": 1}]}]
    assert checked(tuple(said), first=True) == {"messages": said}
    for value in (Done(1.0), [], "x", [USER, "x"]):
        with pytest.raises(Failed, match=r"^returned .*; it must return a list of messages"):
            checked(value, first=True)
    for role, content in ((None, "x"), ("user", None), ("user", 7)):
        with pytest.raises(Failed, match=r"role and content must be strings$"):
            checked([{"role": role, "content": content}])
    with pytest.raises(Failed, match="images are shown only in the first messages, by the mark <image>"):
        checked([{"role": "tool", "content": [{"type": "text"}, {"type": "image_url"}]}])
    with pytest.raises(Failed, match="returned messages that cannot be JSON"):
        checked([USER | {"at": {1}}])
    with pytest.raises(Failed, match="returned messages that cannot be JSON"):
        checked([USER | {"at": float("nan")}])


def test_tools_are_a_list_of_schemas_or_none():
    def opened(**fields):
        return opening(SimpleNamespace(reset=lambda problem: [USER], **fields), None)

    said = [{"role": "assistant", "content": "5"}]
    assert opening(SimpleNamespace(reset=lambda problem: said), None) == {"messages": said}
    assert opened() == opened(tools=None) == opened(tools=[]) == {"messages": [USER]}
    assert opened(tools=({"a": 1},)) == {"messages": [USER], "tools": [{"a": 1}]}
    for tools in ("add", [{"a": 1}, "add"], {"a": 1}):
        with pytest.raises(Failed, match=r"has the tools .*; they must be a list of JSON schemas"):
            opened(tools=tools)
    with pytest.raises(Failed, match="returned tools that cannot be JSON"):
        opened(tools=[{"a": {1}}])


def test_the_end_of_a_conversation_is_two_numbers():
    assert checked(Done(-2, acc=0.25)) == {"end": [-2.0, 0.25]} and checked(Done(True, acc=1)) == {"end": [1.0, 1.0]}
    for reward, acc, problem in (
        (1.0, 1.5, "returned 1.5 as acc; it must be"), (1.0, -0.1, "as acc"), (None, 1.0, "Done with None"),
        (float("inf"), 1.0, "finite"), (1.0, float("nan"), "finite|as acc"),
    ):  # fmt: skip
        with pytest.raises(Failed, match=problem):
            checked(SimpleNamespace(reward=reward, acc=acc))
    for values in ([Done(1.0)], [Done(1.0)] * 3, [Done(1.0), 0.5], None):
        with pytest.raises(Failed, match=r"from score_group; it must return .* for each of the 2 conversations"):
            scores(values, 2)
    assert scores((Done(1.0), Done(0.0)), 2) == {"ends": [[1.0, 1.0], [0.0, 0.0]]}
