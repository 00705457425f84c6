"""Documents from files, folders and the hub: what comes out, and how the unreadable is refused."""

import gzip
import hashlib
import json
import lzma
import random
import sys

import pyarrow
import pytest
from pyarrow import parquet

from paceline.lm.documents import cut, is_held_out, open_source, read_rows

TEXTS = ["first document\nof two lines", "zweites: äöü €", "third 𝄞"]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


def documents(path):
    return list(open_source(path).documents())


def refused(path, error=ValueError):
    """The message, which must name the file."""
    with pytest.raises(error) as raised:
        documents(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- What comes out -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".txt", ".md"])
@pytest.mark.parametrize("packed", PACK)
def test_a_text_file_is_one_document(tmp_path, ending, packed):
    path = tmp_path / f"a{ending}{packed}"
    path.write_bytes(PACK[packed]("one\r\n\r\ntwo €\n".encode()))
    assert documents(path) == ["one\n\ntwo €"]


@pytest.mark.parametrize("mark", ["\f", "<|endoftext|>", "\n<|endoftext|>\n", "\f<|endoftext|>"])
def test_marks_separate_the_documents_of_a_text_file(tmp_path, mark):
    path = tmp_path / "a.txt"
    path.write_text(f"{mark}one\nmore{mark}two{mark}{mark}\n three{mark}")
    assert documents(path) == ["one\nmore", "two", "three"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo")
    assert documents(path) == ["one\n\ufefftwo"]


def test_a_very_long_text_is_cut_at_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.lm.documents._LONGEST", 100)
    path = tmp_path / "a.txt"
    lines = [f"line {i:03d}" for i in range(100)]
    path.write_text("\n".join(lines))
    found = documents(path)
    assert len(found) == 9 and max(map(len, found)) <= 110
    assert "\n".join(found).split("\n") == lines


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json"])
@pytest.mark.parametrize("packed", PACK)
def test_rows_of_json_lines(tmp_path, ending, packed):
    path = tmp_path / f"a{ending}{packed}"
    path.write_bytes(PACK[packed](LINES.replace("\n", "\n \n").encode()))
    assert list(read_rows(path)) == [(1 + 2 * i, {"text": text, "id": i}) for i, text in enumerate(TEXTS)]
    if path.name != "a.json":
        assert documents(path) == TEXTS


def test_rows_of_parquet_in_order_over_row_groups(tmp_path):
    texts = [f"document {i}" for i in range(1000)]
    table = pyarrow.table({"id": list(range(1000)), "text": texts, "body": texts[::-1]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert documents(tmp_path / "a.parquet") == texts


def test_blank_documents_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "one"}\n{"text": " \\n"}\n')
    assert documents(path) == ["one"]


def test_a_folder_is_its_files_by_name(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    files = {"b/2.txt": "three", "a.md": "one", "b/10.txt": "two", "c.txt": "four", "empty.txt": ""}
    for name, text in (files | {".hidden/x.txt": "x", ".y.txt": "y", "z.bin": "z"}).items():
        (tmp_path / name).write_text(text)
    assert documents(tmp_path) == ["one", "two", "three", "four"]


def test_a_text_beside_rows_is_about_them(tmp_path):
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "1.jsonl").write_text(LINES)
    (tmp_path / "empty.parquet").touch()
    parquet.write_table(pyarrow.table({"text": ["fourth"]}), tmp_path / "2.parquet")
    assert documents(tmp_path) == [*TEXTS, "fourth"]


def test_a_source_can_be_read_twice(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES)
    source = open_source(tmp_path)
    assert list(source.documents()) == list(source.documents()) == TEXTS


def test_describe_tells_content_and_names_but_not_the_place(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("abc")
    description = open_source(tmp_path / "one").describe()
    digest = hashlib.sha256(b"abc").hexdigest()
    assert description == {"files": [{"name": "a.txt", "bytes": 3, "sha256": digest}]}
    assert description == open_source(tmp_path / "two").describe() == json.loads(json.dumps(description))
    (tmp_path / "two/a.txt").write_text("abd")
    assert description != open_source(tmp_path / "two").describe()


# --- What is refused ------------------------------------------------------------------------------


def test_missing(tmp_path):
    assert "does not exist" in refused(tmp_path / "a.txt", FileNotFoundError)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_empty(tmp_path, name):
    (tmp_path / name).touch()
    assert "is empty" in refused(tmp_path / name)


def test_blank(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\f\n")
    assert "blank" in refused(tmp_path / "a.txt")


def test_unknown_ending(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    assert ".jsonl.xz" in refused(tmp_path / "a.pdf")
    assert "holds no text" in refused(tmp_path)


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"text": "cut o', "line 2: not JSON (Unterminated string starting at at column 10)"),
        ('{"text": "a"} extra', "line 2: not JSON (Extra data at column 15)"),
        ("[" * 100_000, "line 2: not JSON (maximum recursion"),
        ('{"text": ' + "9" * 5000 + "}", "line 2: not JSON (Exceeds the limit"),
        ("[1]", "line 2: an object is needed, not list"),
        ("null", "line 2: an object is needed, not null"),
        ('{"body": "a", "id": 1}', "line 2: no field 'text'; it has body, id"),
        ("{}", "line 2: no field 'text'; it has none"),
        ('{"text": 5}', "line 2: field 'text' must be text, not int"),
        ('{"text": null}', "line 2: field 'text' must be text, not null"),
        ('{"text": "\\ud800"}', "line 2: field 'text' holds a character that does not exist"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n{{"text": "fine"}}\n')
    assert words in refused(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_not_utf8_is_named_by_line_and_byte(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": "1"}\n{"text": "2"}\n{"text": "caf\xe9"}\n')
    assert "line 3: not UTF-8 text (byte 0xe9 at place 13 of the line)" in refused(tmp_path / name)


@pytest.mark.parametrize(
    "packed, broken",
    [(packed, broken) for packed in (".gz", ".xz", ".zst") for broken in ("cut", "another format")]
    + [(".gz", "flipped"), (".xz", "flipped")],  # zstd has no checksum unless its writer wants one
)
def test_a_broken_packed_file(tmp_path, packed, broken):
    noise = random.Random(0).randbytes(50_000).hex()
    data = PACK[packed]("".join(noise[i : i + 100] + "\n" for i in range(0, 100_000, 100)).encode())
    if broken == "cut":
        data = data[: len(data) // 2]
    elif broken == "flipped":
        data = data[:30_000] + bytes([data[30_000] ^ 255]) + data[30_001:]
    else:
        data = b"plain text"
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(data)
    assert "broken or cut off after line" in refused(path)


def test_a_bad_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 not really")
    assert "broken or not parquet" in refused(path)
    parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), path)
    assert "no column 'text'; it has body, id" in refused(path)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    assert "row 2: field 'text' must be text, not null" in refused(path)
    parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    assert "row 1: field 'text' must be text, not int" in refused(path)


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    with pytest.raises(ImportError, match=r"reading \.zst needs pyarrow: pip install pyarrow"):
        documents(tmp_path / "a.txt.zst")


# --- Splitting ------------------------------------------------------------------------------------


def test_held_out_documents_are_chosen_by_their_text():
    texts = [f"document {i}" for i in range(20_000)]
    chosen = {text for text in texts if is_held_out(text, 0.05)}
    assert abs(len(chosen) - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5
    assert chosen < {text for text in texts if is_held_out(text, 0.1)}
    assert not any(is_held_out(text, 0) for text in texts)
    assert all(is_held_out(text, 1) for text in texts)
    # Written down, so that no release moves a document to the other side.
    assert [i for i in range(100) if is_held_out(texts[i], 0.05)] == [21, 22, 55, 59, 75, 80, 94]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_fraction(share):
    with pytest.raises(ValueError, match="Invalid share"):
        is_held_out("text", share)


def test_cut_loses_nothing_and_keeps_paragraphs():
    draw = random.Random(0)
    paragraphs = [
        "\n".join("word " * draw.randint(1, 9) for _ in range(draw.randint(1, 4))) for _ in range(200)
    ]
    text = "\n\n".join(paragraphs)
    parts = list(cut(text, 500))
    assert "\n\n".join(parts) == text
    assert all(498 <= len(part) <= 1000 for part in parts[:-1]) and len(parts) > 20


def test_cut_takes_lines_where_there_are_no_paragraphs():
    text = "\n".join(f"line {i:03d}" for i in range(100))
    parts = list(cut(text, 90))
    assert "\n".join(parts) == text and {len(part) for part in parts} == {179}
    assert list(cut("x" * 1000, 10)) == ["x" * 1000]
    assert list(cut("", 10)) == []
