"""Rows of several lengths, an optimizer, and changes of a model's config, for tests of one process."""

import json

import torch

from verl_fn.state import Batch
from verl_fn.steps import adamw, aggregate, chain, clip_by_global_norm, constant

OPTIMIZER = chain(clip_by_global_norm(1.0), adamw(constant(1e-3)))
LENGTHS = (5, 9, 3, 12, 2, 17)


def ragged(seed=0, lengths=LENGTHS, vocab=13):
    rng = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, vocab, (n,), generator=rng) for n in lengths]
    mask = [[0.0] + [1.0] * (n - 1) for n in lengths]
    return aggregate(Batch.from_rows(rows, {"response_mask": mask}))


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
