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
            case "assistant":
                return [{"role": "assistant", "content": "me"}]
            case "done":
                return Done(len(self.seen))
        return [{"role": "user", "content": f"{len(self.seen)} {self.start} {random.random()}"}]


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
