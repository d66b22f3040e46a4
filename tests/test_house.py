"""The house stays in order: short files and functions, and the whole config only where it is read and planned."""

import ast
import functools
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("state", "steps", "backends", "benchmarks", "verl_fn")
LINKS = {ROOT / "verl_fn" / name for name in FOLDERS}
FILES = sorted(
    file
    for folder in FOLDERS
    for file in (ROOT / folder).rglob("*.py")
    if not any(link in file.parents for link in LINKS)
)
LONGEST_FILE, LONGEST_FUNCTION = 700, 60
MUTANTS = {
    f"{file.stem}: {mutant['name']}": mutant
    for file in sorted((ROOT / "tests/mutants").glob("*.toml"))
    for mutant in tomllib.loads(file.read_text())["mutant"]
}
EDGE = ("verl_fn/config/", "verl_fn/cli/")


@functools.cache
def functions(file):
    return [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def name_of(file):
    return str(file.relative_to(ROOT))


def test_all_files_are_seen():
    assert {"state/batch.py", "backends/local.py", "verl_fn/runs/loop.py"} <= {name_of(f) for f in FILES}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_and_functions_are_short(file):
    assert len(file.read_text().splitlines()) <= LONGEST_FILE
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(file)}
    assert {name: lines for name, lines in long.items() if lines > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("file", [f for f in FILES if not name_of(f).startswith(EDGE)], ids=name_of)
def test_nothing_below_the_plan_takes_the_whole_config(file):
    takers = [
        f.name
        for f in functions(file)
        for argument in (*f.args.args, *f.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation).strip("'\"") == "Config"
    ]
    assert takers == []


def test_the_protocols_have_no_any():
    tree = ast.parse((ROOT / "backends/protocol.py").read_text())
    assert "Any" not in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def test_mutants_have_names_of_their_own():
    count = sum(file.read_text().count("[[mutant]]") for file in (ROOT / "tests/mutants").glob("*.toml"))
    assert len(MUTANTS) == count


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_break_what_there_is_and_name_tests_that_there_are(name):
    mutant = MUTANTS[name]
    text = (ROOT / mutant["file"]).read_text()
    assert text.count(mutant["old"]) == 1, f"{mutant['file']} has this text {text.count(mutant['old'])} times"
    assert mutant["new"] != mutant["old"] and mutant["tests"]
    if mutant["file"].endswith(".py"):
        ast.parse(text.replace(mutant["old"], mutant["new"]))
    for test in mutant["tests"]:
        file, _, function = test.partition("::")
        assert not function or function.partition("[")[0].split("::")[-1] in {f.name for f in functions(ROOT / file)}
        assert (ROOT / file).exists()
