"""Adds README.md and CONTRIBUTING.md to the site as pages, and rewrites links so that they work there."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?\[[^\]]+\])\(([^)#:\s]+)(#[^)\s]*)?\)")
CODE_BLOCK = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def site_link(match: re.Match[str], docs: Path, folder: Path) -> str:
    """Returns a link or an image that works in the site, or only the label of a link if the site lacks the file."""
    label, target, anchor = match[1], match[2], match[3] or ""
    path = (folder / target).resolve()
    if path.is_relative_to(docs):
        return f"{label}({path.relative_to(docs)}{anchor})"
    page = PAGES.get(path.name) if path.parent == docs.parent else None
    return f"{label}({page}{anchor})" if page else label.strip("[]")


def site_markdown(markdown: str, docs: Path, folder: Path) -> str:
    """Rewrites the links of a page of ``folder``, except in code blocks."""
    parts = CODE_BLOCK.split(markdown)
    parts[::2] = [LINK.sub(lambda match: site_link(match, docs, folder), part) for part in parts[::2]]
    return "".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside the folder of the site."""
    docs = Path(config.docs_dir).resolve()
    for source, page in PAGES.items():
        content = site_markdown((docs.parent / source).read_text(), docs, docs.parent)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links to files outside the site, such as the examples, by their labels."""
    docs = Path(config.docs_dir).resolve()
    if page.file.src_uri in PAGES.values() or "/" in page.file.src_uri:
        return markdown
    return site_markdown(markdown, docs, docs)
