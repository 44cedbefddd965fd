"""The pages build into a site without a warning: its links lead somewhere, and it loads nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the site, built as CONTRIBUTING.md describes."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_menu(site):
    menu = (site / "index.html").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.stem / "index.html").is_file()
        assert f'href="{page.stem}/"' in menu


def test_linked_sources_are_in_the_site(site):
    page = (site / "environments" / "index.html").read_text("utf-8")
    assert "../source/configs/calculator.py.txt" in page
    assert (site / "source/configs/calculator.py.txt").read_bytes() == (ROOT / "configs/calculator.py").read_bytes()


def test_a_browser_asks_no_other_server(site):
    for page in site.rglob("index.html"):
        loaded = re.findall(r'(?:src|<link[^>]* href)="(https?://[^"]*)', page.read_text("utf-8"))
        assert loaded == [], page
