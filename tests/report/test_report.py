"""Reports: what stands on the page, what it must survive, and what is refused."""

import importlib.util
import json
import os
import re
import shutil
import tomllib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tomli_w

from verl_fn.cli import main
from verl_fn.config import load, to_table
from verl_fn.errors import UserError
from verl_fn.pool.worker import short
from verl_fn.report.page import MISSING, OF_EACH, SHOWN, ReportError, about, colors, headline, names, report
from verl_fn.report.plots import (
    CHARTS,
    COLORS,
    charts,
    svg,
)

ROOT = Path(__file__).parents[2]
HOSTILE = """<script>alert("x")</script><img src='https://evil.example/x.png'>&amp;\x00\ud800"""
VOID = {"meta", "path", "rect", "use"}


class Page(HTMLParser):
    """Text by the elements around it; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.cells, self.titles = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "h3":
            self.titles.append("")

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID | {"g"}, "elsewhere in HTML such a tag stays open"
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data
        if "h3" in self.open:
            self.titles[-1] += data


def metrics(steps, every=2, **more):
    rows = [{"step": 0, "val-core/reverse/acc/mean@1": 0.25}] if every else []
    for step in range(1, steps + 1):
        row = {"step": step, "critic/score/mean": step / steps, "timing_s/step": 2.0, "timing_s/gen": 1.5}
        row |= {"perf/throughput": 1000.0, "actor/entropy": 1 / step} | more
        if every and step % every == 0:
            row["val-core/reverse/acc/mean@1"] = 0.5
        rows.append(row)
    return rows


OWN = """
import attrs
from verl_fn.algorithms import Algorithm
from verl_fn.config import opt

@attrs.frozen(kw_only=True)
class Options:
    beta: float = opt(0.05, "b")
    gamma: float = opt(2.0, "g")

def mine(options: Options):
    return Algorithm(learn=lambda state, experience, workers: (state, {}))
