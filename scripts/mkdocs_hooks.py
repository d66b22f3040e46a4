"""Makes pages of README.md and CONTRIBUTING.md, and links of pages fit the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
CODE_BLOCK = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def site_link(match: re.Match[str], docs: Path, folder: Path) -> str:
    """Returns a link that holds in the site, or only its words where it leads to a file that the site lacks."""
    words, target, anchor = match[1], match[2], match[3] or ""
    path = (folder / target).resolve()
    if path.is_relative_to(docs):
        return f"[{words}]({path.relative_to(docs)}{anchor})"
    page = PAGES.get(path.name) if path.parent == docs.parent else None
    return f"[{words}]({page}{anchor})" if page else words


def site_markdown(markdown: str, docs: Path, folder: Path) -> str:
    """Returns a page of ``folder`` with the links of its text, not of its code blocks, rewritten."""
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
    """Drops links to files outside the site, such as the examples."""
    docs = Path(config.docs_dir).resolve()
    if page.file.src_uri in PAGES.values() or "/" in page.file.src_uri:
        return markdown
    return site_markdown(markdown, docs, docs)
