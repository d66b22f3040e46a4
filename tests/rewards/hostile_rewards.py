"""Rewards as nobody should write them: ``run`` does what the response names."""

import asyncio
import atexit
import builtins
import ctypes
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping


def run(data_source, solution_str, ground_truth, extra_info=None):
    return globals()[solution_str](extra_info)


class Command:
    """Runs a command in whatever process unpickles it."""

    def __reduce__(self):
        return os.system, ("touch stolen",)


class Text(Command, str):
    pass


class Number(Command, float):
    pass


class Shapeless:
    shape = ()

    def __float__(self):
        raise ZeroDivisionError("no number")


class Unspeakable:
    def __repr__(self):
        raise ValueError("no text")


class Liar:
    @property
    def __class__(self):
        raise OSError("no class")


class Endless(Mapping):
    def __getitem__(self, key):
        return 1.0

    def __iter__(self):
        return map(str, itertools.count())

    def __len__(self):
        return 1


class Broken(Mapping):
    def __getitem__(self, key):
        raise MemoryError("no item")

    def __iter__(self):
        raise MemoryError("no key")

    def __len__(self):
        raise MemoryError("no length")


class Unique(BaseException):
    pass


class Silent(Exception):
    def __str__(self):
        raise SystemExit


def _throw(error):
    raise error


def _forever():
    while True:
        time.sleep(0.01)


def _descriptors():
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def _write_everywhere(data):
    for number in _descriptors():
        try:
            os.set_blocking(number, True)
            os.write(number, data)
        except OSError:
            pass


def _in_background(function):
    threading.Thread(target=function, daemon=True).start()
    return 1


# Values.

text = lambda info: Text("1.0")  # noqa: E731
number = lambda info: Number(0.5)  # noqa: E731
text_as_key = lambda info: {"score": 1, Text("mine"): 2}  # noqa: E731
text_as_pred = lambda info: {"score": 1, "pred": Text("4")}  # noqa: E731
command = lambda info: Command()  # noqa: E731
command_as_metric = lambda info: {"score": 1, "mine": Command()}  # noqa: E731
command_in_a_list = lambda info: {"score": 1, "mine": [Command()]}  # noqa: E731
pair = lambda info: (1.0, 2.0)  # noqa: E731
octets = lambda info: b"1"  # noqa: E731
key_of_tuple = lambda info: {"score": 1, (1, 2): 3}  # noqa: E731
key_of_none = lambda info: {"score": 1, None: 3}  # noqa: E731
metric_of_bytes = lambda info: {"score": 1, "mine": b"1"}  # noqa: E731
shapeless = lambda info: Shapeless()  # noqa: E731
unspeakable = lambda info: Unspeakable()  # noqa: E731
liar = lambda info: Liar()  # noqa: E731
broken_mapping = lambda info: Broken()  # noqa: E731
huge = lambda info: 1e300  # noqa: E731
huge_whole = lambda info: 10**5000  # noqa: E731
long_pred = lambda info: {"score": 1, "pred": "x" * 20_000_000}  # noqa: E731
many_metrics = lambda info: {"score": 1, **{f"m{i}": i for i in range(2000)}}  # noqa: E731
generator = lambda info: (x for x in [1])  # noqa: E731
a_class = lambda info: Command  # noqa: E731


# Exceptions.

unique = lambda info: _throw(Unique("mine"))  # noqa: E731
silent = lambda info: _throw(Silent())  # noqa: E731
interrupt = lambda info: _throw(KeyboardInterrupt())  # noqa: E731
closes = lambda info: _throw(GeneratorExit())  # noqa: E731
sys_exit = lambda info: sys.exit("so long")  # noqa: E731
long_message = lambda info: _throw(ValueError("x\n" * 10**6))  # noqa: E731
allocates = lambda info: bytearray(2**62)  # noqa: E731
recurses = lambda info: recurses(info) + 1  # noqa: E731


async def _cancelled():
    raise asyncio.CancelledError


coroutine = lambda info: _cancelled()  # noqa: E731


# Surroundings, left as they were for the next function or not.


def changes_its_input(info):
    info["seen"].append(1)
    return len(info["seen"])


def prints_megabytes(info):
    print("x" * 2**20)
    return 1


def redirects_stdout(info):
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- as a user writes it
    return 1


def changes_folder(info):
    os.chdir("/")
    return 1


def is_the_first_to_end_without_memory(info):
    with open("/proc/self/oom_score_adj") as file:
        return float(file.read()) / 1000


def exits_in_a_thread(info):
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
    return 1


def leaves_a_thread(info):
    threading.Thread(target=_forever).start()
    return 1


def registers_an_exit(info):
    atexit.register(_forever)
    return 1


# Processes and descriptors.

exits = lambda info: os._exit(0)  # noqa: E731
aborts = lambda info: os.kill(os.getpid(), signal.SIGABRT)  # noqa: E731
stops_itself = lambda info: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
sleeps = lambda info: _forever()  # noqa: E731
reads_null = lambda info: ctypes.string_at(0)  # noqa: E731
endless_mapping = lambda info: Endless()  # noqa: E731


def kills_its_keeper(info):
    os.kill(os.getppid(), signal.SIGKILL)
    _forever()


def kills_its_group(info):
    os.killpg(0, signal.SIGKILL)


def forks(info):
    os.fork()
    return 1


def forks_and_raises_in_the_copy(info):
    return 1 if os.fork() else 1 / 0


def forks_many(info):
    for _ in range(3):
        os.fork()
    return 1


def closes_descriptors(info):
    os.closerange(0, 256)
    return 1


def closes_the_rest(info):
    os.closerange(3, 256)
    _forever()


def writes_garbage(info):
    _write_everywhere(b"\x80\x05garbage\x00" * 10)
    return 1


def writes_lines(info):
    _write_everywhere(b"[0]\n" * 10)
    return 1


def writes_without_end(info):
    while True:
        _write_everywhere(b"x" * 2**16)


def writes_slowly(info):
    while True:
        _write_everywhere(b"x")
        time.sleep(0.01)


def writes_from_a_thread(info):
    wrote = threading.Event()

    def write():
        for _ in range(1000):
            _write_everywhere(b"x\n")
            wrote.set()

    _in_background(write)
    wrote.wait()
    return 1


def raises_later(info):
    signal.signal(signal.SIGALRM, lambda *_: _throw(Unique("later")))
    signal.setitimer(signal.ITIMER_REAL, 1e-6)
    return 1


def ignores_signals(info):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    _forever()


def replaces_json(info):
    json.dumps = json.loads = json.JSONEncoder = None
    return 1


def replaces_builtins(info):
    builtins.isinstance = builtins.len = builtins.str = None
    return 1


def forgets_modules(info):
    sys.modules.clear()
    return 1


def limits_files(info):
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    return 1


def drops_stdout(info):
    sys.stdout = sys.stderr = None
    return 1


# What survives the end of a process group. Each holds the pipe ``held``.


def _holds():
    with open("held", "w") as held:
        return subprocess.Popen(["sleep", "1000"], stdout=held, start_new_session=True)


def starts_a_session(info):
    _holds()
    _forever()


def starts_a_session_and_returns(info):
    _holds()
    return 1


def starts_a_session_and_exits(info):
    _holds()
    os._exit(1)


def forks_twice(info):
    if not os.fork():
        os.setsid()
        if not os.fork():
            _holds()
            _forever()
        os._exit(0)
    _forever()


def leaves_its_group(info):
    with open("held", "w"):
        os.setpgid(0, os.getppid())
        _forever()
