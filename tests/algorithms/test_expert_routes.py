"""Which passes of a step follow the experts of which recording."""

from types import SimpleNamespace

import attrs
import pytest
import torch

from verl_fn.algorithms.experience import annotate
from verl_fn.algorithms.workers import Clock, Workers, get_here
from verl_fn.backends.mock import MockRollout
from verl_fn.backends.protocol import Capabilities, Sampling
from verl_fn.state import Batch, TokenOutputs

PLAIN = [("actor", ("logprobs", "entropy")), ("base", ("logprobs",))]
GIVEN, RECORDED = torch.tensor([[[1]], [[2]]]), torch.tensor([[[3]], [[4]]])


class Trainer:
    """Keeps the calls of ``forward``: the parameters, the outputs, and whether there were experts to replay."""

    def __init__(self):
        self.calls = []

    def forward(self, params, batch, needs):
        self.calls.append((getattr(params, "name", "base"), tuple(needs), "routed_experts" in batch))
        outputs = {name: torch.zeros(batch.num_tokens) for name in needs}
        if "routed_experts" in needs:
            outputs["routed_experts"] = batch.per_token.get("routed_experts", RECORDED)
        return TokenOutputs(outputs)


# The engine may record since later than this batch was drawn.
@pytest.mark.parametrize(("given", "records"), [(False, False), (True, True), (False, True)])
def test_old_log_probs_follow_the_engine_and_the_reference_is_free(given, records):
    trainer, engine = Trainer(), MockRollout({}, Capabilities(routed_experts=records))
    w = Workers({"actor": trainer}, engine, None, None, Sampling(4), router_replay=True)
    batch = Batch.from_rows([[1, 2]], {"response_mask": [[0.0, 1.0]]})
    batch = batch.with_tokens(routed_experts=GIVEN) if given else batch
    params = SimpleNamespace(name="actor", base=SimpleNamespace(name="base"))
    state = SimpleNamespace(actor=SimpleNamespace(params=params), reference=None)
    annotated = annotate(batch, state, w, Clock(get_here), reference=True, outputs=("logprobs",))
    assert trainer.calls == [("actor", ("logprobs", "routed_experts"), given), ("base", ("logprobs",), False)]
    assert torch.equal(annotated["routed_experts"], GIVEN if given else RECORDED)
    annotate(batch, state, attrs.evolve(w, router_replay=False), Clock(get_here), reference=True)
    assert trainer.calls[2:] == [(name, needs, given) for name, needs in PLAIN]
