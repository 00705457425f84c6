"""Claims: machines that share a folder agree on who does what."""

import json
import os
import subprocess
import sys
import time

import pytest

from paceline.studies.sweep.claims import Claims

SECONDS = 0.8


def wait_for(true, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def host(tmp_path, monkeypatch):
    def make(name, names=("x", "y"), seconds=SECONDS):
        monkeypatch.setenv("PACELINE_HOST", name)
        return Claims(tmp_path, names, seconds)

    return make


@pytest.mark.slow
def test_a_cell_is_held_while_its_heart_beats_and_free_afterwards(host):
    with host("a") as a, host("b") as b:
        assert b.state("x").how == "free"
        claim = a.take("x", a.state("x"))
        assert claim.number == 1 and claim.holds()
        state = b.state("x")
        assert (state.how, state.host, state.number) == ("held", "a", 1)
        until = time.monotonic() + 2 * SECONDS
        while time.monotonic() < until:  # longer than a heart may be silent
            assert b.state("x").how == "held"
            time.sleep(0.05)
        assert a.let_go("x")
        assert b.state("x").how == "free"


@pytest.mark.slow
def test_a_stopped_heart_is_taken_over_and_its_owner_learns_it(host):
    a = host("a")
    with host("b") as b:
        a.__enter__()
        claim = a.take("x", a.state("x"))
        a._ended.set()  # the machine is gone
        began = time.monotonic()
        assert b.state("x").how == "held"
        assert wait_for(lambda: b.state("x").how == "free")
        assert time.monotonic() - began >= SECONDS
        other = b.take("x", b.state("x"))
        assert other.number == 2 and other.holds() and not claim.holds()
        assert not a.let_go("x", "too late")
        assert b.state("x").how == "held"


def test_of_two_who_saw_it_free_one_gets_it(host):
    with host("a") as a, host("b") as b:
        seen = a.state("x"), b.state("x")
        assert (a.take("x", seen[0]) is None) + (b.take("x", seen[1]) is None) == 1
        a.let_go("x")
        stale = b.state("x")
        assert a.take("x", a.state("x")) is not None
        assert b.take("x", stale) is None


def test_a_dead_process_of_this_machine_is_not_waited_for(host, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOST", "a")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom paceline.studies.sweep.claims import Claims\n"
        "claims = Claims(Path(sys.argv[1]), ['x'], 60)\nclaims.take('x', claims.state('x'))\n"
        "print('taken', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"taken\n"
    same, other = host("a", seconds=60), host("b", seconds=60)
    assert same.state("x").how == other.state("x").how == "held"
    process.kill()
    process.communicate()
    assert same.state("x").how == "free"
    assert other.state("x").how == "held"


def test_another_process_of_the_same_number_is_another(host, tmp_path):
    mine = host("a", seconds=60)
    mine.take("x", mine.state("x"))
    path = tmp_path / "x" / "0001.json"
    content = json.loads(path.read_text())
    assert content["pid"] == os.getpid() and mine.state("x").how == "held"
    path.write_text(json.dumps(content | {"started": "1"}))
    assert mine.state("x").how == "free"


def test_a_failure_is_known_to_all_and_tried_again_by_the_next_command(host):
    with host("a") as a, host("b") as b:
        a.take("x", a.state("x"))
        assert a.let_go("x", "no room")
        assert [(c.state("x").how, c.state("x").text) for c in (a, b)] == [("failed", "no room")] * 2
    assert host("b").state("x").how == "free"


@pytest.mark.slow
def test_a_claim_that_was_cut_off_counts_as_one_whose_heart_may_beat(host, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "0001.json").write_text("")
    with host("a") as a:
        assert a.state("x").how == "held"
        assert wait_for(lambda: a.state("x").how == "free")
        assert a.take("x", a.state("x")).number == 2


def test_all_claims_are_let_go_at_the_end(host):
    with host("a") as a:
        a.take("x", a.state("x"))
        a.take("y", a.state("y"))
    b = host("b")
    assert b.state("x").how == b.state("y").how == "free"
