"""The check of the prose counts what it says: words of people, not of code, and it fails above a ceiling."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("prose", ROOT / "scripts/prose.py")
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)

SOURCE = '''
"""Weights of the actor and those of the critic, which are read alone."""
x = torch.where(mask, those, alone)  # Only those rows count,
# which is the case where ``those of`` stands.
raise ValueError(f"{those} of {where}: where the folder is, that of {name}")
"""Example:
    >>> f(where)  # those of it
"""
'''


def counts(text, suffix):
    text = prose.prose(text, suffix)
    return {name: len(habit.findall(text)) for name, habit in prose.HABITS.items()}


def test_docstrings_comments_and_errors_count_and_code_does_not():
    assert counts(SOURCE, ".py") == {"those": 1, "that of": 2, "where": 2, ", which": 2, "alone": 1}


def test_blocks_and_spans_of_a_page_do_not_count():
    page = "Rows where a mask is 0, which `where` says.\n\n```python\nwhere(those)  # alone\n```\n\nThose that end.\n"
    assert counts(page, ".md") == {"those": 1, "that of": 0, "where": 1, ", which": 1, "alone": 0}


@pytest.mark.parametrize(
    ("text", "headless"),
    [
        ("those rows", 0),
        ("those, and", 1),
        ("those\nof it", 1),
        ("those sampled", 1),
        ("Those.", 1),
        ("those two", 0),
    ],
)
def test_those_needs_a_noun(text, headless):
    assert counts(text, ".md")["those"] == headless


def test_the_project_is_read_once_and_without_tests():
    names = [str(file.relative_to(ROOT)) for file in prose.files()]
    assert len(names) == len(set(names)) and {"README.md", "docs/laws.md", "state/batch.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "verl_fn/state/"))]


def test_it_fails_above_a_ceiling_and_names_the_worst_files(tmp_path, capsys):
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("A page of words. " * 20)
    bad.write_text("It stands alone. " * 20)
    assert prose.main([str(good)]) == 0
    assert "alone:   0.0" in capsys.readouterr().out
    assert prose.main([str(good), str(bad)]) == 1
    printed = capsys.readouterr().out
    assert f"20 {bad}" in printed and str(good) not in printed


def test_it_shows_each_place(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("The model alone is read.")
    prose.main(["--show", str(page)])
    assert capsys.readouterr().out == f"{page}: alone: The model alone is read.\n"
