"""The pages are true: their Python runs, their commands parse, and what they name exists."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from functools import reduce
from pathlib import Path

import attrs
import pytest

import verl_fn
from verl_fn import cli, steps
from verl_fn.config.algorithms import BUILT_IN
from verl_fn.config.load import load
from verl_fn.config.schema import Config

ROOT = Path(__file__).parents[1]
FOLDERS = ("state", "steps", "backends", "backends/fsdp", "verl_fn/driver")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / folder / "README.md" for folder in FOLDERS),
    *sorted((ROOT / "docs").rglob("*.md")),
]
REFERENCE = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
BLOCKS = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, *languages):
    return [text for language, text in BLOCKS.findall(page.read_text()) if language in languages]


def commands(page, program):
    """Arguments of every line that runs ``program``, in shell blocks and in code spans, without comments."""
    text = "\n".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ").removeprefix(".venv/bin/") for line in text.splitlines()]
    lines += re.findall(r"`((?:verl-fn|make) [^`\n]+)`", BLOCKS.sub("", page.read_text()))
    return [shlex.split(line, comments=True)[1:] for line in lines if line.split(" ")[0] == program]


@pages
def test_python_blocks_run(page):
    names = {}
    for i, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name} block {i}", "exec"), names)


@pages
def test_commands_parse(page):
    for arguments in commands(page, "verl-fn"):
        if len(arguments) == 1 and "--" not in arguments[0]:
            continue  # a command that is spoken of, such as `verl-fn train`
        try:
            parsed = cli.parse(arguments)
        except SystemExit as error:
            pytest.fail(f"{page.name}: verl-fn {shlex.join(arguments)} exits with {error.code}")
        if parsed.command in ("train", "config", "eval", "fork"):
            load(getattr(parsed, "config", None), parsed.overrides)  # an unknown key is an error


@pytest.mark.slow
def test_the_try_of_a_translation_trains(tmp_path):
    """All commands of the section, as they stand."""
    page = ROOT / "docs/from_verl.md"
    (block,) = blocks(page, "console")
    program = f'verl-fn() {{ "{sys.executable}" -m verl_fn.cli "$@"; }}\n'
    done = subprocess.run(["bash", "-ec", program + block], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stdout and (tmp_path / "runs/try/model/config.json").is_file()


@pages
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for arguments in commands(page, "make"):
        named = {argument for argument in arguments if "=" not in argument}
        assert named <= targets, f"{page.name}: make {shlex.join(arguments)}"


@pages
def test_links_and_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", BLOCKS.sub("", text)):
        assert target.startswith("http") or (page.parent / target).exists(), target
    folders = "recipes|examples|tests|scripts|benchmarks|state|steps|backends|verl_fn"
    for file in re.findall(rf"(?<![\w/])(?:{folders})/[\w/]+\.(?:toml|py|jsonl?)\b", text):
        assert (ROOT / file).exists(), file


def test_the_commands_of_the_pages_are_found():
    assert ["setup"] in commands(ROOT / "CONTRIBUTING.md", "make")
    assert any("recipes/grpo_count.toml" in found for found in commands(ROOT / "README.md", "verl-fn"))


def test_algorithms_names_every_step():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    functions = [name for name in steps.__all__ if name.islower() and callable(getattr(steps, name))]
    classes = ["FixedKL", "AdaptiveKL"]
    missing = [name for name in (*functions, *classes) if not re.search(rf"\b{name}\b", text)]
    modes = [mode for mode in steps.aggregate.__globals__["MODES"] if f"`{mode}`" not in text]
    assert not missing + modes, f"docs/algorithms.md says nothing of {missing + modes}"


def reads(key):
    """Says whether some config has this key: those of ``[algorithm]`` depend on the algorithm."""
    part, *names = key.split(".")
    roots = [make() for make in BUILT_IN.values()] if part == "algorithm" else []
    roots.append(getattr(Config(), part))
    return any(
        reduce(lambda table, name: getattr(table, name, KeyError), names, root) is not KeyError for root in roots
    )


def keys_named(text):
    """Config keys in code spans, without those of the tables that translate verl's names."""
    sections = "|".join(field.name for field in attrs.fields(Config))
    text = re.sub(r"^\| verl \|.*?(?=^[^|]|\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(rf"`((?:{sections})(?:\.\w+)+)", text)) - {"model.safetensors"}


def test_pages_name_keys_that_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {page.name: keys_named(page.read_text()) for page in pages}
    assert len(named["algorithms.md"]) > 30 and len(named["gpus.md"]) > 5
    unknown = {name: [key for key in sorted(keys) if not reads(key)] for name, keys in named.items()}
    assert not any(unknown.values()), unknown
    assert not reads("algorithm.no_such_key") and not reads("actor.no_such_key")


def test_algorithms_names_every_key_of_its_section():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    names = {field.name for options in BUILT_IN.values() for field in attrs.fields(options)}
    missing = sorted(name for name in names if f"algorithm.{name}" not in text)
    assert not missing, f"docs/algorithms.md says nothing of algorithm.{{{', '.join(missing)}}}"


def test_the_reference_has_a_page_for_each_package():
    parts = {part.stem for part in (ROOT / "verl_fn").iterdir() if part.is_dir() and not part.name.startswith("_")}
    assert parts - {"benchmarks"} == REFERENCE.keys() - {"index", "verl_fn"}
    missing = [part.name for part in (ROOT / "backends").iterdir() if (part / "__init__.py").exists()]
    missing = [name for name in missing if f"::: verl_fn.backends.{name}\n" not in REFERENCE["backends"]]
    assert not missing, f"docs/api/backends.md lacks {missing}"


def test_the_front_page_describes_each_name_once():
    first_cells = [line.split("|")[1] for line in REFERENCE["verl_fn"].splitlines() if line.startswith("| `")]
    described = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert sorted(described) == sorted(set(verl_fn.__all__) - {"user_files"})


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_names_modules_that_exist(page):
    modules = re.findall(r"^::: (\S+)$", REFERENCE[page], re.MULTILINE)
    assert modules or page in ("index", "verl_fn")
    for module in modules:
        importlib.import_module(module)


# Signatures stay on one line, since for each longer one ruff would start to break it; and a build ends before its
# garbage matters.
MKDOCS = "import gc, sys; gc.disable(); sys.modules['ruff'] = None; from mkdocs.__main__ import cli; cli()"


def build(config, site):
    """Builds the site without a way out: a proxy that does not answer stands for the network."""
    command = [sys.executable, "-c", MKDOCS, "build", "--strict", "--config-file", config, "--site-dir", site]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_site_builds_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs")
    process = build(ROOT / "mkdocs.yml", tmp_path)
    assert process.returncode == 0, process.stderr
    reference = (tmp_path / "api" / "state.html").read_text()
    assert 'id="verl_fn.state.Batch.from_rows"' in reference
    (picture,) = re.findall(r'<img[^>]+src="(\w+\.png)"', (tmp_path / "index.html").read_text())
    assert (tmp_path / picture).exists()
    assert "<blockquote>" not in reference, "an example is shown as a quotation"
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+", page.read_text())
        assert not fetched, f"{page.name} fetches {fetched}"


def test_a_link_to_nowhere_breaks_the_site(tmp_path):
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\nSee [there](nowhere.md).\n")
    changes = {"docs_dir": "docs", "nav": "[index.md]", "hooks": "[]", "plugins": "[search]"}
    lines = [f"INHERIT: {ROOT / 'mkdocs.yml'}", *(f"{key}: {value}" for key, value in changes.items())]
    (tmp_path / "mkdocs.yml").write_text("\n".join(lines))
    process = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert process.returncode != 0
    assert "nowhere.md" in process.stderr
