"""Pages of the documentation: their tables are what code and records give, and nothing else is in them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.experiments import documentation
from paceline.experiments.pages import filled, tables_in

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "records"
TABLE = re.compile(r"(<!-- table: \S+ -->\n).*?(<!-- end -->)", re.DOTALL)


@pytest.fixture(scope="module")
def tables():
    return documentation.tables(RECORDS)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_tables_are_what_code_and_records_give(path, tables):
    page = path.read_text(encoding="utf-8")
    made = tables.get(path.name, {})
    assert sorted(tables_in(page)) == sorted(made)
    assert filled(page, made) == page, "make it again: make figures"
    assert filled(TABLE.sub(r"\1\2", page), made) == page


def test_every_page_with_tables_is_there(tables):
    assert all((ROOT / "docs" / page).is_file() for page in tables)


@pytest.mark.slow
def test_the_command_makes_all_pages_and_figures(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    pages = documentation.tables(RECORDS)
    for name in pages:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        (tmp_path / "docs" / name).write_text(TABLE.sub(r"\1\2", text), encoding="utf-8")
    told = run(tmp_path / "docs", RECORDS)
    assert told.returncode == 0, told.stderr
    made = {path.name for path in (tmp_path / "docs").iterdir()}
    assert {Path(line).name for line in told.stdout.splitlines()} == made
    for name in made:
        if not name.endswith(".pdf"):
            assert (ROOT / "docs" / name).is_file(), name
    for name in pages:
        assert (tmp_path / "docs" / name).read_bytes() == (ROOT / "docs" / name).read_bytes()


@pytest.mark.slow
def test_the_command_says_how_to_call_it(tmp_path):
    for folders in ((), (tmp_path,), (tmp_path, tmp_path / "none")):
        told = run(*folders)
        assert told.returncode == 1 and "experiments.documentation docs records" in told.stderr


@pytest.mark.slow
def test_tables_are_made_without_torch():
    code = """
import sys
from pathlib import Path
from paceline.experiments import documentation
assert all(make() for page in documentation.tables(Path("records")).values() for make in page.values())
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def run(*folders):
    words = [sys.executable, "-m", "paceline.experiments.documentation", *map(str, folders)]
    return subprocess.run(words, capture_output=True, text=True)
