"""The report of ``verl-fn levels``: as text, Markdown, JSON and HTML, and a short text for a pull request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.backends.megatron.importing import TESTED
from verl_fn.report import plots
from verl_fn.report.page import card_of, document, escaped, legend_of, table_of
from verl_fn.runs.logs import read_metrics

from .levels import LEVELS
from .subject import DUMMY, Request
from .verdict import Check, Deliverable, Verdict, overall

LOG, CHECKS = "log.txt", "Bridge-side checks"
KEY_LINES = re.compile(
    r"^(megatron\.(core|bridge) /|step \d+/\d+ |done: \d+ steps|MISSED |.*\b\w*(Error|Exception): |continuing )"
)
NOISE = re.compile(
    r"resource_tracker|DataLoader worker|leaked (semaphore|shared_memory)|ray::.*shutdown", re.IGNORECASE
)
MOST_KEY_LINES = 6


@attrs.frozen
class LevelsReport:
    """All that a report says.

    Attributes:
        result: Pass, Fail or Blocked.
        sentence: what was validated.
        requested: the levels and variants that were asked for.
        evidence: lines by their subject.
        limitations, follow_ups: sentences.
        curves: folders of runs to draw, by label.
    """

    result: Verdict
    sentence: str
    requested: str
    model: str
    deliverables: tuple[Deliverable, ...]
    evidence: tuple[tuple[str, str], ...]
    limitations: tuple[str, ...]
    follow_ups: tuple[str, ...]
    curves: Mapping[str, str]

    @classmethod
    def of(
        cls,
        request: Request,
        deliverables: Sequence[Deliverable],
        command: str,
        repositories: Mapping[str, str],
        probed: Mapping[str, Any],
    ) -> LevelsReport:
        """Returns the report of a run; ``repositories`` says of what commit each source tree is."""
        # What is no level may fail or block a run, and alone it passes none.
        counted = [one for one in deliverables if one.verdict != Verdict.PASS or one.name.startswith("Level ")]
        result = overall([one.verdict for one in counted])
        out = Path(request.out)
        evidence = [(f"{name} repo", text) for name, text in repositories.items()]
        if probed.get("versions"):
            evidence.append(("Versions", ", ".join(f"{name} {one}" for name, one in probed["versions"].items())))
        evidence += [("Command", command), *(("Key lines", line) for line in key_lines(out, deliverables))]
        features = f" ({', '.join(request.features)})" if request.features else ""
        curves = {
            label: str(folder)
            for label, folder in (("megatron", out / "level_5/run"), ("baseline", out / "level_5_baseline/run"))
            if (folder / "metrics.jsonl").is_file()
        }
        return cls(
            result,
            sentence(result, deliverables, request),
            f"Level {', '.join(map(str, request.levels))}{features} on {request.device}, engine {request.engine}",
            request.model + (" (random weights)" if request.dummy else ""),
            tuple(deliverables),
            tuple(evidence),
            (*untested(probed.get("versions", {})), *limitations(request, deliverables, out)),
            tuple(follow_ups(deliverables)) or ("none",),
            curves,
        )

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """Each check with the name of its level."""
        return [(one.name.partition(":")[0], check) for one in self.deliverables for check in one.checks]

    def text(self) -> str:
        """The report as plain text, in the order of a summary: the result first."""
        lines = [f"Result: {self.result} - {self.sentence}", f"Requested coverage: {self.requested}"]
        lines += [f"Model: {self.model}", "Deliverables:"]
        lines += [f"- {one.name}: {one.verdict} - {one.reason}" for one in self.deliverables]
        lines += ["Evidence:", *(f"- {subject}: {line}" for subject, line in self.evidence)]
        lines += ["Limitations:", *(f"- {line}" for line in self.limitations)]
        return "\n".join([*lines, "Follow-ups:", *(f"- {line}" for line in self.follow_ups)])

    def markdown(self) -> str:
        """The report as Markdown, with a table of every check."""
        lines = [f"# {self.result}: {self.sentence}", "", f"* Requested coverage: {self.requested}"]
        lines += [f"* Model: `{self.model}`", "", "| deliverable | verdict | reason |", "|---|---|---|"]
        lines += [f"| {one.name} | {one.verdict} | {_cell(one.reason)} |" for one in self.deliverables]
        lines += ["", "## Checks", "", "| level | check | held | found |", "|---|---|---|---|"]
        for level, check in self.checks:
            held = "yes" if check.held else "**no**"
            lines.append(f"| {level} | {check.name} | {held} | {_cell(check.found)} |")
        for title, listed in (("Limitations", self.limitations), ("Follow-ups", self.follow_ups)):
            lines += ["", f"## {title}", "", *(f"* {line}" for line in listed)]
        return "\n".join([*lines, "", "## Evidence", "", *(f"* {a}: `{b}`" for a, b in self.evidence), ""])

    def pull_request(self) -> str:
        """The few lines that a pull request needs."""
        ran = [one for one in self.deliverables if one.verdict not in (Verdict.NOT_REQUESTED, Verdict.SKIPPED)]
        lines = [f"**verl_fn levels: {self.result}** - {self.sentence}", ""]
        lines += [f"* {one.name}: **{one.verdict}** - {one.reason}" for one in ran if one.name.startswith("Level")]
        lines += [f"* {subject}: {line}" for subject, line in self.evidence if subject.endswith("repo")]
        lines += [f"* `{line}`" for subject, line in self.evidence if subject == "Command"]
        return "\n".join([*lines, f"* Not shown: {'; '.join(self.limitations) or 'nothing'}", ""])

    def page(self) -> str:
        """The report as one HTML page without scripts, with the curves of level 5 if there are any."""
        rows = [(one.name, one.verdict, one.reason) for one in self.deliverables]
        checks = [(level, one.name, "held" if one.held else "missed", one.found) for level, one in self.checks]
        tables = _table(("deliverable", "verdict", "reason"), rows) + _table(("level", "check", "", "found"), checks)
        words = f"<pre>{escaped(self.text())}</pre>"
        return document(f"{self.result}: {self.sentence}", tables + _curves(self.curves) + words)

    def write(self, out: Path) -> None:
        """Writes ``report.txt``, ``report.md``, ``report.json``, ``report.html`` and ``pull_request.md``."""
        (out / "report.txt").write_text(self.text() + "\n", encoding="utf-8")
        (out / "report.md").write_text(self.markdown(), encoding="utf-8")
        (out / "report.json").write_text(json.dumps(attrs.asdict(self), indent=1) + "\n", encoding="utf-8")
        (out / "report.html").write_text(self.page(), encoding="utf-8", errors="replace")
        (out / "pull_request.md").write_text(self.pull_request(), encoding="utf-8")


def sentence(result: Verdict, deliverables: Sequence[Deliverable], request: Request) -> str:
    """Returns what a run validated, in one sentence."""
    levels = [one for one in deliverables if one.name.startswith("Level ")]
    passed = [one.name.removeprefix("Level ").partition(":")[0] for one in levels if one.verdict == Verdict.PASS]
    what = "the checkout" if request.bridge else "the installed Megatron-Bridge"
    if result == Verdict.PASS:
        signal = "; level 5 is a learning signal" if "5" in passed else ""
        return f"level {', '.join(passed)} passed with {what}{signal}"
    worst = next((one for one in deliverables if one.verdict == result), None)
    named = f"{worst.name}: {worst.reason}" if worst else "no level was run to its end"
    if result == Verdict.BLOCKED:
        return f"this is no evidence against the provider; {named}"
    return named


def key_lines(out: Path, deliverables: Sequence[Deliverable]) -> Iterator[str]:
    """Yields the lines of logs that matter, with their numbers; of each log the first and the last."""
    for part in (part for one in deliverables for part in one.outcomes):
        file = out / part / LOG
        lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
        found = [f"{part}/{LOG}:{i}: {line[:160]}" for i, line in enumerate(lines, 1) if KEY_LINES.match(line)]
        half = MOST_KEY_LINES // 2
        yield from found if len(found) <= MOST_KEY_LINES else [*found[:half], *found[-half:]]


def untested(versions: Mapping[str, str]) -> Iterator[str]:
    """Yields the versions of Megatron that this project was not tested with.

    Example:
        >>> list(untested({"megatron-bridge": "0.7.0"}))
        ['this project was tested with megatron-bridge 0.6.2, and not with 0.7.0']
    """
    for name, tested in TESTED.items():
        if name in versions and versions[name].partition("+")[0] not in tested:
            yield f"this project was tested with {name} {' and '.join(tested)}, and not with {versions[name]}"


def limitations(request: Request, deliverables: Sequence[Deliverable], out: Path) -> Iterator[str]:
    """Yields what a run could not show."""
    known = (
        (request.dummy, DUMMY),
        (not request.bridge, "no checkout of Megatron-Bridge was named, so the installed version was tested"),
        (request.device == "cpu", "ranks were CPUs: no transformer-engine, NCCL, bf16 kernels or GPU memory"),
        (request.engine != "vllm", "the embedded engine sampled, not vLLM"),
        (not request.data, "questions are the project's own, not GSM8K"),
        (not request.reward_model, "a rule gave the rewards, so no reward model was served"),
        (not request.ray, "processes were started on this machine, not by Ray"),
        (5 not in request.levels, "no claim that the model learns: level 5 was not requested"),
    )
    yield from (sentence for holds, sentence in known if holds)
    for level in sorted(set(LEVELS) - set(request.levels) - {5}):
        yield f"level {level} was not requested ({LEVELS[level].title})"
    if request.experts and 2 not in request.levels:
        yield "every rank had all experts (ep=1), so no tokens were sent to experts of other ranks"
    for one in deliverables:
        for outcome in one.outcomes.values():
            yield from outcome.limitations
        for part in one.outcomes:
            file = out / part / LOG
            if file.is_file() and one.verdict == Verdict.PASS and NOISE.search(file.read_text(errors="replace")):
                yield f"{part}/{LOG} has warnings of shutting down, after the steps were completed"


def follow_ups(deliverables: Sequence[Deliverable]) -> Iterator[str]:
    """Yields what to do next."""
    for one in deliverables:
        level = re.match(r"Level (\d)", one.name)
        if one.verdict == Verdict.FAIL:
            yield f"{one.name}: {LEVELS[int(level[1])].advice if level else one.reason}"
        elif one.verdict == Verdict.BLOCKED and one.name == CHECKS:
            yield f"{CHECKS}: run them in Bridge's own environment, and say so with --skip-bridge-tests"
        elif one.verdict == Verdict.BLOCKED:
            yield f"{one.name}: remove what blocks it and run it again"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _curves(runs: Mapping[str, str]) -> str:
    """Returns the curves of runs side by side, as HTML."""
    labels, rows = list(runs), [read_metrics(Path(folder)) for folder in runs.values()]
    steps = [row["step"] for run in rows for row in run]
    if not steps:
        return ""
    ends, width = (min(steps), max(steps)), plots.window(rows)
    cards = [
        card_of(chart.title, chart.metric, plots.svg(chart, labels, ends, width)) for chart in plots.charts(rows)
    ]
    return f'<h2>Curves of level 5</h2>{legend_of(labels)}<div class="cards">{"".join(cards)}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table_of(head, ("".join(f"<td>{escaped(cell)}</td>" for cell in row) for row in rows), "keys", head[0])
