"""The table and the plot of several models' evaluations."""

import pytest

from verl_fn.report.plots import evaluation_plot, evaluation_table


def curves(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


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


def test_numbers_of_several_reward_functions_stand_below_their_source():
    report = {"val-core/a/b/acc/mean@1": 0.5, "val-aux/a/b/style/score/mean@1": 2.0, "val-core/a/acc/mean@1": 1.0}
    lines = [line.split() for line in evaluation_table({"m": report}).splitlines()]
    assert lines[:3] == [["a/b"], ["model", "acc/mean@1", "style/score/mean@1"], ["m", "0.5000", "2.0000"]]
    assert lines[3:] == [["a"], ["model", "acc/mean@1"], ["m", "1.0000"]]


@pytest.mark.parametrize("labels", [("x/step_10", "x/step_2"), ("x/step_2", "y/step_3"), ("$a$", "b\x1b")])
def test_a_plot_is_drawn_for_checkpoints_and_for_other_models(labels, tmp_path):
    reports = {label: {"val-core/$s$/acc/mean@1": float(i), "own": 1.0} for i, label in enumerate(labels)}
    assert evaluation_plot(reports, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoints_of_one_run_lie_at_their_steps_and_other_models_side_by_side(figures, tmp_path):
    values = (
        {"val-core/a/acc/mean@1": 0.5, "val-aux/a/reward/mean@1": 3.0, "val-core/b/acc/mean@1": 0.25},
        {"val-core/a/acc/mean@1": 0.75},
    )
    for labels, places in (
        (("x/step_10", "x/step_2"), [10.0, 2.0]),
        (("x/step_10", "y/step_2"), [0.0, 1.0]),
        (("x/step_10", "x/model"), [0.0, 1.0]),
    ):
        evaluation_plot(dict(zip(labels, values, strict=True)), tmp_path / "x.png")
        first, second = figures[-1].axes
        points = sorted([[places[0], 0.5], [places[1], 0.75]])
        assert curves(first) == {"acc/mean@1": points, "reward/mean@1": [[places[0], 3.0]]}
        assert curves(second) == {"acc/mean@1": [[places[0], 0.25]]}
        assert [axes.get_title(loc="left") for axes in (first, second)] == ["a", "b"]
        by_step = places[0] > 0
        assert first.get_xlabel() == ("step" if by_step else "")
        assert by_step or [text.get_text() for text in first.get_xticklabels()] == list(labels)
        assert len({line.get_color() for line in first.lines}) == 2
