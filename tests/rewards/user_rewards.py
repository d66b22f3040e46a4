"""Functions as users write them, right ones and bad ones: the tests' mine.py."""

import asyncio
import os
import random
import re
import subprocess
import time

from helper import same

event = None


def exact(data_source, solution_str, ground_truth, extra_info=None):
    print("exact was here")
    return same(solution_str, ground_truth)


def full(data_source, solution_str, ground_truth, extra_info=None):
    return {
        "score": 0.5,
        "acc": solution_str == ground_truth,
        "pred": solution_str.upper(),
        "length": len(solution_str),
        "level": extra_info["level"],
        "from_src": data_source == "src",
        "note": "a text",
    }


async def meeting(data_source, solution_str, ground_truth, extra_info=None):
    global event
    event = event or asyncio.Event()
    # The first waits for the last: one after the other would never end.
    if solution_str == "last":
        event.set()
    await event.wait()
    return len(solution_str)


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(solution_strs) + len(text) for text in solution_strs]


def short_by_one(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0] * (len(solution_strs) - 1)


def keyed(data_sources, solution_strs, ground_truths, extra_infos):
    return dict.fromkeys(range(len(solution_strs)), 1.0)


def process(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0, "pid": os.getpid()}


def takes_a_while(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.4)
    return 1


def sleeps(data_source, solution_str, ground_truth, extra_info=None):
    return time.sleep(1000) if solution_str == "bad" else 1


def backtracks(data_source, solution_str, ground_truth, extra_info=None):
    print("backtracks was here")
    return 1 if solution_str != "bad" else bool(re.match(r"(a+)+$", "a" * 60 + "b"))


async def waits(data_source, solution_str, ground_truth, extra_info=None):
    return await asyncio.sleep(1000) if solution_str == "bad" else 1


async def blocks(data_source, solution_str, ground_truth, extra_info=None):
    return time.sleep(1000) if solution_str == "bad" else 1


def batch_sleeps(data_sources, solution_strs, ground_truths, extra_infos):
    time.sleep(1000)


def raises(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        return int(same)  # the line that is named
    return 1


async def times_out_itself(data_source, solution_str, ground_truth, extra_info=None):
    raise TimeoutError("no answer from the judge")


def exits(data_source, solution_str, ground_truth, extra_info=None):
    return os._exit(3) if solution_str == "bad" else 1


def crashes(data_source, solution_str, ground_truth, extra_info=None):
    return os.kill(os.getpid(), 11) if solution_str == "bad" else 1


def quits(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(1)


def returns(data_source, solution_str, ground_truth, extra_info=None):
    return eval(ground_truth) if solution_str == "bad" else 1


def runs(data_source, solution_str, ground_truth, extra_info=None):
    print("runs was here")
    with open("held", "w") as held:
        return 1 if solution_str != "bad" else subprocess.run(["sleep", "1000"], stdout=held)


def leaves_a_process_and_exits(data_source, solution_str, ground_truth, extra_info=None):
    with open("held", "w") as held:
        subprocess.Popen(["sleep", "1000"], stdout=held)
    os._exit(3)


def disconnects_and_exits(data_source, solution_str, ground_truth, extra_info=None):
    os.closerange(3, 100)
    time.sleep(0.3)
    os._exit(3)


def disconnects(data_source, solution_str, ground_truth, extra_info=None):
    os.closerange(3, 100)
    time.sleep(1000)


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def runs_code(data_source, solution_str, ground_truth, extra_info=None):
    return 1 if solution_str != "bad" else exec(compile("1/0", "", "exec"))


def raises_unspeakable(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        raise Unspeakable
    return 1


def unspeakable(data_source, solution_str, ground_truth, extra_info=None):
    return Unspeakable() if solution_str == "bad" else 1


async def unspeakable_async(data_source, solution_str, ground_truth, extra_info=None):
    return Unspeakable() if solution_str == "bad" else 1


def unspeakable_batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [Unspeakable() if text == "bad" else 1 for text in solution_strs]


async def ignores_its_end(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.1)
    while solution_str == "bad":
        try:  # noqa: SIM105 -- as a user writes it
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
    return 1


async def blocks_after_a_while(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "good":
        return 1
    await asyncio.sleep(1000 if solution_str == "waits" else 0.1)
    time.sleep(1000)


async def ends_its_task(data_source, solution_str, ground_truth, extra_info=None):
    raise asyncio.CancelledError if solution_str == "bad" else SystemExit(2)


def draws(data_source, solution_str, ground_truth, extra_info=None):
    import numpy

    return {"score": random.random(), "numpy": numpy.random.random(), "hash": hash(solution_str) % 10**6}


async def draws_async(data_source, solution_str, ground_truth, extra_info=None):
    import numpy

    started = random.random() + numpy.random.random()
    await asyncio.sleep(0.02 * int(ground_truth))
    return {"score": random.random(), "started": started, "numpy": numpy.random.random()}


def draws_batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [random.random() for _ in solution_strs]


DRAWN = random.random()


def drawn_at_import(data_source, solution_str, ground_truth, extra_info=None):
    return DRAWN


running = 0


async def counts(data_source, solution_str, ground_truth, extra_info=None):
    global running
    running += 1
    at_once = running
    await asyncio.sleep(0.05)
    running -= 1
    return at_once


def three(data_source, solution_str, ground_truth):
    return 1
