"""``verl-fn`` for torchrun with one fault, named by ``FAULT``; the tests start it."""

import os
import signal
import sys
import time

from verl_fn.cli import main
from verl_fn.data.rows import DataError
from verl_fn.runs import checkpoints, folder, loop

FAULT, RANK = os.environ["FAULT"], int(os.environ["RANK"])


def before(module, name, act):
    """Let a function of ``module`` do something first."""
    inner = getattr(module, name)

    def changed(*args, **kwargs):
        act(*args)
        return inner(*args, **kwargs)

    setattr(module, name, changed)


def no_data(plan, say):
    raise DataError("/data/train.parquet cannot be read")


def no_room(*args):
    raise OSError(28, "No space left on device")


def stop_once(algorithm, state, *args):
    if state.step == 1:
        os.kill(os.getpid(), signal.SIGTERM)


if FAULT == "slow save, stopped by rank 1":
    if RANK == 0:
        before(checkpoints, "crc_of", lambda path: time.sleep(0.5))
    else:
        before(loop, "advance", stop_once)
elif FAULT == "no data on rank 1" and RANK == 1:
    before(loop, "prepare", no_data)
elif FAULT == "no room on rank 0" and RANK == 0:
    before(folder, "write_manifest", no_room)
elif FAULT == "slow preparation" and RANK == 0:
    before(loop, "prepare", lambda plan, say: time.sleep(8))

sys.exit(main())
