"""Backups in the memory of two nodes: the newest intact copy is found on any node that is left.

Each node has its own directory. On one node, tests that lose a node are skipped.
"""

import dataclasses
import errno
import logging
import os
import resource
import shutil
import signal

import pytest
from small_training import distributed

import keras_dist
from keras_dist import config, errors, runtime
from keras_dist.resume import format, memory
from keras_dist.resume.memory import MemoryCopies
from keras_dist.resume.read import bytes_by_name, newest
from keras_dist.resume.stores import Store
from keras_dist.resume.tensor_file import Tensor
from keras_dist.storage import memory_directory

pytestmark = pytest.mark.jobs("openmpi-3", "nodes-2+1")

NODES = runtime.communicator().topology.nodes
NODE = next(at for at, node in enumerate(NODES) if keras_dist.rank() in node)
ROOT = keras_dist.size() - 1
ROOTS_NODE = next(at for at, node in enumerate(NODES) if ROOT in node)
NEIGHBOUR = (ROOTS_NODE + 1) % len(NODES)
SIZE = 300_000

on_nodes = pytest.mark.skipif(
    len(NODES) == 1, reason="all ranks are on one node: set MPIR_CVAR_NUM_CLIQUES=2 under MPICH"
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(memory, "PIECE_NBYTES", 2**17)


@pytest.fixture
def job(monkeypatch, shared_tmp_path):
    """A function that sets the id of the job, and the directory of each node."""

    def begin(job_id="one"):
        place = str(shared_tmp_path / f"node{NODE}")
        settings = config.settings()
        settings = dataclasses.replace(settings, job_id=job_id, memory_directory=place)
        monkeypatch.setattr(config, "settings", lambda: settings)

    begin()
    return begin


@pytest.fixture
def copies(job, shared_tmp_path):
    """A function that makes the copies of a job that begins, and finds the newest."""

    def begin(backup_dir="backup"):
        made = MemoryCopies(shared_tmp_path / backup_dir, ROOT)
        keras_dist.barrier()
        return made, made.find()

    return begin


def save(number):
    """Returns what a generation is made of: its part, and what its manifest says."""
    return [Tensor("x", "uint8", memoryview(contents(number)))], {"number": number}


def write(copies, number):
    """Writes a copy of a number."""
    following = keras_dist.broadcast_object(copies.next_number(), ROOT)
    return copies.write(following or 1, *save(number))


def contents(number):
    return bytes([number]) * SIZE


def files(shared_tmp_path, node):
    """Returns the manifests on a node."""
    return sorted((shared_tmp_path / f"node{node}").glob("*/*/*.json"))


def part_of(path):
    [part] = format.read(path).parts
    return part


def held(path):
    return bytes_by_name(part_of(path))["x"].tobytes()


def cut(path):
    """Cuts off the last byte of the part of a generation."""
    part_of(path).write_bytes(part_of(path).read_bytes()[:-1])


def act(work, on=True):
    """Calls a function on the first rank only, between two barriers."""
    keras_dist.barrier()
    if keras_dist.rank() == 0 and on:
        work()
    keras_dist.barrier()


def is_found(found, number):
    """Returns whether the root has found the copy of a number, and the others nothing."""
    mine = held(found) == contents(number) if keras_dist.rank() == ROOT else found is None
    return all(keras_dist.allgather_object(mine))


def test_two_generations_lie_on_two_nodes_until_they_are_removed(copies, shared_tmp_path):
    made, found = copies()
    assert found is None
    for number in (1, 2, 3):
        assert is_found(write(made, number), number)
    keras_dist.barrier()
    for node in range(len(NODES)):
        found = [held(path) for path in files(shared_tmp_path, node)]
        assert found == ([contents(2), contents(3)] if node in (ROOTS_NODE, NEIGHBOUR) else [])
    made, found = copies()
    assert is_found(found, 3)
    assert is_found(write(made, 4), 4)
    keras_dist.barrier()
    made.remove()
    keras_dist.barrier()
    assert not [*shared_tmp_path.glob("*/*/*")]


@on_nodes
def test_the_copy_of_a_lost_node_comes_from_its_neighbour(copies, shared_tmp_path):
    made, _ = copies()
    write(made, 1)
    write(made, 2)
    act(lambda: shutil.rmtree(shared_tmp_path / f"node{ROOTS_NODE}"))
    made, found = copies()
    assert is_found(found, 2)
    # The next one is newer on all nodes.
    write(made, 3)
    assert is_found(copies()[1], 3)


def test_damaged_copies_are_not_used(copies, shared_tmp_path, caplog):
    made, _ = copies()
    write(made, 1)
    write(made, 2)

    def damage():
        for node in range(len(NODES)):
            for path in files(shared_tmp_path, node)[1:]:
                cut(path)

    act(damage)
    with caplog.at_level(logging.WARNING, "keras_dist"):
        assert is_found(copies()[1], 1)
    told = any("a checkpoint is damaged" in text for text in caplog.messages)
    assert any(keras_dist.allgather_object(told))
    act(lambda: [path.write_bytes(b"") for path in shared_tmp_path.glob("*/*/*/*.json")])
    assert copies()[1] is None


@on_nodes
def test_a_copy_that_cannot_be_read_or_arrives_damaged_is_given_up(
    copies, shared_tmp_path, monkeypatch, caplog
):
    made, _ = copies()
    write(made, 1)
    lost = "00000002-" + 32 * "0" + ".json"
    with caplog.at_level(logging.WARNING, "keras_dist"):
        assert made._move(lost, ROOT, NODES[NEIGHBOUR][0]) is None
    told = any("No such file" in text for text in caplog.messages)
    assert keras_dist.allgather_object(told)[ROOT]
    assert len(files(shared_tmp_path, NEIGHBOUR)) == 1
    write(made, 2)

    def damage():
        part_of(files(shared_tmp_path, ROOTS_NODE)[1]).unlink()
        files(shared_tmp_path, ROOTS_NODE)[1].unlink()
        cut(files(shared_tmp_path, NEIGHBOUR)[1])

    act(damage)
    monkeypatch.setattr(format, "find_damage", lambda found, ranks=None: [])
    assert is_found(copies()[1], 1)
    keras_dist.barrier()
    [first] = files(shared_tmp_path, ROOTS_NODE)
    left = [*(shared_tmp_path / f"node{ROOTS_NODE}").glob("*/*/*/")]
    assert [int(folder.name) for folder in left] == [format.number_of(first)]


@on_nodes
def test_a_copy_that_the_root_cannot_store_is_an_error(copies, shared_tmp_path):
    made, _ = copies()
    write(made, 1)
    act(lambda: shutil.rmtree(shared_tmp_path / f"node{ROOTS_NODE}"))
    store = Store(shared_tmp_path / "backup", ROOT, by_all=False, memory=True)
    with (
        pytest.raises(errors.CheckpointError, match="which could not be stored here"),
        limited_files(keras_dist.rank() == ROOT),
    ):
        store.find()
    assert is_found(copies()[1], 1)


def test_copies_of_other_jobs_and_backups_are_not_used(copies, job, caplog):
    made, _ = copies()
    write(made, 1)
    assert copies("another")[1] is None
    job("two")
    assert copies()[1] is None
    job("one")
    assert is_found(copies()[1], 1)
    job("")
    with caplog.at_level(logging.WARNING, "keras_dist"):
        made, found = copies()
    assert found is None and write(made, 1) is None
    told = any("KERAS_DIST_JOB_ID" in text for text in caplog.messages)
    assert keras_dist.allgather_object(told) == [rank == ROOT for rank in range(ROOT + 1)]


def test_copies_that_other_users_can_access_are_not_used(copies, shared_tmp_path, caplog):
    made, _ = copies()
    write(made, 1)
    assert {path.stat().st_mode & 0o777 for path in shared_tmp_path.glob("node*/*")} == {0o700}
    act(lambda: [path.chmod(0o777) for path in shared_tmp_path.glob("node*/*")])
    with caplog.at_level(logging.WARNING, "keras_dist"):
        made, found = copies()
        assert found is None and write(made, 2) is None
    told = any("that only this user can access" in text for text in caplog.messages)
    assert any(keras_dist.allgather_object(told))


def test_old_copies_of_other_jobs_are_removed(copies, job, shared_tmp_path):
    made = {}
    for number, name in enumerate(["ended", "lives", "requeued"], 1):
        job(name)
        made[name], _ = copies()
        write(made[name], number)
    act(lambda: [os.utime(path, (0, 0)) for path in shared_tmp_path.glob("*/*/*")])
    made["lives"].touch()
    # Another backup of the same job leaves the first one.
    assert copies("another backup")[1] is None
    assert is_found(copies()[1], 3)
    keras_dist.barrier()
    left = {path.name for path in shared_tmp_path.glob("*/*/*")}
    names = [memory_directory.directory_of(name, shared_tmp_path / "backup") for name in made]
    assert [name in left for name in names] == [False, True, True]


def test_a_copy_of_an_earlier_fit_is_not_the_newest(copies, shared_tmp_path):
    made, _ = copies()
    for number in (1, 2, 3):
        write(made, number)
    away, place = shared_tmp_path / "away", shared_tmp_path / f"node{NEIGHBOUR}"
    act(lambda: shutil.copytree(place, away))
    made.remove()
    write(copies()[0], 4)
    act(lambda: shutil.copytree(away, place, dirs_exist_ok=True))
    assert is_found(copies()[1], 4)


def test_copies_are_newer_than_what_is_on_the_disk(copies, shared_tmp_path):
    later = 2**62
    act(lambda: format.write(shared_tmp_path / "backup", *save(1), number=later))
    store = Store(shared_tmp_path / "backup", ROOT, by_all=False, memory=True)
    assert store.find()
    write(store._copies, 2)
    assert is_found(copies()[1], 2)
    assert all(format.number_of(path) > later for path in files(shared_tmp_path, ROOTS_NODE))


def test_a_disk_that_fails_does_not_prevent_copies(job, shared_tmp_path, monkeypatch, caplog):
    model, place = distributed(), shared_tmp_path / "backup"
    store = Store(place, ROOT, by_all=False, memory=True)
    assert not store.find()
    store.write(model, [], (0, 1), {"step": 1}, lambda *_: None)

    begin = format.begin

    def stale(directory, *number):
        if directory == place:
            raise OSError(errno.ESTALE, "Stale file handle")
        return begin(directory, *number)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "keras_dist"):
        patched.setattr(format, "begin", stale)
        store.write(model, [], (0, 2), {"step": 2}, lambda *_: None)
    told = any("Stale file handle" in text for text in caplog.messages)
    assert keras_dist.allgather_object(told)[ROOT] and store.written == (0, 1)
    again = Store(place, ROOT, by_all=False, memory=True)
    assert again.find() and again._contents.about["step"] == 2


