"""Immutable values (training states, batches, metrics, keys) and the functions that move and compare them."""

from . import metrics, tree
from .batch import Batch, concatenate
from .isolation import NotDifferentiable, SharedSetting, isolated, refuse_derivatives
from .key import Key, uniform_at
from .metrics import Max, Metric, Metrics, Min, Moments, Sum, Weighted
from .node import DonatedError, FrozenDict, Named, Node, mapping, named, node, static
from .outputs import PER_ROW, TokenOutputs, output_width, top_count
from .ownership import divided, divisible, donate, is_donated, joined, owned, owned_parts, spare, taken, version_of
from .ragged import Ragged
from .rollout import (
    END_REASONS,
    FAILURES,
    EndReason,
    FinishReason,
    Outcome,
    Request,
    Sample,
    Sampling,
    check_ids,
    conversations,
    pack,
    requests_for,
    unpack,
)
from .split import Split, deal, groups_of, split_by_count, split_by_tokens
from .train import Buffers, Grads, Params, Slots, TrainState, sum_of_squares
from .tree import snapshot

__all__ = [
    "END_REASONS",
    "FAILURES",
    "PER_ROW",
    "Batch",
    "Buffers",
    "DonatedError",
    "EndReason",
    "FinishReason",
    "FrozenDict",
    "Grads",
    "Key",
    "Max",
    "Metric",
    "Metrics",
    "Min",
    "Moments",
    "Named",
    "Node",
    "NotDifferentiable",
    "Outcome",
    "Params",
    "Ragged",
    "Request",
    "Sample",
    "Sampling",
    "SharedSetting",
    "Slots",
    "Split",
    "Sum",
    "TokenOutputs",
    "TrainState",
    "Weighted",
    "check_ids",
    "concatenate",
    "conversations",
    "deal",
    "divided",
    "divisible",
    "donate",
    "groups_of",
    "is_donated",
    "isolated",
    "joined",
    "mapping",
    "metrics",
    "named",
    "node",
    "output_width",
    "owned",
    "owned_parts",
    "pack",
    "refuse_derivatives",
    "requests_for",
    "snapshot",
    "spare",
    "split_by_count",
    "split_by_tokens",
    "static",
    "sum_of_squares",
    "taken",
    "top_count",
    "tree",
    "uniform_at",
    "unpack",
    "version_of",
]
