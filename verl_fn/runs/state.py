"""The state of a run: the algorithm's state, the position in the data, and experience that waits; and where it lies.

Engine and training ranks may share a GPU, one at a time, in the phases of a step. To draw, ranks give back memory
that holds no values, the engine wakes and gets weights. To learn, the engine sleeps, and training states that rest on
the CPU come to the GPU and go back. An engine that shares no GPU never sleeps.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from verl_fn import algorithms
from verl_fn.algorithms import Algorithm, AlgorithmError, Clock, Experience, Report, Workers
from verl_fn.algorithms.experience import publish
from verl_fn.algorithms.workers import Roles
from verl_fn.backends.protocol import HoldsBuffers
from verl_fn.config import Plan
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError
from verl_fn.state import Key, Node, node, tree

from .memory import offloads, sharing
from .recorder import Waiting


@node
class RunState(Node):
    """A run between two steps.

    Attributes:
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


def counted_updates(plan: Plan, step: int) -> dict[str, int]:
    """Returns the updates of each trained role that the algorithm's outline counts up to a step."""
    updates, trained = algorithm_of(plan).outline.updates, [n for n, role in plan.roles.items() if role.trained]
    # An outline of the user may count with NumPy, and is asked only about steps that there are.
    return {name: int(updates(name, plan.data.train_batch_size, step)) if step else 0 for name in trained}


def other_updates(plan: Plan) -> dict[str, int]:
    """Returns how many more updates of each trained role a run has than its outline counts with these settings."""
    counted = counted_updates(plan, plan.trainer.total_training_steps)
    return {name: plan.roles[name].total_updates - count for name, count in counted.items()}


def made_updates(state: RunState, name: str, w: Workers) -> int:
    """Returns the updates that a role had."""
    made: int = w.get(w.trainers[name].map(operator.attrgetter("scheduler"), state.role(name)))
    return made


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
        states[name] = at_rest(name, w.trainers[name].load_pretrained(role.folder, key.fold_in(name)), plan, w)
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
    """Checks an algorithm's state before models are loaded."""
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


def at_rest(role: str, state: Any, plan: Plan, w: Workers) -> Any:
    """Moves a role's state to the CPU if it lies there between steps."""
    moves = plan.roles[role].offload or role in offloaded_roles(plan, w.processes.gpu_memory)
    return _placed(w, role, state, "cpu") if moves else state


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


def offloaded_roles(plan: Plan, gpu_memory: int | None) -> frozenset[str]:
    """Returns the roles whose training states lie on the CPU between steps, and on the GPU in ``learn``.

    Args:
        gpu_memory: bytes of the GPU of a training rank; None where ranks compute on the CPU.
    """
    if gpu_memory is None or not offloads(plan, gpu_memory):
        return frozenset()
    return frozenset(name for name in sharing(plan) if not plan.roles[name].offload)


def give_to_engine(plan: Plan, w: Workers, actor: Any, version: int, clock: Clock) -> None:
    """Gives the engine the actor's weights, unless it has them; an engine that sleeps is awake afterwards.

    It wakes in stages, so that the memory of its cache is free while weights arrive.

    Args:
        plan: says whether the engine sleeps.
        clock: measures the time of ``update_weights`` and ``gen``.
    """
    if w.rollout.version == version:
        return
    if plan.rollout.sleeps:
        clock.run("update_weights", _wake, plan, w, "weights")
    clock.run("update_weights", publish, w, actor, version)
    if plan.rollout.sleeps:
        clock.run("gen", _wake, plan, w, "cache")


def _wake(plan: Plan, w: Workers, part: str) -> None:
    """Wakes a part of the engine, after the ranks have ended their calls and have given memory back."""
    trainers = [w.trainers[name] for name in sharing(plan)]
    w.get([trainer.map(release, trainer) for trainer in trainers])
    w.get(w.rollout.wake([part]))


def release(backend: object) -> None:
    """Gives memory that holds no values back to the GPU: a backend's buffers, and what torch keeps for later."""
    if isinstance(backend, HoldsBuffers):
        backend.free_buffers()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_one_gpu(algorithm: Algorithm[Any], plan: Plan, roles: frozenset[str], device: str = "cuda") -> Algorithm[Any]:
    """Returns the algorithm with a ``sample`` that has the engine awake, and a ``learn`` that has the GPU for itself.

    In ``learn`` the engine has dropped its weights (level 2), since the next step publishes new ones. States lie on
    the CPU before and after ``learn``; a state on the CPU is never changed, so roles that are not trained are not
    copied back.

    Args:
        plan: says whether the engine sleeps.
        roles: the roles whose states lie on the CPU; see ``offloaded_roles``.
        device: where they learn.
    """
    if not plan.rollout.sleeps and not roles:
        return algorithm

    def sample(state: Any, problems: Sequence[Problem], w: Workers) -> Experience:
        clock = Clock(w.get)
        if algorithm.outline.learns_from == "samples":
            give_to_engine(plan, w, state.actor, state.step, clock)
        experience = algorithm.sample(state, problems, w)
        seconds = Counter(clock.seconds)
        seconds.update(experience.seconds)
        return attrs.evolve(experience, seconds=dict(seconds))

    def learn(state: Any, experience: Experience, w: Workers) -> tuple[Any, Report]:
        if plan.rollout.sleeps:
            w.get(w.rollout.sleep(2))
        clock = Clock(w.get)
        near = {name: clock.run("offload", _placed, w, name, getattr(state, name), device) for name in roles}
        after, report = algorithm.learn(attrs.evolve(state, **near), experience, w)
        trained = [name for name in roles if getattr(after, name) is not near[name]]
        back = {name: clock.run("offload", _placed, w, name, getattr(after, name), "cpu") for name in trained}
        same = {name: getattr(state, name) for name in roles if name not in trained}
        after = attrs.evolve(after, **back, **same)
        return after, report | {f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()}

    return attrs.evolve(algorithm, sample=sample, learn=learn)


def _placed(w: Workers, role: str, state: Any, device: str) -> Any:
    return w.trainers[role].place(state, params=device, optimizer=device)
