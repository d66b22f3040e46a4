"""The check of environments passes good ones, and names the law that each kind of mistake breaks."""

import random

import numpy as np
import pytest
from talkers import Caller

from verl_fn.environments import Done
from verl_fn.testing import LawViolation, check_environment

PROBLEMS = [{"prompt": "ab>", "answer": "ba"}, {"prompt": "c>", "answer": "c"}]


class Good:
    def reset(self, problem):
        self.answer, self.extra = problem.answer, problem.extra_info
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        if reply == self.answer:
            return Done(1.0)
        return [{"role": "tool", "content": f"{random.random()} {np.random.rand()}"}]


class CountsInClass(Good):
    count = 0

    def step(self, reply):
        CountsInClass.count += 1
        return [{"role": "user", "content": str(CountsInClass.count)}]


class SharesLast(Good):
    """Right one after the other, and wrong side by side."""

    def reset(self, problem):
        SharesLast.last = problem.prompt
        return super().reset(problem)

    def step(self, reply):
        return [{"role": "user", "content": SharesLast.last}]


class OwnGenerator(Good):
    numbers = random.Random(0)

    def step(self, reply):
        return [{"role": "user", "content": str(self.numbers.random())}]


class ReadsJson(Good):
    def step(self, reply):
        return [{"role": "tool", "content": reply.split("=")[1] if "<tool_call>" in reply else "?"}]


class ReadsJsonLater(ReadsJson):
    """Only after its first reply."""

    turns = 0

    def step(self, reply):
        self.turns += 1
        return super().step(reply) if self.turns > 1 else Good.step(self, reply)


class ChangesProblem(Good):
    def reset(self, problem):
        problem.extra_info["seen"] = True
        return super().reset(problem)


class SpeaksForTheModel(Good):
    def step(self, reply):
        return [{"role": "assistant", "content": "me"}]


class Infinite(Good):
    def step(self, reply):
        return Done(float("inf"))


class Silent(Good):
    def reset(self, problem):
        return []


class WrongGroup(Good):
    @staticmethod
    def score_group(conversations):
        return [Done(1.0)]


BROKEN = {
    "Repetition": [CountsInClass, OwnGenerator],
    "Independence": [SharesLast],
    "Replies": [ReadsJson, ReadsJsonLater],
    "Purity": [ChangesProblem],
    "Signature": [SpeaksForTheModel, Infinite, Silent],
    "Group": [WrongGroup],
}


def test_good_environments_pass_and_leave_the_generators_as_they_were(tmp_path):
    before = random.getstate()
    for environment, arguments in ((Good, {}), (Caller, {"size": 1.0, "log": str(tmp_path / "log")})):
        check_environment(environment, PROBLEMS, ["x", "ba", "c"], arguments=arguments)
    assert random.getstate() == before


@pytest.mark.parametrize(("law", "environment"), [(law, one) for law, every in BROKEN.items() for one in every])
def test_each_mistake_breaks_its_law(law, environment):
    with pytest.raises(LawViolation) as error:
        check_environment(environment, PROBLEMS, ["x", "ba", "c", "y"])
    assert error.value.law == law
