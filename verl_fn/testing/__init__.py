"""Checks for what users write themselves: a loss, an advantage estimator, a training or a rollout backend.

    from verl_fn.testing import check_loss

    def test_my_loss():
        check_loss(my_loss)

Each raises ``LawViolation``, which names the law, what was compared, by how much it differs, and what usually
causes it. The laws:

* Purity: a result is a function of the arguments, which stay as they were.
* Split invariance: the same for every split into micro-batches, in every order, on any number of ranks.
* Persistence: a value that was not donated means at any later time what it meant before.
* Donation: a donated value is spent, says so, and nothing that shares its buffers changes.
* Zero: nothing to learn from changes nothing.
* Restore: what is read back equals what was written, and goes on the same.
* Layout: what one backend saves another restores.
* Signature: names, shapes and dtypes are those of the protocol.
* Of a loss also Finite, of an estimator Rows, of a rollout engine Version and Log-probs; each check explains its own.

To test an algorithm without a model there are ``Mock``, a training backend, and ``MockRollout``, an engine that says
what a script tells it to; ``sample_table`` is the script that draws from the weights of a ``Mock``.
"""

from verl_fn.backends.mock.rollout import MockRollout, Response, Turn, sample_table
from verl_fn.backends.mock.train import Mock

from .advantages import check_advantage
from .backends import check_backend
from .builders import tiny_batch, tiny_outputs, tiny_pairs
from .losses import check_loss
from .rollouts import check_rollout
from .violation import LawViolation

__all__ = [
    "LawViolation", "Mock", "MockRollout", "Response", "Turn", "check_advantage", "check_backend", "check_loss",
    "check_rollout", "sample_table", "tiny_batch", "tiny_outputs", "tiny_pairs",
]  # fmt: skip
