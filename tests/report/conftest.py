"""What the tests of reports share."""

import pytest

from verl_fn.report import plots


@pytest.fixture
def figures(monkeypatch):
    """Keeps the figures that are drawn."""
    kept, figure_of = [], plots.figure_of

    def keep(*size):
        kept.append(figure_of(*size))
        return kept[-1]

    monkeypatch.setattr(plots, "figure_of", keep)
    return kept
