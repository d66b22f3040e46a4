"""What the workers of a Ray cluster import, on every node, before anything is built on them.

python -m verl_fn.levels.on_ray OUT/request.json    # prints a line BLOCKED and why, if they cannot be used
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl_fn.driver.ray import on_nodes

from . import provenance, smoke
from .subject import Request


def main(argv: Sequence[str]) -> int:
    """Prints what a worker on each node imports."""
    request = Request.read(Path(argv[0]))
    with tempfile.TemporaryDirectory() as folder:
        plan = smoke.plan_of(request, Path(folder))
    reasons: list[str] = []
    for node, probed in on_nodes(plan.ray, provenance.imported).items():
        print(node, probed.get("files") or probed.get("error"), flush=True)
        reasons += filter(None, [provenance.why_not(probed, request.bridge, f"a worker of {node}")])
    for reason in reasons:
        print(f"BLOCKED {reason}", flush=True)
    return int(bool(reasons))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