"""


def brief(steps):
    """Metrics of one chart, for tests of the tables: drawing takes longest."""
    return [{"step": step, "critic/score/mean": step / steps} for step in range(1, steps + 1)]


def answer(step, prompt="ab>", response="ba", acc=1.0, **more):
    given = {"step": step, "data_source": "reverse", "prompt": prompt, "response": response, "answer": "ba"}
    return given | {"score": acc, "acc": acc, "finished": True} | more


def write(folder, rows, answers=(), overrides=()):
    folder.mkdir(parents=True)
    cfg = load(overrides=[f"trainer.dir={folder.name}", *overrides])
    (folder / "config.toml").write_text(tomli_w.dumps(to_table(cfg)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if answers:
        (folder / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    return folder


def page(out):
    text = out.read_text(encoding="utf-8")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return text, Page(text)


def test_a_page_says_what_a_run_did(tmp_path):
    run = write(tmp_path / "one", metrics(6), [answer(0, response="ab", acc=0.0), answer(6)])
    text, found = page(report([run], tmp_path / "new" / "page.html"))
    assert found.cells[9:18] == [
        "one", "ppo (gae)", "reverse", "6of 100", "2 s", "1,000", "0.500acc, step 6", "0.500acc, step 2",
        "1.000best 1.000, step 6",
    ]  # fmt: skip
    assert found.titles == ["Held-out accuracy", "Training reward", "Entropy", "Tokens a second", "Time by phase"]
    assert "one: from step 0 to step 6, +1 right of 1<" in text
    assert "ba✓ right reward 1" in found.cells
    assert "ab✗ wrong reward 0" in found.cells
    assert f"verl-fn report {run} --out" in text


def test_the_page_asks_for_nothing_and_runs_nothing(tmp_path):
    _, found = page(report([write(tmp_path / "one", metrics(4), [answer(0), answer(4)])], tmp_path / "page.html"))
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not {"src", "href"} & {name for name, _ in found.attributes}
    assert all(value.startswith("#") for name, value in found.attributes if name == "xlink:href")
    assert not [value for name, value in found.attributes if name == "style" and re.search(r"url\((?!#)", value)]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes


def test_hostile_texts_are_shown_and_not_obeyed(tmp_path):
    hostile = dict.fromkeys(("prompt", "response", "answer", "data_source"), HOSTILE)
    run = write(
        tmp_path / "<b>bold&", [*metrics(4), {"step": 5, "timing_s/<i>": 1.0, "val-core/<u>/acc/mean@1": 0.5}],
        [answer(step) | hostile for step in (0, 4)], ['model.path="</pre><script>"'],
    )  # fmt: skip
    text, found = page(report([run], tmp_path / "page.html", labels=["<s>$x^$"]))
    assert not {"script", "img", "b", "i", "u", "s"} & set(found.tags)
    assert "\x00" not in text
    assert any("alert" in cell for cell in found.cells)


def test_runs_are_compared_by_the_keys_in_which_they_differ(tmp_path):
    a = write(tmp_path / "a", brief(4), overrides=["actor.optim.lr=0.5", "rollout.n=3"])
    b = write(tmp_path / "b", brief(5), overrides=["actor.optim.lr=0.25", "rollout.n=3"])
    _, found = page(report([a, b], tmp_path / "page.html"))
    at = found.cells.index("actor.optim.lr")
    assert found.cells[at : at + 3] == ["actor.optim.lr", "0.5", "0.25"]
    assert "rollout.n" not in found.cells


def test_runs_are_compared_by_code_and_data_of_another_content(tmp_path):
    """As after an edit of a file between two runs of one config."""
    same = {"torch": "version 2"}
    before, after = {"/mine.py": "3 bytes, CRC 1", "/a": "1", **same}, {"/mine.py": "3 bytes, CRC 2", **same}
    runs = []
    for seed, inputs in enumerate((before, after, before)):
        lines = [{"step": 1, "val-core/x/acc/mean@1": 0.5}]
        runs.append(write(tmp_path / f"r{seed}", lines, overrides=[f"trainer.seed={seed}"]))
        # The seeds of one comparison may run on several machines.
        (runs[-1] / "inputs.json").write_text(json.dumps(inputs | {"CPU": f"version AVX2, {seed} threads"}))
    text, found = page(report(runs[:2], tmp_path / "page.html"))
    at = found.cells.index("/mine.py")
    assert found.cells[at : at + 3] == ["/mine.py", *(inputs["/mine.py"] for inputs in (before, after))]
    assert {"torch", "/a"}.isdisjoint(found.cells) and "seeds only" not in text
    assert "r0, r2 differ in their seeds only" in page(report(runs, tmp_path / "page.html"))[0]


def test_a_run_that_was_continued_with_changes_says_so(tmp_path):
    run = write(tmp_path / "a", brief(6), overrides=["actor.optim.lr=0.25"])
    (run / "inputs.json").write_text(json.dumps({"/mine.py": "CRC 3"}))
    for step, rate, content in ((2, 1.0, "CRC 1"), (4, 0.5, "CRC 1"), (5, 0.25, "CRC 2")):
        before = write(tmp_path / f"until_{step}", brief(4), overrides=[f"actor.optim.lr={rate}"])
        (run / "configs").mkdir(exist_ok=True)
        (before / "config.toml").rename(run / f"configs/until_step_{step}.toml")
        (run / f"configs/until_step_{step}.json").write_text(json.dumps({"/mine.py": content}))
    text, _ = page(report([run], tmp_path / "page.html"))
    assert "a: after step 2 it was continued with changes: actor.optim.lr 1.0 -&gt; 0.5<" in text
    changes = "actor.optim.lr 0.5 -&gt; 0.25; another content of /mine.py"
    assert f"a: after step 4 it was continued with changes: {changes}<" in text
    assert "a: after step 5 it was continued with changes: another content of /mine.py<" in text
    # The same settings from the start are another run.
    other = write(tmp_path / "b", brief(6), overrides=["actor.optim.lr=0.25", "trainer.seed=9"])
    shutil.copy(run / "inputs.json", other)
    assert "seeds only" not in page(report([run, other], tmp_path / "page.html"))[0]
    # An earlier version had fewer keys, whose defaults count; and a damaged record says nothing.
    before = run / "configs/until_step_5.toml"
    before.write_text("".join(line for line in before.open() if not line.startswith("eps")))
    before.with_suffix(".json").write_text("{")
    assert "after step 5 it" not in page(report([run], tmp_path / "page.html"))[0]
    (run / "configs/until_step_2.toml").write_text("no = toml = here")
    text, _ = page(report([run], tmp_path / "page.html"))
    assert "after step 2 it" not in text and "after step 4 it" in text


def test_keys_without_effect_are_not_among_the_differences(tmp_path):
    """They have one only with a task, an environment or vLLM. One that a run uses is shown for that run."""
    files = ['data.train_files=["x.parquet"]', 'data.val_files=["x.parquet"]', "trainer.save_freq=3"]
    more = ["data.task=count", "env.max_turns=3", "rollout.gpu_memory_utilization=0.25", "trainer.save_freq=4"]
    a, b = (write(tmp_path / name, brief(4), overrides=given) for name, given in (("a", files), ("b", files + more)))
    text, found = page(report([a, b], tmp_path / "page.html"))
    assert {"data.task", "env.max_turns", "rollout.gpu_memory_utilization"}.isdisjoint(found.cells)
    at = found.cells.index("trainer.save_freq")
    assert found.cells[at : at + 3] == ["trainer.save_freq", "3", "4"]
    assert "Keys without effect are left out." in text
    c = write(tmp_path / "c", brief(4), overrides=[*files, "env.name=mine.py:Mine", "env.max_turns=4"])
    _, found = page(report([b, c], tmp_path / "page.html"))
    at = found.cells.index("env.max_turns")
    assert found.cells[at : at + 3] == ["env.max_turns", MISSING, "4"]
    _, alone = page(report([b], tmp_path / "page.html"))
    assert "env.max_turns" not in alone.cells and "trainer.save_freq" in alone.cells
    # An algorithm of the user's own may fail where the report is made.
    (tmp_path / "mine.py").write_text(
        "import attrs\n\n@attrs.frozen\nclass Options:\n    pass\n\n"
        "def own(options: Options):\n    raise ValueError('no GPU')\n"
    )
    d = write(tmp_path / "d", brief(4), overrides=files)
    config = (d / "config.toml").read_text()
    table = tomllib.loads(config)["algorithm"]["name"]
    (d / "config.toml").write_text(config.replace(f'name = "{table}"', f'name = "{tmp_path / "mine.py"}:own"', 1))
    assert config != (d / "config.toml").read_text()
    assert report([d], tmp_path / "page.html")
    # Of a config with a key that this version does not know, all differences are shown.
    (b / "config.toml").write_text((b / "config.toml").read_text().replace("[env]", "[env]\nolder = 1"))
    _, found = page(report([a, b], tmp_path / "page.html"))
    assert "env.max_turns" in found.cells


def test_own_functions_that_decide_what_is_learned_are_named(tmp_path):
    own = ["algorithm.name=grpo", "algorithm.policy_loss=mine.py:soft", "algorithm.loss_agg_mode=mine.py:by_row"]
    named = {"a": own, "b": [*own, "algorithm.adv_estimator=mine.py:best"], "c": ["algorithm.policy_loss=gspo"]}
    runs = [write(tmp_path / name, brief(4), overrides=given) for name, given in named.items()]
    _, found = page(report(runs, tmp_path / "page.html"))
    at = [found.cells[found.cells.index(name) + 1] for name in named]
    folder = str(Path.cwd())
    assert [cell.replace(f"{folder}/", "") for cell in at] == [
        "grpo (mine.py:soft, mine.py:by_row)", "grpo (mine.py:best, mine.py:soft, mine.py:by_row)", "ppo (gae)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ((0.111, 0.099), (0.055, 0.155)),
        ((0.0, 0.02), (0.0, 0.1)),
        ((0.9, 1.0), (0.8, 1.0)),
        ((0.5, 0.5), (0.0, 1.0)),
        ((0.1, 0.4), (0.0, 1.0)),
    ],
)
def test_shares_that_lie_close_together_have_a_part_of_the_axis(tmp_path, values, limits):
    rows = [[{"step": step, "val-core/x/acc/mean@1": value} for step in (0, 5)] for value in values]
    (chart,) = charts(rows)
    assert chart.limits == pytest.approx(limits)
    text, _ = page(report([write(tmp_path / str(i), some) for i, some in enumerate(rows)], tmp_path / "page.html"))
    assert ("the axis shows a part of 0 to 1" in text) == (limits != (0.0, 1.0))


def test_one_run_is_compared_with_the_defaults(tmp_path):
    run = write(tmp_path / "a", brief(4), overrides=["rollout.n=3", "algorithm.clip_ratio_high=0.5"])
    _, found = page(report([run], tmp_path / "page.html"))
    at, unset = found.cells.index("rollout.n"), found.cells.index("algorithm.clip_ratio_high")
    assert found.cells[at : at + 3] == ["rollout.n", "3", "1"]
    assert found.cells[unset + 1] == "0.5"
    assert "algorithm.clip_ratio" not in found.cells


def test_all_metrics_are_listed_and_an_own_algorithm_is_compared_with_its_own_defaults(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    rows = [row | {"mine/ratio": value} for row, value in zip(brief(4), (3.0, 1.0, 7.0, 2.0), strict=True)]
    own = [f"algorithm.name={tmp_path}/mine.py:mine", "algorithm.beta=0.5"]
    run = write(tmp_path / "a", rows, overrides=own)
    text, found = page(report([run], tmp_path / "page.html"))
    assert 'aria-label="ratio, mine/ratio, over steps.' in text
    at = found.cells.index("mine/ratio")
    assert found.cells[at : at + 5] == ["mine/ratio", "3", "2", "1", "7"]
    at = found.cells.index("algorithm.beta")
    assert found.cells[at : at + 3] == ["algorithm.beta", "0.5", "0.05"]
    assert not {"algorithm.gamma", "algorithm.clip_ratio"} & set(found.cells)


def test_an_option_that_must_be_set_has_no_default(tmp_path):
    (tmp_path / "mine.py").write_text(OWN.replace('opt(0.05, "b")', "attrs.field()"))
    own = [f"algorithm.name={tmp_path}/mine.py:mine", "algorithm.beta=0.5"]
    _, found = page(report([write(tmp_path / "a", brief(4), overrides=own)], tmp_path / "page.html"))
    at = found.cells.index("algorithm.beta")
    assert found.cells[at : at + 3] == ["algorithm.beta", "0.5", MISSING]


def test_a_config_without_a_newer_key_has_its_default(tmp_path):
    a, b = (write(tmp_path / name, brief(4)) for name in "ab")
    text = (a / "config.toml").read_text()
    (a / "config.toml").write_text(re.sub(r"log_freq = \d+\n", "", text))
    _, found = page(report([a, b], tmp_path / "page.html"))
    assert "trainer.log_freq" not in found.cells
    assert "trainer.dir" in found.cells


def test_answers_stand_side_by_side_at_the_last_common_evaluation(tmp_path):
    a = write(tmp_path / "a", brief(4), [answer(s, response=f"a{s}") for s in (0, 2, 4)])
    b = write(tmp_path / "b", brief(2), [answer(s, response=f"b{s}", acc=0.0, finished=False) for s in (0, 2)])
    text, found = page(report([a, b, write(tmp_path / "c", brief(1))], tmp_path / "page.html"))
    assert "At step 2, the last evaluation that all of them have." in text
    assert "a: from step 0 to step 4" in text and "b: from step 0 to step 2" in text
    at = found.cells.index("ab>")
    assert found.cells[at : at + 4] == ["ab>", "ba", "a2✓ right reward 1", "b2✗ wrong reward 0, cut off"]


def test_the_evaluation_before_training_compares_no_runs(tmp_path):
    runs = [
        write(tmp_path / name, brief(last), [answer(s, response=f"{name}{s}") for s in (0, last)])
        for name, last in (("a", 4), ("b", 3))
    ]
    text, found = page(report(runs, tmp_path / "page.html"))
    assert "At each run's last evaluation, as they share no later one" in unescape(text)
    at = found.cells.index("ab>")
    assert found.cells[at : at + 4] == ["ab>", "ba", "a4✓ right reward 1", "b3✓ right reward 1"]
    # Of runs that were evaluated before training only, it is all there is.
    runs = [write(tmp_path / f"{name}0", brief(1), [answer(0, response=name)]) for name in "cd"]
    assert "At step 0." in page(report(runs, tmp_path / "page.html"))[0]


def test_problems_with_the_same_prompt_are_told_apart(tmp_path):
    asked = [answer(s, response=f"{name}{s}", answer=name) for s in (0, 4) for name in ("one", "two")]
    text, found = page(report([write(tmp_path / "a", brief(4), asked)], tmp_path / "page.html"))
    rows = [found.cells[i : i + 3] for i, cell in enumerate(found.cells) if cell == "ab>"]
    assert rows[:2] == [["ab>", name, f"{name}4✓ right reward 1"] for name in ("one", "two")]
    assert rows[2:] == [["ab>", name, f"{name}0✓ right reward 1"] for name in ("one", "two")]
    assert "At step 4." in text and "+0 right of 2" in text
    once, _ = page(report([write(tmp_path / "once", brief(4), asked[2:])], tmp_path / "page.html"))
    assert "At step 4." in once and "from step" not in once
    # Also if they expect the same answer.
    alike = [answer(4, response=f"of {number}") for number in (1, 2)]
    _, found = page(report([write(tmp_path / "b", brief(4), alike)], tmp_path / "page.html"))
    assert {"of 1✓ right reward 1", "of 2✓ right reward 1"} <= set(found.cells)


def test_answers_to_the_same_prompt_stand_beside_the_answer_that_was_expected(tmp_path):
    """The second run reads its held-out files in another order."""
    runs = [
        write(tmp_path / label, brief(4), [answer(4, response=f"{label} {name}", answer=name) for name in order])
        for label, order in (("a", ("one", "two")), ("b", ("two", "one")))
    ]
    _, found = page(report(runs, tmp_path / "page.html"))
    rows = [found.cells[i + 1 : i + 4] for i, cell in enumerate(found.cells) if cell == "ab>"]
    assert rows[:2] == [[name, f"a {name}✓ right reward 1", f"b {name}✓ right reward 1"] for name in ("one", "two")]


def test_runs_without_a_common_evaluation_show_their_own_last(tmp_path):
    a = write(tmp_path / "a", brief(4), [answer(4, response="")])
    b = write(tmp_path / "b", brief(4), [answer(3, prompt="cd>", score=None)])
    _, found = page(report([a, b], tmp_path / "page.html"))
    assert {"a, step 4", "b, step 3", "(empty)✓ right reward 1", "ba✓ right reward –"} <= set(found.cells)  # noqa: RUF001


def test_runs_that_were_asked_other_things_have_tables_of_their_own(tmp_path):
    a = write(tmp_path / "a", brief(4), [answer(0), answer(4, response="a4")])
    b = write(tmp_path / "b", brief(2), [answer(0, prompt="1,2,3>"), answer(2, prompt="1,2,3>", response="b2")])
    text, found = page(report([a, b], tmp_path / "page.html"))
    assert {"a, step 4", "b, step 2", "a4✓ right reward 1", "b2✓ right reward 1"} <= set(found.cells)
    assert "a: at step 4." in text and "b: at step 2." in text
    samples = text[text.index("<h2>Held-out answers") : text.index("<h2>Config")]
    assert "<td>–</td>" not in samples  # noqa: RUF001
    # The last evaluations decide.
    c = write(tmp_path / "c", brief(4), [answer(0), answer(4, prompt="1,2,3>", response="c4")])
    text, found = page(report([b, c], tmp_path / "page.html"))
    at = found.cells.index("1,2,3>")
    assert found.cells[at + 2 : at + 4] == ["b2✓ right reward 1", "c4✓ right reward 1"]


def test_only_the_first_prompts_are_shown(tmp_path):
    """The gain of right answers counts all."""
    prompts = [f"p{i}>" for i in range(SHOWN + 3)]
    answers = [answer(step, prompt=prompt, acc=step / 4) for step in (0, 4) for prompt in prompts]
    run = write(tmp_path / "a", brief(4), answers)
    text, found = page(report([run], tmp_path / "page.html"))
    assert f"p{SHOWN - 1}>" in found.cells
    assert f"p{SHOWN}>" not in found.cells
    assert f"the first {SHOWN} of {SHOWN + 3} prompts" in text
    assert f"from step 0 to step 4, +{SHOWN + 3} right of {SHOWN + 3}<" in text


@pytest.mark.parametrize(
    "rows",
    [
        metrics(1, every=0),
        metrics(5, every=0),
        [{"step": 0, "val-core/reverse/acc/mean@1": 0.5}],
        [{"step": 1}],
        metrics(3, **{"actor/grad_norm": None, "perf/throughput": None, "timing_s/gen": None}),
        metrics(3, **{"actor/grad_norm": 0.0, "actor/pg_loss": 1e305, "timing_s/gen": 0.0}),
        metrics(90, **{"actor/pg_loss": -1e-9}),
    ],
    ids=["one step", "no evaluation", "evaluated only", "nothing known", "nulls", "extremes", "long and flat"],
)
def test_little_or_odd_metrics_still_make_a_page(tmp_path, rows):
    text, _ = page(report([write(tmp_path / "a", rows)], tmp_path / "page.html"))
    assert not re.search(r'\s(?:[xyd]|width|height)="[^"]*(?:nan|inf)', text)


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path):
    rows = metrics(9)
    rows[4]["actor/entropy"] = rows[5]["actor/entropy"] = None
    text, _ = page(report([write(tmp_path / "a", rows)], tmp_path / "page.html"))
    assert "2 values are not finite, shown as gaps" in text
    drawing = svg(charts([rows])[2], ["a"], (0, 9), 1)
    assert "a: last " in drawing and "a: last none" not in drawing
    unknown = [{"step": 1, "actor/loss": None}]
    said = svg(charts([[{"step": 1, "actor/loss": 2.0}, *unknown], unknown])[0], ["a", "b"], (0, 9), 1)
    assert "Loss of the actor, actor/loss, over steps. a: last 2; b: last none" in said
    line = next(d for d in re.findall(r'd="([^"]*)"', drawing) if d.count("L") >= 5)
    assert line.count("M") == 2 and drawing.count("<use") == 7


def test_a_page_names_the_folders_and_the_time_of_their_last_lines(tmp_path):
    runs = [write(tmp_path / name, [{"step": 1}]) for name in ("a", "b<")]
    for run, time in zip(runs, (0, 86400), strict=True):
        os.utime(run / "metrics.jsonl", (time, time))
    footer = unescape(page(report(runs, tmp_path / "page.html"))[0].partition("<footer>")[2])
    for run, day in zip(runs, (1, 2), strict=True):
        assert f"{run.name}: <code>{run}</code>, last logged 1970-01-0{day} 00:00 UTC" in footer


def test_conversations_are_shown_as_they_were(tmp_path):
    said = [{"role": "user", "content": "a<"}, {"role": "assistant", "content": "b"}]
    run = write(tmp_path / "a", [{"step": 1}], [answer(1, response="all", messages=said, ended="turn_limit")])
    text, found = page(report([run], tmp_path / "page.html"))
    assert "usera<assistantb✓ right reward 1, ended: turn_limit" in found.cells
    assert '<div class="soft">user</div><div class="text">a&lt;</div>' in text


def test_all_runs_of_a_page_have_one_axis_and_gaps_say_of_which_run_they_are(figures, tmp_path):
    known = {"critic/score/mean": 0.5, "actor/grad_norm": 1.0, "val-core/x/acc/mean@1": 0.01}
    rows = [{"step": step, **known, "critic/score/mean": None if step == 3 else 0.5} for step in (2, 3, 9)]
    rows[-1] |= {"actor/grad_norm": 1e5}
    runs = [write(tmp_path / "a", [{"step": 4, **known}]), write(tmp_path / "b", rows)]
    text, _ = page(report(runs, tmp_path / "page.html"))
    assert "b: 1 value is not finite, shown as gaps" in text and "a: 1 value" not in text
    assert {axes.get_xlim() for axes in figures[-1].axes} == {(2 - 0.14, 9 + 0.14)}
    titles = [axes.get_title(loc="left") for axes in figures[-1].axes]
    assert titles[2] == "Gradient norm, actor (actor/grad_norm, log scale)" and "log" not in titles[1]
    share, reward = figures[-1].axes[:2]
    assert share.get_ylim() == pytest.approx((-0.03, 1.03)) and reward.get_ylim()[1] < 1


def test_how_a_run_failed_is_shown_and_a_page_that_is_replaced_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = write(tmp_path / "runs/one", brief(2)), write(tmp_path / "runs/other", brief(2))
    (other / "failure.txt").write_text("ended after step 2 with an error: no <room>\n")
    for run, said in ((one, ""), (one, ""), (other, ", in place of the page about one")):
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"wrote report.html and report.png{said}"
    assert "other: it ended after step 2 with an error: no &lt;room&gt;" in (tmp_path / "report.html").read_text()
    assert headline(other, "b").endswith("; it ended after step 2 with an error: no <room>")
    (other / "metrics.jsonl").write_text("")
    with pytest.raises(ReportError, match="no metrics yet; it ended after step 2 with an error: no <room>"):
        report([other], "page.html")
    with pytest.raises(ReportError, match=r"one is no run: it has no config.toml; did you mean runs/one\?"):
        report(["one"], "page.html")
    assert about(report([one], "page.html", labels=["<a> & b"])) == "<a> & b"


def test_a_curve_says_what_its_points_are(tmp_path):
    """Evaluations at the start and at the end, a log axis, and the mean over points of a long run."""
    few = [{"step": s, "val-core/x/acc/mean@1": s / 50, "actor/grad_norm": 1000.0**s} for s in (0, 1)]
    hint, log, faint = "trainer.test_freq=N also does", "log scale", "Where there is a faint line, "
    brief, _ = page(report([write(tmp_path / "a", few)], tmp_path / "page.html"))
    assert hint in brief and log in brief and "geometric" not in brief and faint not in brief
    more = [*few, {"step": 2, "val-core/x/acc/mean@1": 0.0}]
    both, _ = page(report([tmp_path / "a", write(tmp_path / "b", more)], tmp_path / "page.html"))
    assert hint not in both and "the axis shows a part" in both
    long = [{"step": s, "actor/grad_norm": 1.1**s} for s in range(100)]
    text, _ = page(report([write(tmp_path / "c", long)], tmp_path / "page.html"))
    assert "log scale, geometric mean" in text
    assert f"{faint}it is as logged, and the strong one a mean over 5 points" in text


def test_the_picture_has_the_first_charts_of_all_runs(figures, tmp_path):
    names = [name for _, name, _ in CHARTS if not name.endswith("/")][:10]
    rows = [{"step": s} | {name: s + i for i, name in enumerate(names)} for s in (1, 2)]
    report([write(tmp_path / name, rows) for name in "ab"], tmp_path / "page.html")
    drawn = figures[-1]
    logged = [metric for metric in names if metric not in ("actor/loss",)]
    assert [re.search(r"\((\S+?)\)$", axes.get_title(loc="left"))[1] for axes in drawn.axes] == logged[:8]
    assert [axes.get_xlabel() for axes in drawn.axes] == [""] * 6 + ["step"] * 2
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert [line.get_color() for line in legend.get_lines()] == [light for light, _ in COLORS[:2]]


def test_curves_that_are_asked_for_come_first(tmp_path):
    more = {"train/num_gen_batches": 2.0, "train/groups_kept": 0.5, "actor/ppo_kl": 0.0, "mine/a[b]": 1.0}
    run = write(tmp_path / "a", [row | more for row in brief(3)])
    asked = ["actor/ppo_kl", "train/*", "mine/a[b]"]
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out), "--curves", *asked]) == 0
    text, found = page(out)
    assert "so not drawn" not in text
    assert found.titles == [
        "KL of the update",
        "Groups whose rewards differ",
        "num_gen_batches",
        "a[b]",
        "Training reward",
    ]
    assert "--curves actor/ppo_kl &#x27;train/*&#x27;" in text
    assert "curves=[&#x27;train/*&#x27;]" in page(report([run], out, labels=["x"], curves=["train/*"]))[0]
    with pytest.raises(ReportError, match="no run logged train/groups; did you mean train/groups_kept"):
        report([run], out, curves=["train/groups"])


def test_light_pages_have_the_first_colours_and_dark_ones_the_second():
    light, dark = colors().split("@media (prefers-color-scheme: dark)")
    for i, (of_light, of_dark) in enumerate(COLORS):
        assert f"--run{i}:{of_light};" in light and f"--run{i}:{of_dark};" in dark
        assert f".run{i}{{border-color:var(--run{i})}}" in dark


def test_the_start_is_no_phase_of_a_step(tmp_path):
    times = {"timing_s/step": 2.0, "timing_s/gen": 1.0}
    rows = [{"step": 1, "timing_s/start/total": 61.0, "timing_s/start/load": 60.0} | times, {"step": 2} | times]
    runs = [write(tmp_path / name, rows) for name in ("a", "b")]
    text, _ = page(report(runs, tmp_path / "page.html"))
    assert "all steps and evaluations took 0m08s, and starting 2m02s, of all runs together" in text
    assert "start/load" not in text.partition("Time by phase")[2].partition("</figure>")[0]


def test_phases_have_their_seconds_and_their_sum(tmp_path):
    rows = [{"step": step, "timing_s/step": 90.0, "timing_s/gen": 80.0, "timing_s/adv": 0.25} for step in (1, 2)]
    rows.append({"step": 0, "timing_s/testing": 60.0})
    text = report([write(tmp_path / "a", rows)], tmp_path / "page.html").read_text()
    assert "80 s, in all 2m40s" in text and "0.25 s, in all 0.5 s" in text
    assert "all steps and evaluations took 4m00s<" in text, "of one run that has logged no start"
    assert re.findall(r">(gen|adv|testing)</text>", text) == ["gen", "testing", "adv"]
    # Of several runs, the longest counts.
    slow = write(tmp_path / "b", [{"step": 1, "timing_s/gen": 1.0, "timing_s/adv": 99.0}])
    text = report([tmp_path / "a", slow], tmp_path / "page.html").read_text()
    assert re.findall(r">(gen|adv|testing)</text>", text) == ["adv", "gen", "testing"]


def dead(step):
    names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
    row = {"step": step, "timing_s/step": 1.0, "actor/grad_norm": 0.0, "actor/ppo_kl": 0.0}
    return row | dict.fromkeys(names, 0.0) | {"response_length/clip_ratio": 0.9}


def test_steps_that_learned_nothing_are_told(tmp_path):
    alive = dead(4) | {"critic/score/max": 1.0, "critic/advantages/max": 1.0, "actor/grad_norm": 0.5}
    start = {"step": 0, "val-core/x/acc/mean@1": 0.0}
    run = write(tmp_path / "a", [start, dead(1), dead(2), alive | {"step": 3, "response_length/clip_ratio": 0.1}])
    text, _ = page(report([run], tmp_path / "page.html"))
    signal = "2 of 3 steps gave no signal (the first is step 1, the last step 2); all rewards of step 2 are 0"
    assert f"{signal}, and all advantages are 0" in text
    assert "had a gradient of 0" not in text
    assert (
        "2 of 3 steps cut most answers off (the first is step 1, the last step 2); in step 2 90% of the responses"
        in text
    )
    assert "acc always 0" in text and headline(run, "a").startswith("a: step 3 of 100, held-out acc 0.000 (always 0)")
    assert "0 in every step, so not drawn: <code>actor/ppo_kl</code>" in text
    equal = alive | {"critic/score/min": 1.0, "critic/score/max": 1.0, "response_length/clip_ratio": 0.0}
    assert "steps gave" not in page(report([write(tmp_path / "d", [equal])], tmp_path / "page.html"))[0]
    tuned = {"step": 1, "timing_s/step": 1.0, "train/grad_norm": 0.0}
    assert (
        "1 of 1 steps had a gradient of 0; the gradient of step 1 is 0"
        in page(report([write(tmp_path / "e", [tuned])], tmp_path / "page.html"))[0]
    )
    idle = tuned | {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}  # an algorithm without scores
    assert "had a gradient of 0" in page(report([write(tmp_path / "f", [idle])], tmp_path / "page.html"))[0]
    stuck = alive | {"actor/entropy": 0.001, "critic/score/mean": 0.3, "response_length/clip_ratio": 0.0}
    text, _ = page(report([write(tmp_path / "c", [stuck])], tmp_path / "page.html"))
    assert "1 of 1 steps hardly tried other answers; in step 4 the policy's entropy is 0.001 nats" in unescape(text)
    silent, _ = page(report([write(tmp_path / "b", [alive])], tmp_path / "page.html"))
    assert "gave no signal" not in silent and "gradient of 0" not in silent and "always 0" not in silent


def test_steps_are_told_from_a_tenth_of_them_on(tmp_path):
    """The step before training, and lines without a step's time, are none of them."""
    start = dead(0), {"step": 11, "actor/grad_norm": 0.0}
    live = [{"step": step, "timing_s/step": 1.0, "train/grad_norm": 1.0} for step in range(2, 11)]
    last = {"step": 1, "timing_s/step": 1.0, "train/grad_norm": 0.0}
    for steps, said in ((live, True), ([*live, live[0] | {"step": 12}], False)):
        text, _ = page(report([write(tmp_path / str(said), [*start, last, *steps])], tmp_path / "page.html"))
        assert ("1 of 10 steps had a gradient of 0" in text) == ("had a gradient of 0" in text) == said


