"""A training backend without a model: a table of logits and one of values, with gradients in closed form.

It is for unit tests of algorithms and of the laws themselves: it does all that a real backend does, in less than a
millisecond a call, and fails on demand.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from verl_fn.backends.checkpoint.state_folder import MODEL, Writing, begin_save, read_state
from verl_fn.backends.tensor_file import Span
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import (
    PER_ROW,
    Batch,
    Grads,
    Key,
    Metrics,
    Params,
    Slots,
    Sum,
    TokenOutputs,
    TrainState,
    isolated,
    metrics,
    refuse_derivatives,
    split_by_tokens,
    tree,
)
from verl_fn.state.guards import expect, expect_params, expect_state, expect_tokens
from verl_fn.state.tree import flatten
from verl_fn.steps import Loss, Optimizer, apply_update, check_weights, total_loss
from verl_fn.steps.losses.contract import check_fields

NEEDS = frozenset({"logprobs", "entropy", "values", "row_values"})
CONSTANT_NEEDS = frozenset({"sum_pi_squared"})
METHODS = (
    "init",
    "load_pretrained",
    "forward",
    "forward_backward",
    "apply_update",
    "place",
    "save",
    "restore",
    "weights",
)
T = TypeVar("T")


class Mock:
    """Trains a policy that depends on one token before, and a value for each token.

    The parameters are ``logits [V, V]`` of the next token given the one before it, and ``values [V]``. The methods
    agree with ``Local``'s; autograd differentiates only the loss itself.

    Args:
        vocab_size: tokens are 0 to ``vocab_size - 1``.
        optimizer: from ``verl_fn.steps``.
        max_tokens: the most tokens of a micro-batch.
        failures: errors by method and call: ``(method, n)`` names the n-th call of a method, counted from 1, which
            raises the error before it does anything.

    Raises:
        ValueError: ``failures`` names an unknown method.

    Example:
        >>> from verl_fn.steps import adamw, aggregate, cross_entropy
        >>> backend = Mock(4, adamw(0.1), failures={("apply_update", 2): RuntimeError("boom")})
        >>> state = backend.init(Key.from_seed(0))
        >>> batch = aggregate(Batch.from_rows([[1, 3, 2]], {"response_mask": [[0.0, 1.0, 1.0]]}))
        >>> grads, before = backend.forward_backward(state, batch, cross_entropy())
        >>> state, _ = backend.apply_update(state, grads)
        >>> grads, after = backend.forward_backward(state, batch, cross_entropy())
        >>> after["loss"].value < before["loss"].value
        True
        >>> backend.apply_update(state, grads)
        Traceback (most recent call last):
        RuntimeError: boom
    """

    def __init__(
        self,
        vocab_size: int,
        optimizer: Optimizer,
        *,
        max_tokens: int = 16384,
        failures: Mapping[tuple[str, int], Exception] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.optimizer = optimizer
        self.max_tokens = max_tokens
        self.failures = dict(failures or {})
        if unknown := {method for method, _ in self.failures} - set(METHODS):
            raise ValueError(f"failures name {sorted(unknown)}; the methods are {', '.join(METHODS)}")
        self.calls: Counter[str] = Counter()
        self._writing: Writing | None = None
        self._lock = threading.Lock()

    # Making states

    @isolated()
    def init(self, key: Key) -> TrainState:
        """Returns a state with normally distributed tables drawn from ``key``."""
        self._called("init")
        stream = key.fold_in("init").generator()
        v = self.vocab_size
        return self._fresh(
            {"logits": torch.randn(v, v, generator=stream), "values": torch.randn(v, generator=stream)}, key
        )

    @isolated()
    def load_pretrained(self, folder: str | Path, key: Key) -> TrainState:
        """Returns a fresh state with the tables that ``save`` wrote."""
        self._called("load_pretrained")
        return self._fresh(_tables(folder), key)

    def save(self, state: TrainState, folder: str | Path, *, later: bool = False) -> None:
        """Writes the state into ``folder``, under the file names of ``Local``, and later only in ``saved``."""
        self._called("save")
        self.saved()
        rest, scalars = flatten(attrs.evolve(state, params=Params({})))
        model, others = ({name: Span.whole(t) for name, t in tensors.items()} for tensors in (state.params, rest))
        writing = begin_save(folder, model, others, scalars, later=later)
        if later:
            self._writing = writing
        else:
            writing.finish()

    def saved(self) -> None:
        """Waits until a save that was to end later is whole."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    @isolated()
    def restore(self, folder: str | Path) -> TrainState:
        """Returns the state that ``save`` wrote, bitwise."""
        self._called("restore")
        blank = tree.map_tensors(lambda t: t.to("meta"), self._fresh(_tables(folder), Key.from_seed(0)))
        params, rest = read_state(folder, blank.params, attrs.evolve(blank, params=Params({})))
        return attrs.evolve(rest, params=Params(params))

    @isolated()
    def place(self, state: TrainState, *, params: str | None = None, optimizer: str | None = None) -> TrainState:
        """Returns the same state with the parameters or the optimizer tree on another device."""
        self._called("place")

        def move(value: T, device: str | None) -> T:
            return value if device is None else tree.map_tensors(lambda t: t.to(device), value)

        return attrs.evolve(state, params=move(state.params, params), optimizer=move(state.optimizer, optimizer))

    def named(self, value: Params | Grads | Slots) -> Mapping[str, Tensor]:
        """Returns the tables by name."""
        return dict(value.items())

    def weights(self, params: Params) -> Weights:
        """Returns both tables for ``RolloutBackend.publish``."""
        self._called("weights")
        return Weights.of(params)

    def map(self, fn: Callable[..., Any], *values: Any, keep: bool = False) -> Any:
        """Returns ``fn(*values)``, since values lie in this process."""
        return fn(*values)

    # The two steps

    @isolated()
    def forward(self, params: Params, batch: Batch, needs: Iterable[str] = ("logprobs",)) -> TokenOutputs:
        """Returns the outputs that ``needs`` names, without gradients.

        They are given for every token with ``response_mask``, or for every row.
        """
        self._called("forward")
        expect_params("forward", params, batch)
        refuse_derivatives("forward", params, batch)
        expect_tokens(batch, self.vocab_size)
        wanted = _check_needs(needs, NEEDS | CONSTANT_NEEDS)
        split = split_by_tokens(batch, self.max_tokens)
        return split.join_outputs([TokenOutputs(_Lookup.of(params, part).outputs(wanted)) for part in split])

    @isolated(gradients=True)
    def forward_backward(self, state: TrainState, batch: Batch, loss: Loss) -> tuple[Grads, Metrics]:
        """Returns gradients of the loss over the whole batch, and its metrics, with the total as ``loss``.

        Raises:
            ValueError: the batch lacks the weights that the loss's levels need or the field that keeps its rows
                together, or a row or group is longer than the token budget.
            DonatedError: the state was donated.
        """
        self._called("forward_backward")
        expect_state("forward_backward", state, batch)
        refuse_derivatives("forward_backward", state, batch)
        expect_tokens(batch, self.vocab_size)
        check_weights(loss, batch)
        wanted = _check_needs(loss.needs, NEEDS)
        params = tree.map_tensors(Tensor.detach, state.params)
        gathered = {name: torch.zeros_like(t) for name, t in params.items()}
        reported: Metrics = {}
        for part in split_by_tokens(batch.detached(), self.max_tokens, loss.together):
            lookup = _Lookup.of(params, part)
            leaves = {name: t.requires_grad_() for name, t in lookup.outputs(wanted).items()}
            total, of_part = total_loss(loss, TokenOutputs(leaves), part)
            wrt_outputs = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
            lookup.add_gradient(gathered, dict(zip(leaves, wrt_outputs, strict=True)))
            of_part = {"loss": Sum(total.double()), **of_part}
            reported = metrics.merge(reported, tree.map_tensors(Tensor.detach, of_part))
        return Grads({name: gathered[name] for name in state.params.trained()}), reported

    def loss_fn(self, batch: Batch, loss: Loss) -> Callable[[Params], tuple[Tensor, Metrics]]:
        """Returns the loss as a pure function of parameters, for ``torch.func``, without the closed form."""
        expect("loss_fn", Batch, batch)
        # Weights may be traced, so their values are not checked.
        check_fields(loss, batch)
        wanted = _check_needs(loss.needs, NEEDS)

        @isolated(gradients=None)
        def fn(params: Params) -> tuple[Tensor, Metrics]:
            total, reported = total_loss(loss, TokenOutputs(_Lookup.of(params, batch).outputs(wanted)), batch)
            return total, tree.map(torch.as_tensor, {"loss": Sum(total.detach().double()), **reported})

        return fn

    def apply_update(self, state: TrainState, grads: Grads, *, donate: bool = True) -> tuple[TrainState, Metrics]:
        """Returns the next state and metrics; see ``steps.apply_update``."""
        self._called("apply_update")
        return apply_update(self.optimizer, state, grads, donate_inputs=donate)

    # What stays inside

    def _fresh(self, tables: dict[str, Tensor], key: Key) -> TrainState:
        params = Params(tables)
        return TrainState(params, self.optimizer.init(params), 0, key.fold_in("train"), 0)

    def _called(self, method: str) -> None:
        with self._lock:
            self.calls[method] += 1
            call = (method, self.calls[method])
        if call in self.failures:
            raise self.failures[call]


