"""Activations of every module by token, to find where two computations of the same rows part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from verl_fn.backends.hf.outputs import Staged, token_outputs
from verl_fn.backends.hf.skeleton import Skeleton

LOG_PROBS = "log_probs"


@attrs.frozen(eq=False)
class Activations:
    """What modules have computed for tokens of packed rows, on the CPU.

    Attributes:
        tokens: how many tokens the rows have.
        by_name: for each module, in the order in which they end, its output for each token; ``log_probs`` come last.
        filled: for each module the tokens that it has computed.
    """

    tokens: int
    by_name: dict[str, Tensor] = attrs.field(factory=dict)
    filled: dict[str, Bool[Tensor, " T"]] = attrs.field(factory=dict)

    def write(self, name: str, index: Int[Tensor, " n"], values: Tensor) -> None:
        """Writes what a module has computed for some tokens."""
        values = values.detach().cpu()
        if name not in self.by_name:
            self.by_name[name] = values.new_zeros(self.tokens, *values.shape[1:])
            self.filled[name] = torch.zeros(self.tokens, dtype=torch.bool)
        self.by_name[name][index] = values
        self.filled[name][index] = True


@attrs.frozen
class Parting:
    """The first module in which two computations part.

    Attributes:
        name: of the module, or ``log_probs``.
        tokens: how many tokens differ there.
        compared: of how many.
        largest: the largest difference.
    """

    name: str
    tokens: int
    compared: int
    largest: float


def first_parting(one: Activations, other: Activations) -> Parting | None:
    """Returns the first module whose outputs differ in a bit; None if there is none.

    Example:
        >>> one, other = Activations(2), Activations(2)
        >>> one.write("norm", torch.arange(2), torch.tensor([[1.0], [2.0]]))
        >>> other.write("norm", torch.arange(2), torch.tensor([[1.0], [2.5]]))
        >>> first_parting(one, other)
        Parting(name='norm', tokens=1, compared=2, largest=0.5)
    """
    for name in (name for name in one.by_name if name in other.by_name):
        both = one.filled[name] & other.filled[name]
        a, b = one.by_name[name][both], other.by_name[name][both]
        differs = (a != b).flatten(1).any(1) if a.ndim > 1 else a != b
        if bool(differs.any()):
            return Parting(name, int(differs.sum()), len(a), float((a.double() - b.double()).abs().max()))
    return None


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields a dict that the modules write the outputs of their last call into, each as [T, ...] or [B * L, ...]."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            outputs.pop(name, None)
            outputs[name] = first.flatten(0, 1) if first.ndim > 2 else first

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: keep(name, output))
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def head_name(skeleton: Skeleton) -> str:
    """Returns the name of the output layer."""
    return next(name for name, m in skeleton.model.named_modules() if m is skeleton.output_layer)


def of_trainer(skeleton: Skeleton, staged: Staged) -> Activations:
    """Returns the activations of a micro-batch as a trainer computes them."""
    batch, packing = staged.batch, staged.packing
    found, head = Activations(batch.num_tokens), head_name(skeleton)
    every = torch.arange(batch.num_tokens)
    with recorded(skeleton.model) as outputs:
        hidden = skeleton.hidden_states(batch.tokens, batch.positions, packing)
        of_body = dict(outputs)
        skeleton.logits(hidden)
        logits = outputs[head]
    for name, output in of_body.items():
        if len(output) == packing.rows * packing.longest and skeleton.padded:
            output = output[packing.slots]
        if len(output) == batch.num_tokens:
            found.write(name, every, output)
    found.write(head, every, logits)
    log_probs = token_outputs(skeleton, staged, {"logprobs"}).logprobs[staged.targets]
    found.write(LOG_PROBS, staged.targets.cpu(), log_probs)
    return found
