"""``verl-fn`` for torchrun with one fault, named by ``FAULT``; the tests start it."""

import os
import signal
import sys
import time

from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.config import ModelError
from verl_fn.cli.main import run_rank
from verl_fn.runs import checkpoints, folder, loop

FAULT, RANK = os.environ["FAULT"], int(os.environ["RANK"])


def before(module, name, act):
    """Let a function of ``module`` do something first."""
    inner = getattr(module, name)

    def changed(*args, **kwargs):
        act(*args)
        return inner(*args, **kwargs)

    setattr(module, name, changed)


def no_model(*args):
    raise ModelError("/data/model cannot be read")


def no_room(*args):
    raise OSError(28, "No space left on device")


def interrupted(*args):
    raise KeyboardInterrupt


def stop_in_step_2(*args, updates=[]):  # noqa: B006
    updates.append(None)
    if len(updates) == 2:
        os.kill(os.getpid(), signal.SIGTERM)


if FAULT == "slow save, stopped by rank 1":
    if RANK == 0:
        before(checkpoints, "crc_of", lambda path: time.sleep(0.25))
    else:
        before(Fsdp, "apply_update", stop_in_step_2)
elif FAULT == "no model on rank 1" and RANK == 1:
    before(Fsdp, "_hollow", no_model)
elif FAULT == "no room on rank 0" and RANK == 0:
    before(folder, "seal", no_room)
elif FAULT == "slow preparation" and RANK == 0:
    before(loop, "prepare", lambda plan, say: time.sleep(6))
elif FAULT == "slow update" and RANK == 1:
    before(Fsdp, "forward_backward", lambda *args: time.sleep(7))
elif FAULT == "rank 0 is interrupted" and RANK == 0:
    before(Fsdp, "forward_backward", interrupted)
elif FAULT == "rank 1 ends" and RANK == 0:
    # Once it no longer stops at the end of a step, and before it has said why it ends.
    before(folder.Run, "saved", lambda *args: time.sleep(2 if sys.exc_info()[0] else 0))
elif FAULT == "rank 1 ends" and RANK == 1:
    before(Fsdp, "forward_backward", lambda *args: os._exit(3))

run_rank()