@pytest.mark.parametrize("node", [ROOTS_NODE, NEIGHBOUR] if len(NODES) > 1 else [ROOTS_NODE])
def test_a_full_memory_is_a_warning(node, copies, caplog):
    made, _ = copies()
    write(made, 1)
    with caplog.at_level(logging.WARNING, "keras_dist"), limited_files(node == NODE):
        written = write(made, 2)
    full = node == ROOTS_NODE
    assert written is None if full else is_found(written, 2)
    told = any("File too large" in text for text in caplog.messages)
    assert any(keras_dist.allgather_object(told))
    assert is_found(copies()[1], 1 if full else 2)


class limited_files:
    """Limits the size of files that this process writes, as a full file system would."""

    def __init__(self, limits):
        self.limits = limits

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if self.limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, self.before[1]))

    def __exit__(self, *error):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        signal.signal(signal.SIGXFSZ, self.handler)


def test_a_newer_generation_on_disk_is_read_instead(tmp_path):
    copy, *on_disk = [
        format.write(tmp_path / place, *save(number), number=number)
        for place, number in [("memory", 2), ("disk", 1), ("disk", 2), ("disk", 3)]
    ]

    def found(place):
        return newest(tmp_path / place, copy).generation.path

    assert found("disk") == on_disk[2]
    on_disk[2].write_bytes(b"damaged")
    assert found("disk") == copy
    assert found("none") == copy
