"""Records: what was changed, lost or moved in them is found, and time does not go back."""

import itertools
import json
import time

import pytest

from paceline.lm.files import Damaged
from paceline.runs import records
from paceline.studies.lines import Finished


@pytest.fixture
def path(tmp_path):
    writer = records.Writer(tmp_path / "records.jsonl", 0)
    for step in range(1, 6):
        writer.write("step", {"step": step, "loss": 5.0 / step, "text": 'a "crc": 1'})
    writer.close()
    return tmp_path / "records.jsonl"


def test_any_change_of_a_bit_is_found(path):
    whole, before = path.read_bytes(), list(records.read(path))
    assert before[4] == {"kind": "step", "step": 5, "loss": 1.0, "text": 'a "crc": 1'}
    for at, bit in itertools.product(range(len(whole)), range(0, 8, 3)):
        data = bytearray(whole)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        try:
            assert len(list(records.read(path))) < 5  # the end of the last line: a kill looks the same
            assert at == len(whole) - 1
        except Damaged as error:
            assert f"{path}, line " in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: [b'{"kind": "step"}\n', *lines],
        lambda lines: [*lines[:2], b'{"kind": "step"}\n', *lines[2:]],
    ],
)
def test_lines_that_were_moved_lost_or_added_are_found(path, change):
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(Damaged, match=r"line \d is not what was written"):
        list(records.read(path))


def test_a_writer_continues_the_checksums_and_refuses_what_was_changed(path):
    lines = path.read_bytes().splitlines(keepends=True)
    keep = len(b"".join(lines[:3]))
    writer = records.Writer(path, keep)
    writer.write("step", {"step": 4, "loss": 1.25, "text": 'a "crc": 1'})
    assert writer.position() == len(b"".join(lines[:4]))
    writer.close()
    assert path.read_bytes() == b"".join(lines[:4])
    changed, shorter = path.read_bytes().replace(b"1.25", b"0.25"), b"".join(lines[:2])
    for damaged, end in ((changed, None), (shorter, keep)):
        path.write_bytes(damaged)
        with pytest.raises(Damaged, match=r"records\.jsonl"):
            records.Writer(path, end)
        assert path.read_bytes() == damaged


def test_records_without_checksums_are_read(path):
    lines = [{"kind": "run"}, {"kind": "step", "step": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(records.read(path)) == lines
    for text in ("[1]\n", "5\n", "{\n", "[" * 10**5 + "\n"):
        path.write_text('{"kind": "run"}\n' + text)
        with pytest.raises(Damaged, match=r"records\.jsonl, line 2 is no"):
            list(records.read(path))


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_run_that_has_ended_has_all_its_records(path, change):
    timing = records.Writer(path.with_name("timing.jsonl"), 0)
    timing.write("end", {"outcome": "finished", "records": path.stat().st_size})
    timing.close()
    change(path)
    with pytest.raises(Damaged, match=r"records\.jsonl has 0 bytes in whole lines; the run ended with"):
        Finished.of_folder(path.parent)


def test_a_clock_that_goes_back_makes_no_time_that_does(monkeypatch):
    clock = records.Clock(1)
    first = clock.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert first <= clock.now() <= first + 60


def test_a_file_that_lost_its_first_seal_is_not_taken_for_one_without(path):
    path.write_bytes(path.read_bytes().replace(b'"crc"', b'"crd"', 1).replace(b"5.0", b"1.0", 1))
    with pytest.raises(Damaged, match="line 2 is not what was written"):
        list(records.read(path))
