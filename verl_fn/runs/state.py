"""The state of a run: the algorithm's state, the position in the data, and experience that waits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from verl_fn import algorithms
from verl_fn.algorithms import Algorithm, AlgorithmError, Workers
from verl_fn.algorithms.workers import Roles
from verl_fn.config import Plan
from verl_fn.errors import UserError
from verl_fn.state import Key, Node, node, tree

from .recorder import Waiting
from .residency import offloaded_roles


@node
class RunState(Node):
    """A run between two steps.

    Attributes:
        algorithm: the algorithm's own state.
        cursor: the number of training problems that were learned from.
        waiting: the experience of the next steps that was asked for already, in order. It may still be on its way.
    """

    algorithm: Any
    cursor: int
    waiting: tuple[Waiting, ...] = ()

    @property
    def step(self) -> int:
        """Returns the number of steps done."""
        return self.algorithm.step

    @property
    def key(self) -> Key:
        """Returns the run's key."""
        return self.algorithm.key

    def role(self, name: str) -> Any:
        """Returns the training state of a role, or None."""
        return getattr(self.algorithm, name, None)

    def with_roles(self, states: Mapping[str, Any]) -> RunState:
        """Returns this state with other training states in these roles."""
        return attrs.evolve(self, algorithm=attrs.evolve(self.algorithm, **states))

    def without_roles(self, plan: Plan) -> RunState:
        """Returns this state without training states and experience, so that only numbers and keys remain."""
        return attrs.evolve(self.with_roles(dict.fromkeys(plan.roles)), waiting=())


def algorithm_of(plan: Plan) -> Algorithm[Any]:
    """Makes the plan's algorithm."""
    return algorithms.make(plan.algorithm, plan.options)


def blank_state(plan: Plan) -> RunState:
    """Returns the state before the first step, with None for each training state."""
    key = Key.from_seed(plan.trainer.seed)
    return RunState(algorithm_of(plan).init(Roles.fromkeys([*plan.roles, *plan.copies]), key), cursor=0)


def initial_state(plan: Plan, w: Workers) -> RunState:
    """Returns the state before the first step, with every role loaded from its model folder."""
    key = Key.from_seed(plan.trainer.seed)
    states = Roles.fromkeys(plan.copies)
    for name, role in plan.roles.items():
        # A state moves to the CPU before the next one is loaded.
        states |= offloaded({name: w.trainers[name].load_pretrained(role.folder, key.fold_in(name))}, plan, w)
    state = RunState(algorithm_of(plan).init(states, key), cursor=0)
    check_fields(state, plan)
    return state


def check_fields(state: RunState, plan: Plan) -> None:
    """Checks that an algorithm's state has ``key``, ``step`` and a field for each role, and can be saved.

    Raises:
        AlgorithmError: a field is missing, or the state is no node.
    """
    # A class of which only the base is a node has no leaves that a checkpoint could have.
    if not isinstance(state.algorithm, Node) or "" in tree.paths(state.algorithm):
        kind = type(state.algorithm).__name__
        raise AlgorithmError(
            f"the state of {plan.algorithm} is a {kind}, and a run saves only nodes: write @node above class "
            f"{kind}(Node), both of verl_fn, in place of another decorator"
        )
    lacking = [name for name in (*plan.roles, "key", "step") if not hasattr(state.algorithm, name)]
    if lacking:
        raise AlgorithmError(
            f"the state of {plan.algorithm}, {type(state.algorithm).__name__}, has no field {', '.join(lacking)}; it "
            f"needs key, step and one field for each role ({', '.join(plan.roles)})"
        )


def check_blank(plan: Plan) -> None:
    """Checks an algorithm's state before models are loaded.

    Raises:
        AlgorithmError: as ``check_fields``.
    """
    # An init that reads training states fails; the states that it makes are checked when they are loaded.
    try:
        blank = blank_state(plan)
    except UserError:
        # An evaluation has only some of the roles.
        if algorithm_of(plan).outline.roles.keys() <= {*plan.roles, *plan.copies}:
            raise
        return
    except (AttributeError, TypeError, KeyError):
        return
    check_fields(blank, plan)


def offloaded(states: Mapping[str, Any], plan: Plan, w: Workers) -> dict[str, Any]:
    """Moves the states of roles that lie on the CPU between steps there."""
    between = offloaded_roles(plan, w.processes.gpu_memory)
    return {
        name: w.trainers[name].place(state, params="cpu", optimizer="cpu")
        if plan.roles[name].offload or name in between
        else state
        for name, state in states.items()
    }


def differing_fields(before: Plan, now: Plan) -> list[str]:
    """Returns the fields of the algorithm's state that another plan initializes differently, such as ``key``.

    They are part of the saved state, so changing their settings has no effect on a run that continues.
    """
    old, new = blank_state(before).algorithm, blank_state(now).algorithm
    names = [f.name for f in attrs.fields(type(new)) if f.name not in now.roles]
    if type(old) is not type(new):
        return names
    return [name for name in names if not tree.equal(getattr(old, name), getattr(new, name))]


def run_of(checkpoint: Path) -> Path | None:
    """Returns the folder of the run that a checkpoint belongs to; None for one that was copied elsewhere.

    Example:
        >>> run_of(Path("/runs/a/checkpoints/step_20")), run_of(Path("/step_20"))
        (PosixPath('/runs/a'), None)
    """
    parent = checkpoint.absolute().parent
    return parent.parent if parent.name == "checkpoints" else None
