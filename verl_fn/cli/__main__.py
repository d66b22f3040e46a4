"""``python -m verl_fn.cli``, also under torchrun."""

import os

from .main import run, run_rank

if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        run_rank()
    raise SystemExit(run())
