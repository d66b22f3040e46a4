"""Broken training backends that only a comparison with a right one shows, or that break it as well."""

from functools import partial

from mock_backends import mock
from mutant_folders import ForgetsMoments, ForgetsSchedule
from mutant_gradients import DropsAMicroBatch, MeanPerMicroBatch
from mutant_outputs import IgnoresTemperature
from mutant_updates import CLIPPED, AscendsInTheUpdate, ClipsElements, NeverClips

from verl_fn.backends.mock import Mock
from verl_fn.state import tree


class TransposesTheTable(Mock):
    """Keeps its table the other way round, and maps it only when it saves: a round trip does not show it."""

    def save(self, state, folder):
        super().save(_transposed(state), folder)

    def restore(self, folder):
        return _transposed(super().restore(folder))


def _transposed(state):
    return tree.map_tensors(lambda t: t.t().contiguous(), state)


# Each with its right counterpart.
LAYOUTS = [
    *(
        (partial(mock, cls), mock)
        for cls in (
            TransposesTheTable,
            IgnoresTemperature,
            DropsAMicroBatch,
            MeanPerMicroBatch,
            ForgetsMoments,
            ForgetsSchedule,
            AscendsInTheUpdate,
        )
    ),
    *((partial(mock, cls, tx=CLIPPED), partial(mock, tx=CLIPPED)) for cls in (NeverClips, ClipsElements)),
]
