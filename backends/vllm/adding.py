"""Gives vLLM its requests: one for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from verl_fn.backends.protocol import Request

from .adapters import adapter_request


def add(
    engine: Any, requests: Sequence[Request], call: int, first: int, end_tokens: Iterable[int], *, adapted: bool
) -> dict[str, int]:
    """Adds a request of vLLM for each sample.

    Args:
        engine: vLLM's.
        requests: their draws are ours; of vLLM's own settings only the ones that end a response remain.
        call: the number of the call, a part of their names.
        first: the number of the first row.
        end_tokens: of the model.
        adapted: whether adapters were published apart from the model.

    Returns:
        The number of the row of each of vLLM's requests, by name.
    """
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = {
        sampling: SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=1.0,
            stop_token_ids=sorted({*end_tokens, *sampling.stop_token_ids}),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # vLLM would copy all of this deeply for each request, and writes to none of it.
            skip_clone=True,
        )
        for sampling in {request.sampling for request in requests}
    }
    rows: dict[str, int] = {}
    adapters = adapter_request() if adapted else None
    for request in requests:
        for _ in range(request.sampling.n):
            row, prompt = first + len(rows), tokens_input(list(request.prompt))
            added = engine.add_request(f"{call}-{row}", prompt, params[request.sampling], lora_request=adapters)
            rows[added] = row
    return rows
