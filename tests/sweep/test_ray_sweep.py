"""`paceline sweep --engine ray` on a real cluster of two nodes, of which one is lost on the way."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
from tiny import write_text

sys.path.insert(0, str(Path(__file__).parent))
from small_sweeps import FOUR, content, start, words

from paceline.cli import main
from paceline.runs.records import read
from paceline.studies.lines import is_ended

pytestmark = pytest.mark.long

MEMORY = 80 * 2**20  # bytes of each node's store of objects, the least that Ray takes


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("ray")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=120)
        assert main(words(folder, folder / "local", *FOUR)) == 0
        yield folder


@pytest.fixture
def cluster(room):
    """A head with one processor; after the cache is known, which its workers have to find."""
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.cluster_utils import Cluster

        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY},
        )
        try:
            yield made
        finally:
            made.shutdown()


def on(cluster, room, out):
    return words(room, out, *FOUR, "--engine", "ray", "--ray-address", cluster.address)


def with_checkpoints(out):
    return {path.parents[1].name for path in out.glob("cells/*/checkpoints/step-*")}


def at_work(out):
    """Cells that have begun and not ended."""
    return [path.parent for path in out.glob("cells/*/timing.jsonl") if not is_ended(path.parent)]


def test_a_cluster_that_loses_a_node_ends_in_the_results_of_one_machine(cluster, room, tmp_path):
    out = tmp_path / "s"
    second = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    process = start(on(cluster, room, out))
    while process.poll() is None and len(at_work(out)) < 2:  # one on each node
        time.sleep(0.02)
    cluster.remove_node(second, allow_graceful=False)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert "lost its worker" in said
    assert content(out) == content(room / "local")
    begun = {
        path.parent.name: sum(line["kind"] == "begin" for line in read(path))
        for path in out.glob("cells/*/timing.jsonl")
    }
    # Only what was lost begins again: from its checkpoint, or from nothing if there was none yet.
    assert sorted(begun.values()) in ([1, 1, 1, 1], [1, 1, 1, 2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_same_command_goes_on_after_its_driver_was_stopped(cluster, room, tmp_path, number):
    out = tmp_path / "s"
    process = start(on(cluster, room, out))
    while process.poll() is None and not with_checkpoints(out):
        time.sleep(0.02)
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=120)
    if number == signal.SIGINT:
        assert process.returncode == 128 + number and "the same command goes on" in said, said
    process = start(on(cluster, room, out))
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert content(out) == content(room / "local")


def test_without_a_cluster_it_says_how_to_start_one(tmp_path):
    pytest.importorskip("ray")
    line = words(tmp_path, tmp_path / "s", *FOUR, "--engine", "ray", "--ray-address", "127.0.0.1:1")
    process = start(line)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and said.count("\n") == 1, said
    assert "no Ray cluster answers at 127.0.0.1:1" in said and "ray start --head" in said
    assert not (tmp_path / "s").exists()
