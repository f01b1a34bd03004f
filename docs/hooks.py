"""Hooks of mkdocs that add linked files outside docs/ to the site."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()[^)#:\s]+")
_ROLE = re.compile(r":(?:class|data|func|meth):(?=<code>)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, and the files that these link to, under their own paths."""
    docs = Path(config.docs_dir)
    waiting = list(docs.rglob("*.md"))
    while waiting:
        page = waiting.pop()
        for link in _LINK.findall(page.read_text()):
            target = (page.parent / link).resolve()
            if not _is_outside(target, docs):
                continue
            name = target.relative_to(docs.parent).as_posix()
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(target)))
                if target.suffix == ".md":
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to these files, because the site has them next to the folders of docs/, not above them."""
    docs, source = Path(config.docs_dir), Path(page.file.abs_src_path)

    def lead(match: re.Match[str]) -> str:
        target = (source.parent / match.group()).resolve()
        if not _is_outside(target, docs):
            return match.group()
        return os.path.relpath(target.relative_to(docs.parent), Path(page.file.src_uri).parent)

    return _LINK.sub(lead, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the roles of reStructuredText from docstrings, and keep the names."""
    return _ROLE.sub("", html)


def _is_outside(target: Path, docs: Path) -> bool:
    """Return True for a file of the repository outside docs/. mkdocs itself reports broken links."""
    return target.is_file() and target.is_relative_to(docs.parent) and not target.is_relative_to(docs)
