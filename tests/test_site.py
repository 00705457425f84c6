"""The documentation site: built as `make docs` builds it, then read page by page, and opened in a browser."""

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
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""Elements that make a browser load something, and by which attribute."""

pytestmark = pytest.mark.slow
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # as in the Makefile
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    # Not with --quiet: a strict build would then count no warnings. Whatever else is said is a warning too.
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO ")]
    assert (done.returncode, said) == (0, [])
    return out


class Reader(HTMLParser):
    """What a page loads, where it links to, and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if found.get(LOADS.get(tag, "")):
            self.loads.append(found[LOADS[tag]])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])


@pytest.fixture(scope="module")
def pages(site):
    """Every page but the records, which are what some run wrote."""
    found = {
        path: Reader(path) for path in site.rglob("*.html") if path.name not in ("report.html", "404.html")
    }
    assert len(found) >= 15
    return found


def in_nav() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    return re.findall(r"^ *- [^#\n]*: (\S+\.md)$", nav, re.MULTILINE)


def test_the_site(site, pages):
    """In one test, so that workers do not build it once each."""
    check_every_page_is_in_the_navigation_and_on_the_site(site)
    check_every_link_and_anchor_leads_somewhere(pages, site)
    check_nothing_is_loaded_from_another_host(pages, site)
    check_the_api_page_has_every_public_name_and_no_private_one(pages, site)
    check_a_link_to_the_repository_is_a_part_of_the_site(site)


def check_every_page_is_in_the_navigation_and_on_the_site(site):
    assert sorted(in_nav()) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    for name in in_nav():
        assert (site / name).with_suffix(".html").is_file(), name


def check_every_link_and_anchor_leads_somewhere(pages, site):
    checked = 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            assert target.is_file() and target.is_relative_to(site), f"{path.name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors | {"__top"}, f"{path.name}: {link}"
                checked += 1
    assert checked > 100


def check_nothing_is_loaded_from_another_host(pages, site):
    for path, page in pages.items():
        for url in page.loads:
            assert not urlsplit(url).scheme and not urlsplit(url).netloc, f"{path.name}: {url}"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text()), path.name


def check_the_api_page_has_every_public_name_and_no_private_one(pages, site):
    anchors = {a for a in pages[site / "api.html"].anchors if a.startswith("paceline.")}
    wanted = {f"paceline.{name}" for name in paceline.__all__ if name != "__version__"}
    assert wanted <= anchors
    assert not [anchor for anchor in anchors if "._" in anchor]
    text = (site / "api.html").read_text()
    assert "code-block" not in text and "&gt;&gt;&gt;" in text  # docstrings as the site wants them


def check_a_link_to_the_repository_is_a_part_of_the_site(site):
    assert "AveragedModelCallback" in (site / "examples" / "huggingface.html").read_text()
    assert (site / "records" / "index.html").is_file()
    record = "records/2026-11-18-kills.json"
    assert (site / record).read_bytes() == (ROOT / record).read_bytes()


@pytest.mark.long
def test_what_is_wrong_fails_the_build(tmp_path):
    root = tmp_path / "repository"
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "mkdocs.yml", root)
    for name in ("src", "examples", "records"):
        (root / name).symlink_to(ROOT / name)
    faults = "\n[a](nowhere.md) [b](weights.md#nowhere) [c](../records/nowhere.json)\n"
    with (root / "docs" / "index.md").open("a") as file:
        file.write(faults)
    (root / "docs" / "forgotten.md").write_text("# Not in the navigation\n")
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    for message in ("'nowhere.md'", "'weights.md#nowhere'", "'../records/nowhere.json'", "forgotten.md"):
        assert message in done.stderr


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_browser_from_the_file_without_a_network(site):
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        requests, errors = [], []
        tab = browser.new_page()
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        for name in in_nav():
            tab.goto((site / name).with_suffix(".html").as_uri())
            for width in (390, 1280):
                tab.set_viewport_size({"width": width, "height": 900})
                # Waits, since wide tables are made to scroll by a script, after the page is there.
                tab.wait_for_function("document.documentElement.scrollWidth <= innerWidth", timeout=10_000)
        tab.goto((site / "index.html").as_uri())
        tab.click(".md-search__input")
        tab.keyboard.type("reset_average")
        tab.wait_for_selector(".md-search-result__item a[href*='api.html']", timeout=10_000)
        found = tab.text_content(".md-search-result__list")
        browser.close()
    assert "A second phase" in found  # the section of weights.md about it
    assert errors == []
    assert {urlsplit(url).scheme for url in requests} <= {"file", "data", "blob", "about"}
