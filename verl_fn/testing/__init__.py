"""Checks for what users write: losses, advantage estimators, rewards, environments, training backends and engines.

    from verl_fn.testing import check_loss

    def test_my_loss():
        check_loss(my_loss)

A check raises ``LawViolation``, whose message names the law, what was compared, by how much it differs, and what
usually causes the difference. The laws:

* Purity: a result depends only on the arguments, and the arguments do not change.
* Split invariance: the result is the same for every split into micro-batches, in every order, on any number of ranks.
* Persistence: later calls do not change a value that was not donated.
* Donation: a donated value raises ``DonatedError``, and values that shared its buffers do not change.
* Zero: a batch without a learning signal changes nothing.
* Restore: a restored state equals the saved one, and training continues identically.
* Layout: a backend restores what another one saved.
* Signature: names, shapes and dtypes are as in the protocol.
* Environments and reward functions obey laws of their own; see ``check_environment`` and ``check_reward``.
* Backends also obey Outputs, Derivative and Update, losses Finite and Precision, estimators Rows and Precision, and
  rollout engines Version, Log-probs and Capabilities; each check describes its laws.
* Exactness: a trainer and an engine that promise it compute log-probs that are equal in every bit; ``check_exact``.

A formula that is wrong everywhere in the same way obeys the laws. ``compare_loss`` and ``compare_advantage`` compare
with a formula that you write. ``compare_backends`` says how far the first steps of two backends differ, and whether
this is rounding.

``Mock``, a training backend, and ``MockRollout``, an engine whose responses come from a script, test an algorithm
without a model. The script ``sample_table`` draws responses from the weights of a ``Mock``.
"""

from verl_fn.backends.mock import Mock, MockRollout, Response, Turn, sample_table

from .advantages import check_advantage
from .backends import check_backend
from .builders import tiny_batch, tiny_outputs, tiny_pairs
from .compare import FirstStep, compare_advantage, compare_backends, compare_loss
from .losses import check_loss
from .rollouts import check_exact, check_rollout
from .tasks import check_environment, check_reward
from .violation import LawViolation

__all__ = [
    "FirstStep",
    "LawViolation",
    "Mock",
    "MockRollout",
    "Response",
    "Turn",
    "check_advantage",
    "check_backend",
    "check_environment",
    "check_exact",
    "check_loss",
    "check_reward",
    "check_rollout",
    "compare_advantage",
    "compare_backends",
    "compare_loss",
    "sample_table",
    "tiny_batch",
    "tiny_outputs",
    "tiny_pairs",
]
