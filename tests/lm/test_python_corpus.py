"""The corpus inside Python: its size, its cleanness, and a held-out part that training never sees."""

import platform
import re
import subprocess
import sys

import pytest

from paceline.lm.python_corpus import python_corpus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus():
    return python_corpus()


def paragraphs(documents):
    return [" ".join(part.split()) for text in documents for part in text.split("\n\n")]


def size(documents):
    return sum(len(text.encode()) for text in documents)


@pytest.mark.long
def test_about_two_megabytes_with_a_twentieth_held_out(corpus):
    total = size(corpus.training) + size(corpus.held_out)
    assert 1.5e6 < total < 2.5e6
    assert 0.045 < size(corpus.held_out) / total < 0.06
    assert len(corpus.held_out) >= 20 and len(corpus.training) >= 300


def test_it_is_english_from_topics_and_from_docstrings(corpus):
    text = "\n".join(corpus.training + corpus.held_out)
    assert "Changed in version" in text  # topics
    assert "Return a shallow copy" in text or "Shallow copy operation" in text  # docstrings
    words = re.findall(r"[a-z]+", text.lower())
    assert words.count("the") / len(words) > 0.03


def test_no_paragraph_occurs_twice(corpus):
    found = paragraphs(corpus.held_out) + paragraphs(corpus.training)
    assert all(found)
    assert len(set(found)) == len(found)


def test_held_out_text_is_not_in_training_in_other_wrapping(corpus):
    def runs(documents):
        words = [re.findall(r"\w+", text) for text in documents]
        return {tuple(found[i : i + 20]) for found in words for i in range(len(found) - 19)}

    held_out = runs(corpus.held_out)
    assert len(held_out & runs(corpus.training)) < 0.01 * len(held_out)


def test_lines_are_clean(corpus):
    for text in corpus.training + corpus.held_out:
        assert text and text == text.strip("\n")
        assert not re.search(r"[ \t]\n|\n\n\n|\f|\r", text)


@pytest.mark.slow
def test_another_process_reads_the_same_and_imports_no_module_for_it(corpus):
    code = (
        "import sys; from paceline.lm.python_corpus import python_corpus; before = set(sys.modules);"
        "print(python_corpus().fingerprint,"
        "      [name for name in sys.modules if name not in before and '_sysconfig' not in name])"
    )
    settings = {"PYTHONHASHSEED": "7", "PYTHONOPTIMIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=settings, check=True
    )
    assert done.stdout == f"{corpus.fingerprint} []\n"
    assert corpus.describe() == {
        "corpus": "python",
        "python": platform.python_version(),
        "sha256": corpus.fingerprint,
    }


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no sources"):
        python_corpus()


def test_what_is_read_and_what_is_not(tmp_path, monkeypatch):
    sources = {
        "one.py": (
            '"""Module one.\n\n    Shared paragraph."""\n'
            'if True:\n    class A:\n        """Class."""\n        def f():\n            "Method."\n'
            'try:\n    async def g():\n        """Coroutine."""\nexcept Exception:\n    def h(): "Handler."\n'
            'x = "no docstring"\n"neither"\n'
        ),
        "package/two.py": '"""Shared\nparagraph.\n\nModule two."""\n',
        "pydoc_data/topics.py": "topics = {'if': 'The if statement.\\n\\nShared paragraph.'}",
        "test/test_x.py": '"""Test."""',
        "idlelib/x.py": '"""Editor."""',
        "site-packages/x.py": '"""Installed."""',
        "config-3.11/x.py": '"""Configuration."""',
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("paceline.lm.python_corpus._chosen", lambda texts: {"topic if"})
    corpus = python_corpus()
    assert corpus.held_out == ("The if statement.\n\nShared paragraph.",)
    assert corpus.training == ("Module one.\n\nClass.\n\nMethod.\n\nCoroutine.\n\nHandler.", "Module two.")
