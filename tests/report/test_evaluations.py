"""The table and the plot of several models' evaluations."""

import pytest

from verl_fn.report.plots import evaluation_plot, evaluation_table


def test_a_table_has_a_line_for_each_model_and_a_gap_where_a_metric_lacks():
    reports = {
        "step_2": {"val-core/a/b/acc/mean@4": 0.25, "val-aux/a/b/acc/pass@2": 0.5, "own": 2.0},
        "step_10": {"val-core/a/b/acc/mean@4": 0.5, "val-core/c/reward/best@4/mean": 1.5},
    }
    lines = [line.split() for line in evaluation_table(reports).splitlines()]
    assert lines == [
        ["a/b"], ["model", "acc/mean@4", "acc/pass@2"], ["step_2", "0.2500", "0.5000"], ["step_10", "0.5000", "-"],
        ["c"], ["model", "reward/best@4"], ["step_2", "-"], ["step_10", "1.5000"],
        ["further", "metrics"], ["model", "own"], ["step_2", "2.0000"], ["step_10", "-"],
    ]  # fmt: skip


@pytest.mark.parametrize("labels", [("x/step_10", "x/step_2"), ("x/step_2", "y/step_3"), ("$a$", "b\x1b")])
def test_a_plot_is_drawn_for_checkpoints_and_for_other_models(labels, tmp_path):
    reports = {label: {"val-core/$s$/acc/mean@1": float(i), "own": 1.0} for i, label in enumerate(labels)}
    assert evaluation_plot(reports, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
