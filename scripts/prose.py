"""Counts habits of prose that make a reader stop, and holds a ceiling on the rate of each.

    python scripts/prose.py                # the rates; fails above a ceiling, and names the worst files
    python scripts/prose.py --show FILE... # every place of these files, or of all files, that counts

Prose is docstrings, comments, string literals of three words or more (errors, descriptions of options) and pages.
Code inside prose does not count: blocks, spans in backticks, doctests.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("state", "steps", "backends", "benchmarks", "verl_fn", "scripts", "examples", "docs")
PAGES = ("README.md", "CONTRIBUTING.md")

# Words that follow "those" when no noun does.
_NO_NOUN = (
    r"\s*(?:[.,;:)!?]|$)|\s+(?:of|that|which|who|whose|with|without|in|on|at|from|for|to|by|as|where|when|if|it|its"
    r"|they|he|the|a|an|one|are|is|were|was|have|has|had|do|does|can|will|may|must|need|and|or|but|not|here|there"
    r"|before|after|above|below|between|beside|left|among|under|over|than|then|alone|too|both|only|\w+ed|\w+ing)\b"
)
HABITS = {
    "those": re.compile(rf"\bthose(?={_NO_NOUN})", re.IGNORECASE),
    "that of": re.compile(r"\b(?:that|those)\s+of\b", re.IGNORECASE),
    "where": re.compile(r"\bwhere\b", re.IGNORECASE),
    ", which": re.compile(r",\s+which\b", re.IGNORECASE),
    "alone": re.compile(r"\balone\b", re.IGNORECASE),
}
# Occurrences per 10,000 words. A ceiling only goes down. Of optax, this program counts 0.6, 1.3, 19, 2.4 and 0.
CEILINGS = {"those": 2.4, "that of": 2.6, "where": 24.0, ", which": 4.8, "alone": 2.0}

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"(?:(?<=\n)|\A)```.*?\n```|^ *(?:>>>|\.\.\.) .*?$|``[^`]+``|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def literals(source: str) -> Iterator[str]:
    """Yields the docstrings and other string literals of three words or more; each field of an f-string is code."""
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in node.values}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        if len(text.split()) >= 3:
            yield text


def comments(source: str) -> Iterator[str]:
    """Yields comments; comments on consecutive lines are one text."""
    last, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield "\n".join(lines)
            lines = []
        lines.append(token.string.removeprefix("#").strip())
        last = token.start[0]
    yield "\n".join(lines)


def prose(source: str, suffix: str) -> str:
    """Returns the prose of a Python file or a page; `x` stands for the code inside it.

    Example:
        >>> prose("x = 1  # A limit, which holds.", ".py")
        'A limit, which holds.'
    """
    texts = [*literals(source), *comments(source)] if suffix == ".py" else [source]
    return "\n\n".join(_CODE.sub("`x`", text) for text in texts)


def files() -> list[Path]:
    """Returns the Python files and pages of the project; tests and the links below ``verl_fn`` are left out."""
    links = {ROOT / "verl_fn" / name for name in FOLDERS}
    found = (file for name in FOLDERS for file in (ROOT / name).rglob("*") if file.suffix in (".py", ".md"))
    return [*(ROOT / page for page in PAGES), *sorted(f for f in found if not links & set(f.parents))]


def count(texts: dict[Path, str]) -> tuple[dict[str, Counter[Path]], int]:
    """Returns how often each habit occurs in each text, and the number of words of all texts."""
    counts = {
        name: Counter({file: n for file, text in texts.items() if (n := len(habit.findall(text)))})
        for name, habit in HABITS.items()
    }
    return counts, sum(len(_WORD.findall(text)) for text in texts.values())


def show(file: Path, text: str) -> None:
    """Prints every place of a text that counts, with the words around it."""
    for name, habit in HABITS.items():
        for found in habit.finditer(text):
            around = text[max(0, found.start() - 90) : found.end() + 70]
            print(f"{file}: {name}: {' '.join(around.split())}")


def main(arguments: list[str] | None = None) -> int:
    """Prints the rates and returns 1 if one is above its ceiling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="print every place that counts")
    parser.add_argument("files", nargs="*", type=Path, help="files to read instead of the whole project")
    asked = parser.parse_args(arguments)
    texts = {file: prose(file.read_text(), file.suffix) for file in asked.files or files()}
    if asked.show:
        for file, text in texts.items():
            show(file, text)
        return 0
    counts, words = count(texts)
    failed = 0
    for name, ceiling in CEILINGS.items():
        rate = counts[name].total() / words * 1e4
        print(
            f"{name:>8}: {rate:5.1f} per 10,000 words, at most {ceiling:g} ({counts[name].total()} in {words} words)"
        )
        if rate > ceiling:
            failed = 1
            for file, n in counts[name].most_common(10):
                print(f"{n:>14} {file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
