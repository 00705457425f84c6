"""The documentation site: built as `make docs` builds it, then read page by page."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import paceline

ROOT = Path(__file__).parents[1]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""Elements that make a browser load something, and by which attribute."""

pytestmark = pytest.mark.slow
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # as in the Makefile
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


class Reader(HTMLParser):
    """What a page loads, where it links to, and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = {"__top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if found.get(LOADS.get(tag, "")):
            self.loads.append(found[LOADS[tag]])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])


def test_the_site(tmp_path):
    """In one test, so that parallel workers build it once."""
    done = build(ROOT, tmp_path)
    # Without --quiet, which would count no warnings. Whatever else is printed is a warning too.
    printed = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO ")]
    assert (done.returncode, printed) == (0, [])
    reports = ("report.html", "404.html")
    pages = {path: Reader(path) for path in tmp_path.rglob("*.html") if path.name not in reports}
    check_every_page_is_there(tmp_path)
    check_links_and_anchors(pages, tmp_path)
    check_nothing_is_loaded_from_another_host(pages, tmp_path)
    check_the_api_page(pages, tmp_path)
    assert "fully_shard" in (tmp_path / "examples" / "fsdp2.html").read_text()
    record = "records/2026-11-18-kills.json"
    assert (tmp_path / record).read_bytes() == (ROOT / record).read_bytes()


def check_every_page_is_there(site):
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / path.name).with_suffix(".html").is_file(), path.name


def check_links_and_anchors(pages, site):
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            assert target.is_file() and target.is_relative_to(site), f"{path.name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {link}"


def check_nothing_is_loaded_from_another_host(pages, site):
    for path, page in pages.items():
        for url in page.loads:
            assert not urlsplit(url).scheme and not urlsplit(url).netloc, f"{path.name}: {url}"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text()), path.name


def check_the_api_page(pages, site):
    anchors = {a for a in pages[site / "api.html"].anchors if a.startswith("paceline.")}
    assert {f"paceline.{name}" for name in paceline.__all__ if name != "__version__"} <= anchors
    assert not [anchor for anchor in anchors if "._" in anchor]
    text = (site / "api.html").read_text()
    assert "code-block" not in text and "&gt;&gt;&gt;" in text  # docstrings as the site wants them


@pytest.mark.long
def test_what_is_wrong_fails_the_build(tmp_path):
    root = tmp_path / "repository"
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "mkdocs.yml", root)
    for name in ("src", "examples", "records"):
        (root / name).symlink_to(ROOT / name)
    with (root / "docs" / "index.md").open("a") as file:
        file.write("\n[a](nowhere.md) [b](weights.md#nowhere) [c](../records/nowhere.json)\n")
    (root / "docs" / "forgotten.md").write_text("# Not in the navigation\n")
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    for message in ("'nowhere.md'", "'weights.md#nowhere'", "'../records/nowhere.json'", "forgotten.md"):
        assert message in done.stderr
