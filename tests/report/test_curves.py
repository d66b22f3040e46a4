"""Curves and bars: which metrics have one, on what axes, and what is drawn of long and odd ones."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from verl_fn.report.plots import (
    BUILT_IN,
    CHARTS,
    COLORS,
    FEW_POINTS,
    MOST_OWN,
    OF_ENGINE,
    Chart,
    Curve,
    bars,
    charts,
    smooth,
    svg,
    window,
)
from verl_fn.state import END_REASONS


def test_metrics_of_the_users_functions_have_charts_and_built_in_ones_do_not():
    own = {"running/mean": 1.0, "actor/tanh_far": 0.5, "reward/level/mean": 2.0}
    theirs = {"actor/lr": 1e-6, "timing_s/gen": 1.0, "rollout/rows_dropped/learn": 0.0, "reward/level/count": 3.0}
    rows = [{"step": i} | own | theirs for i in range(3)]
    assert [chart.metric for chart in charts([rows])] == sorted(own)
    named = re.findall(r"`([a-z_-]+(?:/[A-Za-z0-9_@*]+)+)`", Path("docs/metrics.md").read_text(encoding="utf-8"))
    spelled = {
        name.replace("*", "mean")
        for name in named
        if not name.startswith(("reward/NAME", "reward/FUNCTION", "token_acc"))
    }
    assert len(spelled) > 60 and all(BUILT_IN.fullmatch(name) for name in spelled)


def test_the_whole_loss_is_drawn_for_runs_without_a_policy_loss():
    whole = [{"step": i, "actor/loss": 1.0} for i in range(3)]
    assert [chart.title for chart in charts([whole])] == ["Loss of the actor"]
    logged = [row | {"actor/pg_loss": 0.5} for row in whole]
    assert [chart.metric for chart in charts([logged, logged])] == ["actor/pg_loss"]
    assert [chart.metric for chart in charts([[], [{"step": 1, "train/loss": 1.0}], logged])] == [
        "actor/pg_loss",
        "train/loss",
    ]
    # A loss of one's own is compared by the metric that both runs have.
    assert [chart.metric for chart in charts([whole, logged])] == ["actor/pg_loss", "actor/loss"]


def test_the_borders_of_what_is_drawn():
    """Values without an end, shares that are none, and the most points that are drawn as they were logged."""
    steps = np.arange(2.0)
    for low, high in ((-0.1, 0.5), (0.5, 1.1)):
        assert Chart("", "x", "share", {0: Curve(steps, np.array([low, high]))}).limits is None
    values = [None, -1e301, 1e301, -1e299, 1e299]
    (drawn,) = charts([[{"step": step, "mine": value} for step, value in enumerate(values)]])
    assert np.isnan(drawn.curves[0].values).tolist() == [True] * 3 + [False] * 2
    for points, plain in ((FEW_POINTS + 1, True), (FEW_POINTS + 2, False)):
        long = Curve(np.arange(float(points)), np.ones(points))
        assert Chart("", "mine", "linear", {0: long}).is_plain(long, (0, points - 1)) is plain
    for points, plain in ((7, True), (8, False)):
        short = Curve(np.arange(float(points)), np.ones(points))
        assert Chart("", "mine", "linear", {0: short}).is_plain(short, (0, 900)) is plain, "beside a longer run"
    rare = Curve(np.arange(0.0, 1000.0, 100.0), np.ones(10))
    assert Chart("", "mine", "linear", {0: rare}).is_plain(rare, (0, 900))


def test_charts_come_in_their_order_and_not_too_many_are_the_users():
    own = {f"mine/{i:02d}": 1.0 for i in range(MOST_OWN + 2)}
    built_in = [name for _, name, _ in (*CHARTS, *OF_ENGINE) if not name.endswith("/") and name != "actor/loss"]
    rows = [{"step": 1, "mine/gap": None} | own | dict.fromkeys(built_in, 2.0)]
    before = len(built_in) - len(OF_ENGINE)
    assert [chart.metric for chart in charts([rows])] == [
        *built_in[:before], *list(own)[:MOST_OWN], *built_in[before:]
    ]  # fmt: skip


def test_the_turns_and_ends_of_conversations_have_curves():
    ends = dict.fromkeys([f"env/ended/{reason}" for reason in END_REASONS], 0.0)
    logged = ends | {"env/turns/mean": 2.0, "env/ended/done": 0.5, "env/ended/length": 0.5, "training/acc": 1.0}
    assert [chart.metric for chart in charts([[{"step": i} | logged for i in range(3)]])] == [
        "training/acc", "env/turns/mean", "env/ended/done", "env/ended/length"
    ]  # fmt: skip


def test_bars_have_the_seconds_and_the_colour_of_each_run(figures):
    many = dict.fromkeys(range(len(COLORS) + 1), (1.0, ""))
    bars({"gen": {0: (4.0, ", in all 8 s"), 1: (2.0, "")}, "adv": {1: (0.5, "")}, "many": many})
    (axes,) = figures[-1].axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths[:3] == [4.0, 2.0, 0.5] and axes.get_xlim() == (0.0, 8.0)
    middles = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert middles[:3] == pytest.approx([0.0, 1.0, 2.5]) and axes.get_ylim()[0] > middles[-1] > axes.get_ylim()[1]
    assert axes.get_yticks()[:2].tolist() == pytest.approx([0.5, 2.5])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["gen", "adv", "many"]
    assert [text.get_text() for text in axes.texts][:2] == ["4 s, in all 8 s", "2 s"]
    first, again = axes.patches[3], axes.patches[-1]
    assert first.get_facecolor()[:3] == again.get_facecolor()[:3] != axes.patches[4].get_facecolor()[:3]
    assert first.get_alpha() > again.get_alpha()


def test_evaluations_are_drawn_as_they_were_however_many():
    rows = [{"step": i, "val-core/reverse/acc/mean@1": i % 2} for i in range(200)]
    drawing = svg(charts([rows])[0], ["a"], (0, 199), window([rows]))
    assert "opacity" not in drawing
    assert drawing.count("<use") == 200


@pytest.mark.parametrize("name", ["actor/entropy", "train/grad_norm", "val-core/reverse/acc/mean@1"])
def test_extremes_that_almost_agree_are_drawn(name):
    """The log of their difference is out of range, or their ticks fall on one number."""
    for low in (0.5, 1.0, 1e-300, 5e-324, 1e300, -3.0, 0.0):
        for high in (low, math.nextafter(low, math.inf)):
            rows = [{"step": 1, name: low}, {"step": 2, name: high}]
            assert "var(--run0)" in svg(charts([rows])[0], ["a"], (1, 2), 1)


def test_a_log_axis_only_where_values_span_decades():
    def chart(values, scale):
        return Chart("", "x", scale, {0: Curve(np.arange(len(values)), np.array(values))})

    wide, narrow = [1e-3, 1.0, 50.0], [1.0, 2.0]
    assert chart(wide, "log").log
    assert not chart(narrow, "log").log
    assert not chart(wide, "linear").log
    assert not chart([0.0, 50.0], "log").log
    smoothed = chart([1.0, 10.0, 1000.0], "log").smooth(Curve(np.arange(3), np.array([1.0, 10.0, 100.0])), 3)
    assert smoothed.values[1] == pytest.approx(10.0)


def test_smoothing_means_over_known_points_only():
    values = np.array([1.0, math.nan, 3.0, 5.0])
    assert smooth(values, 3).tolist() == pytest.approx([1.0, math.nan, 4.0, 4.0], nan_ok=True)
    assert smooth(np.ones(4), 9).tolist() == [1.0] * 4
    assert (window([[{}] * 40]), window([[{}] * 400, []]), window([[{}] * 10**5])) == (1, 21, 101)


def test_a_long_curve_is_thinned_but_keeps_its_spike():
    values = np.zeros(20_000)
    values[7_777] = 10.0
    rows = [{"step": i, "actor/entropy": v} for i, v in enumerate(values.tolist())]
    chart = charts([rows])[0]
    drawing = svg(chart, ["a"], (0, len(rows)), window([rows]))
    assert len(drawing) < 40_000
    assert Curve(np.arange(3.0), np.array([1.0, math.nan, 2.0])).gaps == 1
    heights = [float(y) for y in re.findall(r"L [0-9.]+ ([0-9.]+)", drawing)]
    assert max(heights) - min(heights) > 100, "the spike is there"


def test_thinning_keeps_gaps_and_lonely_points():
    values = np.where(np.arange(9000) % 100 == 50, np.nan, 1.0)
    thinned = Curve(np.arange(9000.0), values).thinned()
    assert thinned.gaps == 90 and thinned.steps[0] == 0 and thinned.steps[-1] == 8999
    for spike in (-10.0, 10.0):
        values = np.where(np.arange(9000) == 7777, spike, 1.0)
        assert spike in Curve(np.arange(9000.0), values).thinned().values
    lonely = Curve(np.arange(4.0), np.array([1.0, math.nan, 2.0, 3.0]))
    assert lonely.alone.tolist() == [True, False, False, False]
