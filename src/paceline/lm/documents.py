"""Documents: strings from text files, JSON lines, parquet, and folders of these.

.. code-block:: text

    notes.txt, notes.md      one document a file, or one between form feeds or <|endoftext|> marks
    rows.jsonl, rows.ndjson  one document a line, in its field "text"
    rows.parquet             one document a row, in its column "text"
    folder                   all of these in it and its subfolders, sorted by name

Text and JSON lines may be compressed: .gz, .xz, .zst. Blank documents are left out.
"""

import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from paceline.lm.files import describe

_PACKED = ("", ".gz", ".xz", ".zst")
TEXT = tuple(kind + packed for kind in (".txt", ".md") for packed in _PACKED)
# Plain .json next to rows describes them (dataset_infos.json). Compressed .json has rows, as in C4.
ROWS = tuple(
    kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in _PACKED if kind + packed != ".json"
)
PARQUET = (".parquet",)

_FIELD = "text"  # of a row
_SEPARATOR = re.compile(r"\f|<\|endoftext\|>")
_LONGEST = 2**22  # characters of a text file's document: a tokenizer needs 100 times its memory


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Turn the ImportError of an optional package into one that says what to install."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        raise ImportError(f"{what} needs {package}: pip install {package}") from error


# --- Where documents come from --------------------------------------------------------------------


def open_source(where: str | Path) -> "Files":
    """Open a file or a folder; the module's docstring lists the formats."""
    path = Path(where).expanduser()
    if path.is_dir():
        return Files(root=path, files=_files_in(path))
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.name.lower().endswith(TEXT + ROWS + PARQUET):
        raise ValueError(f"{path}: unknown kind of file; allowed: {', '.join(TEXT + ROWS + PARQUET)}")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    return Files(root=path.parent, files=(path,))


def _files_in(folder: Path) -> tuple[Path, ...]:
    """Return the files with rows in a folder or, if there are none, its text files."""
    # With rows there, text files are left out: a README describes them.
    full = {
        path.relative_to(folder): path
        for path in folder.rglob("*.*")
        if path.is_file() and path.stat().st_size
    }
    shown = sorted((n.as_posix(), path) for n, path in full.items() if not any(p[0] == "." for p in n.parts))
    for kinds in (ROWS + PARQUET, TEXT):
        found = tuple(path for name, path in shown if name.lower().endswith(kinds))
        if found:
            return found
    raise ValueError(f"{folder} holds no text; looked for {', '.join(TEXT + ROWS + PARQUET)}")


@final
@dataclass(frozen=True, kw_only=True)
class Files:
    """Documents in local files."""

    root: Path
    files: tuple[Path, ...]

    def documents(self) -> Iterator[str]:
        """Yield all documents, file by file."""
        found = (document for path in self.files for document in self._documents_in(path))
        return _not_blank(found, ", ".join(map(str, self.files)))

    def _documents_in(self, path: Path) -> Iterator[str]:
        name = path.name.lower()
        if name.endswith(TEXT):
            return _texts(path)
        if name.endswith(ROWS):
            return (_text(row, f"{path}, line {number}") for number, row in read_rows(path))
        return (_text(row, f"{path}, row {number}") for number, row in read_parquet(path, _FIELD))

    def describe(self) -> dict[str, Any]:
        """Return names, sizes and hashes of the files, but not the path of the folder. Reads every file."""
        names = {path: path.relative_to(self.root).as_posix() for path in self.files}
        return {"files": [{"name": name, **describe([path])[path.name]} for path, name in names.items()]}


def _not_blank(documents: Iterator[str], where: str) -> Iterator[str]:
    found = False
    for document in documents:
        if document and not document.isspace():
            found = True
            yield document
    if not found:
        raise ValueError(f"no documents but blank ones in {where}")


# --- Reading --------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON lines file, each with its line number; blank lines are left out."""
    for number, line in _lines(path):
        if line.isspace():
            continue
        try:
            row = json.loads(line.rstrip("\n"))
        except (ValueError, RecursionError) as error:
            # The error's own message would say line 1, because only this line was parsed.
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"{path}, line {number}: not JSON ({why})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: an object is needed, not {_kind(row)}")
        yield number, row


def _texts(path: Path) -> Iterator[str]:
    """Yield the documents of a text file."""
    parts: list[str] = []
    size = 0
    for _, line in _lines(path):
        for place, part in enumerate(_SEPARATOR.split(line)):
            if place or size > _LONGEST:
                yield "".join(parts).strip()
                parts, size = [], 0
            parts.append(part)
            size += len(part)
    yield "".join(parts).strip()


def read_parquet(path: Path, column: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a parquet file, each with its number, with this column alone."""
    with needed_for("reading parquet"):
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise ValueError(f"{path}: no column {column!r}; it has {', '.join(names)}")
            batches = file.iter_batches(batch_size=256, columns=[column])
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: broken or not parquet ({error})") from error


def _text(row: dict[str, Any], where: str) -> str:
    """Return the text of a row."""
    if _FIELD not in row:
        raise ValueError(f"{where}: no field {_FIELD!r}; it has {', '.join(row) or 'none'}")
    text = row[_FIELD]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {_FIELD!r} must be text, not {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a pair: "\ud800"
        raise ValueError(
            f"{where}: field {_FIELD!r} holds a character that does not exist ({error})"
        ) from error
    return text


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file, numbered from 1, decompressed by its suffix; they end in \\n."""
    number = 0
    try:
        with _unpacked(path) as stream:
            for number, line in enumerate(stream, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}: not UTF-8 text "
                        f"(byte 0x{line[error.start]:02x} at place {error.start} of the line)"
                    ) from error
                yield number, text[:-2] + "\n" if text.endswith("\r\n") else text
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the system, not of the decompressor
            raise
        raise ValueError(f"{path}: broken or cut off after line {number} ({error})") from error


def _unpacked(path: Path) -> io.BufferedIOBase:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
        case ".zst":
            with needed_for("reading .zst"):
                import pyarrow  # unlike the package zstandard it notices a file that is cut off
            return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 2**20)
        case _:
            return path.open("rb")


# --- Splitting ------------------------------------------------------------------------------------


def is_held_out(document: str, share: float) -> bool:
    """Return whether a document belongs to the held-out share, decided by its text alone.

    So the order of documents and new documents change nothing, and copies of a document are all on one
    side. A larger share contains every smaller one.

    >>> [is_held_out(f"document {i}", 0.2) for i in range(6)]
    [True, False, False, False, False, True]
    """
    if not 0 <= share <= 1:
        raise ValueError(f"Invalid share of held-out documents: {share!r}; allowed: 0 to 1")
    # Half a character must not raise here: the reader of documents reports it with its place.
    digest = hashlib.sha256(document.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def cut(document: str, characters: int) -> Iterator[str]:
    """Yield parts of a document, each of at least `characters` characters and ending with a paragraph.

    A part that reaches twice as many characters ends with its line. The last part may be shorter.

    >>> list(cut("one\\n\\ntwo\\n\\nthree\\n", 6))
    ['one\\n\\ntwo', 'three']
    """
    part: list[str] = []
    size = 0
    for line in document.splitlines(keepends=True):
        part.append(line)
        size += len(line)
        if size >= 2 * characters or (size >= characters and line.isspace()):
            yield "".join(part).strip("\n")
            part, size = [], 0
    if part:
        yield "".join(part).strip("\n")