@attrs.frozen(eq=False)
class _Lookup:
    """The entries of the tables for a micro-batch.

    Attributes:
        tokens: all tokens of the micro-batch.
        targets: the indices of the tokens with ``response_mask``.
        before: the token before each target.
        temperature: the temperature of each target.
        log_probs: at each target, the log-probability of every token of the vocabulary.
        values: the value of the token before each target.
        last: the last token of each row.
        row_values: the value of the last token of each row.
    """

    tokens: Int[Tensor, " T"]
    targets: Int[Tensor, " N"]
    before: Int[Tensor, " N"]
    temperature: Float[Tensor, " N"]
    log_probs: Float[Tensor, "N V"]
    values: Float[Tensor, " N"]
    last: Int[Tensor, " B"]
    row_values: Float[Tensor, " B"]

    @classmethod
    def of(cls, params: Params, batch: Batch) -> _Lookup:
        targets = batch["response_mask"].nonzero()[:, 0]
        first = batch.positions[targets] == 0
        if bool(first.any()):
            row = int(batch.row_ids[targets[first][0]])
            raise ValueError(f"row {row}: response_mask is set on its first token; that has no log-probability")
        before = batch.tokens[targets - 1]
        temperature = torch.ones(len(targets))
        if "temperature" in batch:
            temperature = batch.spread(batch["temperature"].float())[targets]
        log_probs = (params["logits"][before] / temperature[:, None]).log_softmax(-1)
        last, values = batch.tokens[batch.last], params["values"]
        return cls(batch.tokens, targets, before, temperature, log_probs, values[before], last, values[last])

    def outputs(self, needs: Iterable[str]) -> dict[str, Tensor]:
        at_targets = {
            "logprobs": lambda: self.log_probs.gather(1, self.tokens[self.targets, None])[:, 0],
            "entropy": lambda: self._entropy,
            "values": lambda: self.values,
            "sum_pi_squared": lambda: self.log_probs.exp().square().sum(-1),
        }
        zeros = torch.zeros(len(self.tokens))
        return {
            name: self.row_values.clone()
            if name in PER_ROW
            else zeros.index_copy(0, self.targets, at_targets[name]())
            for name in needs
        }

    def add_gradient(self, gathered: dict[str, Tensor], wrt_outputs: Mapping[str, Tensor]) -> None:
        """Adds the gradients of both tables to ``gathered``, given the gradients of the outputs."""
        probs, chosen = self.log_probs.exp(), self.tokens[self.targets, None]
        wrt_logits = torch.zeros_like(probs)
        if "logprobs" in wrt_outputs:
            g = wrt_outputs["logprobs"][self.targets, None]
            wrt_logits -= probs * g
            wrt_logits.scatter_add_(1, chosen, g)
        if "entropy" in wrt_outputs:
            # d entropy / d logit = -p (log p + entropy)
            g = wrt_outputs["entropy"][self.targets, None]
            wrt_logits -= g * probs * (self.log_probs + self._entropy[:, None])
        gathered["logits"].index_add_(0, self.before, wrt_logits / self.temperature[:, None])
        if "values" in wrt_outputs:
            gathered["values"].index_add_(0, self.before, wrt_outputs["values"][self.targets])
        if "row_values" in wrt_outputs:
            gathered["values"].index_add_(0, self.last, wrt_outputs["row_values"])

    @property
    def _entropy(self) -> Float[Tensor, " N"]:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)


def _tables(folder: str | Path) -> dict[str, Tensor]:
    # Copies, since tensors of one file share its memory, and an update could not reuse that.
    return {name: t.clone() for name, t in load_file(Path(folder) / MODEL).items()}


def _check_needs(needs: Iterable[str], known: frozenset[str]) -> list[str]:
    wanted = sorted(set(needs))
    if unknown := set(wanted) - known:
        raise ValueError(f"a mock gives {sorted(known)}, not {sorted(unknown)}")
    return wanted
