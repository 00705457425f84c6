"""Make the text of this study, and pack it for a machine that takes small transfers only.

batches.py and lab.py run on commit ea5a979, so its `paceline data` makes the tokens:

    git worktree add ../study ea5a979
    PYTHONPATH=../study/src python prepare.py pack OUT enwiki-0.jsonl.xz enwiki-val.jsonl.xz
    python prepare.py unpack OUT WIKI   # on the other machine

`pack` leaves in OUT: first.jsonl and second.jsonl (the held-out halves), rest.tar (the folder of
`paceline data` without its tokens), and tokens-0, tokens-1, … (the tokens, two of them in three bytes).
"""

import lzma
import subprocess
import sys
import tarfile
from itertools import count, takewhile
from pathlib import Path

import numpy as np

TOKENS = Path("train/tokens-00000.bin")
PART = 35_000_000  # bytes of a transfer
SELECTION = 51  # held-out articles that selection runs see; report runs see the rest


def pack(out: Path, text: str, held_out: str) -> None:
    """Tokenize `text`, split `held_out`, and write the parts."""
    out.mkdir(parents=True, exist_ok=True)
    with lzma.open(held_out, "rt") as file:
        articles = list(file)
    (out / "first.jsonl").write_text("".join(articles[:SELECTION]))
    (out / "second.jsonl").write_text("".join(articles[SELECTION:]))
    wiki = out / "wiki"
    if not wiki.exists():
        command = "import sys; from paceline.cli import main; sys.exit(main())"
        made = [sys.executable, "-c", command, "data", str(wiki), "--data", text, "--tokenizer", "bpe:4096"]
        subprocess.run(made, check=True)
    with tarfile.open(out / "rest.tar", "w") as rest:
        for path in sorted(wiki.rglob("*")):
            if path.is_file() and path.relative_to(wiki) != TOKENS:
                rest.add(path, str(path.relative_to(wiki)))
    tokens = np.fromfile(wiki / TOKENS, dtype="<u2")
    pairs = np.append(tokens, np.zeros(len(tokens) % 2, "<u2")).reshape(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    packed = np.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], axis=1)
    data = packed.astype(np.uint8).tobytes()
    for number, start in enumerate(range(0, len(data), PART)):
        (out / f"tokens-{number}").write_bytes(data[start : start + PART])
    (out / "count").write_text(str(len(tokens)))


def unpack(parts: Path, wiki: Path) -> None:
    """Make the folder of `paceline data` again from the parts."""
    with tarfile.open(parts / "rest.tar") as rest:
        rest.extractall(wiki, filter="data")
    named = takewhile(Path.exists, (parts / f"tokens-{number}" for number in count()))
    data = b"".join(part.read_bytes() for part in named)
    low, middle, high = np.frombuffer(data, np.uint8).reshape(-1, 3).T.astype("<u2")
    tokens = np.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], axis=1).reshape(-1)
    (wiki / TOKENS).parent.mkdir(parents=True, exist_ok=True)
    tokens[: int((parts / "count").read_text())].tofile(wiki / TOKENS)


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    {"pack": pack, "unpack": unpack}[what](Path(given[0]), *map(Path if what == "unpack" else str, given[1:]))
