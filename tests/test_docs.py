"""Every Python block of README and docs runs, in order, one namespace a file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page):
    names = {}
    for i, block in enumerate(BLOCKS.findall(page.read_text())):
        exec(compile(block, f"{page.name} block {i}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_recipes_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for recipe in re.findall(r"recipes/\w+\.toml", text):
        assert (ROOT / recipe).exists(), recipe
