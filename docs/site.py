"""MkDocs hooks: the site also holds README.md, CONTRIBUTING.md and the files outside docs/ that its pages link to."""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""File of the repository's root -> the site's page that it becomes."""
SOURCES = PurePosixPath("source")
"""Folder of the site for the repository's other files, as text that a browser shows."""
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of PAGES and each linked file outside docs/; leave this module out."""
    module = files.get_file_from_path(Path(__file__).name)
    if module is not None:
        files.remove(module)
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    for page in list(files.documentation_pages()):
        for path, _ in LINK.findall(page.content_string):
            place = _place(page.src_uri, path)
            if place.is_relative_to(SOURCES) and files.get_file_from_path(str(place)) is None:
                source = ROOT / place.relative_to(SOURCES).with_suffix("")
                files.append(File.generated(config, str(place), content=source.read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the page's links to places in the site."""

    def moved(link: re.Match[str]) -> str:
        return f"]({_place(page.file.src_uri, link[1])}{link[2] or ''})"

    return LINK.sub(moved, markdown)


def _place(page: str, path: str) -> PurePosixPath:
    """Return where the site has the file that a link of this page names; all pages are at the site's top.

    Raises:
        FileNotFoundError: there is no such file.
    """
    folder = ROOT if page in PAGES.values() else ROOT / "docs"
    target = (folder / path).resolve(strict=True).relative_to(ROOT)
    if str(target) in PAGES:
        return PurePosixPath(PAGES[str(target)])
    if target.is_relative_to("docs"):
        return PurePosixPath(target.relative_to("docs"))
    return SOURCES / f"{target}.txt"