def test_the_time_and_the_tokens_of_a_run_are_those_of_its_middle_step(tmp_path):
    """Its first step may take a minute, and an evaluation before it has no time."""
    steps = [(60.0, 10.0), (2.0, 3000.0), (1.0, 4000.0)]
    rows = [{"step": i, "timing_s/step": time, "perf/throughput": n} for i, (time, n) in enumerate(steps, 1)]
    run = write(tmp_path / "one", [{"step": 0, "val-core/reverse/acc/mean@1": 0.25}, *rows])
    _, found = page(report([run], tmp_path / "page.html"))
    assert found.cells[13:15] == ["2 s", "3,000"]


def test_the_best_of_equal_values_is_the_first(tmp_path):
    rows = [{"step": step, "critic/score/mean": value} for step, value in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 0.5))]
    rows += [{"step": 5, "val-core/x/acc/mean@1": 0.5}, {"step": 6, "val-core/x/acc/mean@1": 0.5}]
    line = headline(write(tmp_path / "a", rows), "a")
    assert "training reward 0.500 (best 0.750, step 2)" in line and "held-out acc 0.500 (best 0.500, step 5)" in line


def test_training_responses_of_the_newest_step_are_shown(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for step in (2, 10, 11):
        rows = [
            {"step": step, "prompt": f"p{i}", "input": f"p{i}", "output": f"o{step}.{i}.{j}", "gts": f"g{i}",
             "score": 0.5, "acc": None, "sample": j, "finished": True}
            for i in range(SHOWN) for j in range(OF_EACH + 1)
        ]  # fmt: skip
        (texts / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (texts / "notes.jsonl").write_text("")
    run = write(tmp_path / "a", brief(10), overrides=[f"trainer.rollout_data_dir={texts}"])
    text, found = page(report([run], tmp_path / "page.html"))
    assert f"a: {SHOWN} of {SHOWN * (OF_EACH + 1)} responses of step 10, up to {OF_EACH} of a prompt" in text
    shown = [cell.partition(" ")[0] for cell in found.cells if re.match(r"o\d", cell)]
    assert shown == [f"o10.{i}.{j}" for i in range(SHOWN // OF_EACH) for j in range(OF_EACH)]


def test_long_ground_truths_are_shown_by_their_ends(tmp_path):
    """Tests of code may have millions of characters. Runs that logged more or less of them share a table."""
    truth, texts = "<" + "x" * 100_000 + ">", tmp_path / "texts"
    texts.mkdir()
    (texts / "2.jsonl").write_text(json.dumps(answer(2, output="a", gts=truth, sample=0)) + "\n")
    asked = [f"trainer.rollout_data_dir={texts}"]
    runs = [
        write(tmp_path / name, brief(2), [answer(step, answer=logged) for step in (0, 2)], asked)
        for name, logged in (("a", short(truth, 4000)), ("b", truth))
    ]
    text, found = page(report(runs, tmp_path / "page.html"))
    assert found.cells.count(short(truth, 1000)) == 5 and "At step 2." in text and "x" * 501 not in text


def test_a_metric_that_is_0_in_some_steps_is_drawn():
    rows = [dead(1), dead(2) | {"actor/ppo_kl": 0.5}]
    assert "actor/ppo_kl" in [chart.metric for chart in charts([rows])]
    assert "actor/ppo_kl" not in [chart.metric for chart in charts([rows[:1]])]
    # Runs side by side keep the curve of the one that is always 0.
    assert "actor/ppo_kl" in [chart.metric for chart in charts([rows[:1], rows])]


def test_runs_with_several_seeds_have_their_mean(tmp_path):
    values = {"a": (1, 0.5), "b": (2, 0.75), "c": (3, 0.25), "d": (3, 0.1)}
    runs = []
    for name, (seed, value) in values.items():
        more = [f"trainer.seed={seed}", *(["actor.optim.lr=0.5"] if name == "d" else [])]
        runs.append(write(tmp_path / name, [{"step": 1, "val-core/x/acc/mean@1": value}], overrides=more))
    text, _ = page(report(runs, tmp_path / "page.html"))
    said = "a, b, c differ in their seeds only: last held-out acc 0.500 on average, from 0.250 to 0.750, "
    assert f"{said}standard deviation 0.250" in text and text.count("seeds only") == 1
    assert "seeds only" not in page(report(runs[2:], tmp_path / "page.html"))[0]
    again = write(tmp_path / "e", [{"step": 1, "val-core/x/acc/mean@1": 0.5}], overrides=["trainer.seed=1"])
    assert "seeds only" not in page(report([runs[0], again], tmp_path / "page.html"))[0]
    other = write(tmp_path / "g", [{"step": 1, "val-core/x/reward/mean@1": 0.5}], overrides=["trainer.seed=7"])
    assert "seeds only" not in page(report([runs[0], other], tmp_path / "page.html"))[0], "acc and reward"
    unknown = write(tmp_path / "f", [{"step": 1}], overrides=["trainer.seed=9"])
    assert "a, b differ in" in page(report([*runs[:2], unknown], tmp_path / "page.html"))[0]


def test_seeds_are_summed_up_whatever_their_folders_names_and_days(tmp_path):
    def run(name, *more):
        own = ("trainer.rollout_data_dir={}", "trainer.experiment_name={}", "trainer.seed={}")
        mine = [key.format(value) for key, value in zip(own, (f"{name}/texts", name, ord(name)), strict=True)]
        rows = [{"step": 1, "val-core/x/acc/mean@1": 0.5}]
        return write(tmp_path / name, rows, overrides=[*mine, f"data.date=2027-01-0{ord(name) % 8 + 1}", *more])

    runs = [run("a"), run("b")]
    assert "a, b differ in their seeds only" in page(report(runs, tmp_path / "page.html"))[0]
    runs = [*runs[:1], run("d", "env.max_turns=7")]
    assert "a, d differ in their seeds only" in page(report(runs, tmp_path / "page.html"))[0], "a key without effect"
    runs = [*runs[:1], run("c", "trainer.total_training_steps=7")]
    assert "seeds only" not in page(report(runs, tmp_path / "page.html"))[0]


def test_an_answer_is_right_if_it_is_wholly_right(tmp_path):
    last = [answer(6, response="half", acc=0.5), answer(6, prompt="cd>", response="nearly", acc=0.999)]
    before = [answer(0, prompt=one["prompt"], response="none", acc=0.0) for one in last]
    run = write(tmp_path / "a", brief(6), [*before, *last])
    text, found = page(report([run], tmp_path / "page.html"))
    assert "a: from step 0 to step 6, +0 right of 2<" in text and "✓ right" not in text
    assert {"half✗ wrong reward 0.5", "nearly✗ wrong reward 0.999"} <= set(found.cells)


def test_an_answer_of_white_space_is_no_empty_box_and_a_prompt_shows_what_the_model_reads(tmp_path):
    answer = {"data_source": "x", "prompt": "user: a?", "input": "<bos>a?\n", "response": "\n\n", "answer": "b"}
    answer |= {"step": 1, "score": 0.0, "acc": 0.0, "finished": True}
    run = write(tmp_path / "a", brief(2), [answer, answer | {"prompt": "b?", "input": "b?"}])
    text, _ = page(report([run], tmp_path / "page.html"))
    assert "(only white space: &quot;\\n\\n&quot;)" in text
    assert text.count("as the model reads it") == 1, "the other prompt is what the model reads"
    assert 'as the model reads it</summary><div class="text">&lt;bos&gt;a?' in text


def test_a_line_about_a_run(tmp_path):
    rows = [{"step": 0, "val-core/x/acc/mean@1": 0.5}, {"step": 1, "critic/score/mean": 0.25, "timing_s/step": 2.0}]
    run = write(tmp_path / "a", [*rows, {"step": 2, "critic/score/mean": 0.125, "timing_s/step": 2.0}])
    assert headline(run, "a") == (
        "a: step 2 of 100, held-out acc 0.500 (best 0.500, step 0), training reward 0.125 (best 0.250, step 1), "
        "2 s/step"
    )


def test_a_damaged_last_line_is_left_out(tmp_path):
    run = write(tmp_path / "a", brief(4), [answer(4)])
    for name in ("metrics.jsonl", "generations.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 5, "critic/sc')
    _, found = page(report([run], tmp_path / "page.html"))
    assert "4of 100" in found.cells


def test_folders_of_the_same_name_are_told_apart(tmp_path, capsys):
    runs = [write(tmp_path / name, brief(2)) for name in ("x/seed1", "y/seed1", "seed2")]
    assert names(runs) == ["x/seed1", "y/seed1", "seed2"]
    text, _ = page(report(runs, tmp_path / "page.html"))
    assert "<h1>x/seed1, y/seed1, seed2</h1>" in text
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "page.html")]) == 0
    assert re.findall("^(.*): step 2", capsys.readouterr().out, re.M) == ["x/seed1", "y/seed1", "seed2"]


def test_each_run_keeps_its_look(tmp_path):
    many = [metrics(3) for _ in range(len(COLORS) + 1)]
    drawing = svg(charts(many)[0], [str(i) for i in range(len(many))], (0, 3), 1)
    assert drawing.count("stroke: var(--run0)") > 1
    assert "stroke-dasharray" in drawing


def test_what_cannot_be_reported_is_told(tmp_path):
    run, out = write(tmp_path / "a", metrics(2)), tmp_path / "page.html"
    empty = write(tmp_path / "empty", [])
    broken = write(tmp_path / "broken", metrics(2))
    (broken / "config.toml").write_text("a = = 1")
    partial = write(tmp_path / "partial", metrics(2), [{"prompt": "ab>"}])
    other = write(tmp_path / "other", metrics(2), overrides=["data.train_files=['/a', '/b']"])
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace('"/b"', "3"))
    for runs, message in [
        ([other], r"other/config\.toml: data\.train_files has a value of another kind, \['/a', 3\]"),
        ([tmp_path / "missing"], r"missing is no run: it has no config\.toml"),
        ([empty], "empty has no metrics yet"),
        ([broken], r"broken/config\.toml is not TOML"),
        ([partial], r"partial/generations\.jsonl, line 1, is damaged: it is not a table with a step"),
        ([run, run], "two runs are called"),
        ([], "name at least one folder"),
    ]:
        with pytest.raises(UserError, match=message):
            report(runs, out)
    with pytest.raises(ReportError, match="2 labels for 1 runs"):
        report([run], out, labels=["a", "b"])
    with pytest.raises(ReportError, match=r"does not end in \.html"):
        report([run], tmp_path / "page.png")
    assert not out.exists()


def test_no_curve_hides_an_equal_one(tmp_path):
    runs = [write(tmp_path / name, metrics(4)) for name in ("a", "b", "c")]
    text, _ = page(report(runs, tmp_path / "page.html"))
    assert "a, b and c have the same curve" in text
    drawing = svg(charts([metrics(4)] * 3)[1], ["a", "b", "c"], (0, 4), 1)
    dashes = re.findall(r"stroke-dasharray: ([0-9., ]+); stroke-dashoffset: ([0-9.]+)", drawing)
    assert len(dashes) == 3 and len({pattern for pattern, _ in dashes}) == 1
    assert len({offset for _, offset in dashes}) == 3, "the dashes take turns"
    other = metrics(4, **{"perf/throughput": 5.0})
    assert [chart.same for chart in charts([metrics(4), other]) if chart.metric == "perf/throughput"] == [[[0], [1]]]
    later = [row | {"step": row["step"] + 1} for row in metrics(4)]
    assert all(chart.same == [[0], [1]] for chart in charts([metrics(4), later])), "equal values at other steps"


def test_a_run_whose_rewards_say_nothing_of_right_answers(tmp_path):
    rows = [{"step": s, "val-core/mine/reward/mean@1": 3.0 + s} for s in (1, 2)]
    run = write(tmp_path / "a", rows, [answer(1, acc=None), answer(2, acc=None)])
    text, found = page(report([run], tmp_path / "page.html"))
    assert "5.000reward, step 2" in found.cells and "Held-out reward" in found.titles
    assert "✓ right" not in text and "✗ wrong" not in text and "a: from step 1 to step 2<" in text


def test_the_picture_of_the_demo_is_drawn_of_any_run(tmp_path):
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts/demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    runs = [write(tmp_path / "a", metrics(4)), write(tmp_path / "b", [{"step": 1, "train/loss": None}])]
    assert demo.reward_curves(runs, tmp_path / "p.png", labels=["$x^", "b"]).read_bytes().startswith(b"\x89PNG")
