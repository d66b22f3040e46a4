"""Environments for tests: what a reply says is what they do."""

import os
import random
import time

from verl_fn.environments import Done


class Talker:
    """Answers with the number of replies that it has had and with its own random number, which tests compare."""

    def reset(self, problem):
        self.seen, self.start = [], random.random()
        if problem.prompt == "crash":
            os._exit(3)
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        self.seen.append(reply)
        match reply:
            case "hang":
                time.sleep(1000)
            case "crash":
                os._exit(3)
            case "raise":
                raise KeyError("no such tool")
            case "number":
                return 7
            case "nan":
                return Done(float("nan"))
            case "text":
                return Done("0.5")
            case "acc":
                return Done(0.5, acc="1")
            case "nested":
                return [{"role": "user", "content": [{"role": "user", "content": "2+3"}]}]
            case "assistant":
                return [{"role": "assistant", "content": "me"}]
            case "half":
                return [{"role": "user", "content": "\ud83d"}]
            case "done":
                return Done(len(self.seen))
        return [{"role": "user", "content": f"{len(self.seen)} {self.start} {random.random()}"}]


END = Done(1.0)


class Stepless:
    def reset(self, problem):
        return []


class WithArguments(Talker):
    def __init__(self, size):
        self.size = size


class Patient:
    """Ends at the second reply, with a reward of as many tenths as it has characters, and crashes on long ones."""

    def reset(self, problem):
        self.replies, self.code = 0, random.randint(10, 99)
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        self.replies += 1
        if len(reply) > 7:
            raise ValueError("too long")
        return Done(len(reply) / 10) if self.replies == 2 else [{"role": "tool", "content": str(self.code)}]


class Caller:
    """Has tools, and arguments; a file shows when an instance is closed."""

    def __init__(self, size, log=None, closing=0.0):
        self.size, self.log, self.closing = size, log, closing
        self.tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    def reset(self, problem):
        return [{"role": "system", "content": str(self.size)}, {"role": "user", "content": problem.prompt}]

    def step(self, reply):
        if reply == "fail":
            raise ValueError("no such tool")
        return Done(self.size)

    def close(self):
        time.sleep(self.closing)
        with open(self.log, "a") as file:
            file.write("closed\n")


class Ranked:
    """Ends a conversation at a reply of digits; the digits of a group are ranked, and tests see how often."""

    def __init__(self, log=None):
        self.log, self.said = log, None

    def reset(self, problem):
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        if reply == "crash":
            os._exit(3)
        if not reply.isdigit():
            return [{"role": "user", "content": f"? {random.random()}"}]
        self.said = reply
        return Done(0.5)

    @staticmethod
    def score_group(conversations):
        numbers = [int(one.said) for one in conversations]
        if conversations[0].log:
            with open(conversations[0].log, "a") as file:
                file.write(f"{os.getpid()} {numbers} {random.random()}\n")
        match max(numbers):
            case 666:
                raise KeyError("no judge")
            case 777:
                os._exit(3)
            case 888:
                time.sleep(1000)
            case 999:
                return [Done(1.0)] * (len(numbers) + 1)
        return [Done(sorted(numbers).index(number) / 10, acc=float(number == max(numbers))) for number in numbers]

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write("closed\n")


class RanksItself(Talker):
    def score_group(self, others):
        return []


class Compared(Patient):
    """The same, with a reward for the longest last replies of a group."""

    def step(self, reply):
        self.length = len(reply)
        return super().step(reply)

    @staticmethod
    def score_group(conversations):
        longest = max(one.length for one in conversations)
        return [Done(10.0 + (one.length == longest) + random.random() / 10) for one in conversations]
