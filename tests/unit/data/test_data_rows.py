"""Rows of HDF5 and `.npy` files: all readers return the same rows, or all ranks raise an error."""

import fcntl
import json
import os
import re

import h5py
import numpy as np
import pytest
from start_jobs import script

from keras_dist import errors
from keras_dist.data import hdf5, npy, row_source
from keras_dist.data.readers import Column, FileReader, segment_of_npy

ROWS = 1003

# Ranks without a framework: the data sets are plain batches.
RANKS = f"""
import gc, json, os, signal, sys
import numpy as np
import keras_dist
from keras_dist import errors, runtime
from keras_dist.data import hdf5, npy, row_source
row_source.for_keras = lambda batches, ahead: batches
runtime.init()
rank, size = runtime.rank(), runtime.size()
os.chdir(sys.argv[1])
ROWS = {ROWS}
def batches(data, epochs=2):
    return [data.batch(e, s) for e in range(epochs) for s in range(data.plan.steps)]
"""


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.setattr(row_source, "for_keras", lambda batches, ahead: batches)


@pytest.fixture
def folder(tmp_path):
    """Writes rows in several layouts: row i begins with 6 i, and its label is i."""
    x, y = np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 2, 3), np.arange(ROWS)
    with h5py.File(tmp_path / "all.h5", "w", userblock_size=512) as file:
        file["x"], file["y"], file["big/y"] = x, y, y.astype(">i8")
        file["short"] = y[:-1]
        file.create_dataset("chunks", data=x, chunks=(10, 2, 3), compression="gzip")
    cuts = [0, 400, 410, ROWS]
    layout = h5py.VirtualLayout((ROWS, 2, 3), "f4")
    for part in range(3):
        first, last = cuts[part : part + 2]
        with h5py.File(tmp_path / f"part{part}.h5", "w") as file:
            file["x"], file["y"] = x[first:last], y[first:last]
        source = h5py.VirtualSource(f"part{part}.h5", "x", (last - first, 2, 3))
        layout[first:last] = source
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
        file["y"] = y
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y.astype(">i4"))
    return tmp_path


def epoch(data, number=0):
    return [data.batch(number, step) for step in range(data.plan.steps)]


def test_only_the_next_block_is_prefetched(folder):
    data = hdf5(folder / "all.h5", "x", "y", 16, block=40, shuffle=False)
    for step in (0, 1, 5):
        data.batch(0, step)
        blocks = {window.result()[0][1].tolist()[0] // 40 for window in data._windows.values()}
        assert blocks == {step * 16 // 40, step * 16 // 40 + 1}


def test_structures(folder):
    data = hdf5(folder / "all.h5", {"a": "x", "b": ["y", "big/y"]}, batch_size=ROWS, shuffle=False)
    [batch] = epoch(data)
    assert np.array_equal(batch["a"], np.arange(ROWS * 6).reshape(ROWS, 2, 3))
    assert np.array_equal(*batch["b"]) and isinstance(batch["b"], tuple)


def test_a_fork_reads_for_itself(folder):
    data = hdf5(folder / "all.h5", "chunks", "y", batch_size=16, block=40)
    here = data.batch(0, 3)[1].tolist()
    pid = os.fork()
    if pid == 0:
        # The thread of the parent that reads the next block does not survive the fork.
        os._exit(0 if data.batch(0, 3)[1].tolist() == here else 1)
    assert os.waitpid(pid, 0)[1] == 0
    files = data._reader
    assert files._files
    del data
    assert files._files is None  # closed


def test_a_locked_file_is_named_with_the_variable(folder, monkeypatch):
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    with open(folder / "all.h5") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(errors.DataError, match=r"all\.h5.*HDF5_USE_FILE_LOCKING=FALSE"):
            hdf5(folder / "all.h5", "x", "y")


@pytest.mark.parametrize(
    ("names", "arguments", "error", "culprit"),
    [
        (("z", "y"), {}, errors.DataError, "'z' in .*all.h5.*'big/y', 'chunks'"),
        (("big", None), {}, errors.DataError, "a data set 'big'"),
        (("x", "short"), {}, errors.DataError, "'x' 1003, 'short' 1002"),
        (("x", 3), {}, errors.ArgumentTypeError, "to be a name"),
        (((), None), {}, errors.DataError, "names of data sets"),
        (("x", "y"), {"batch_size": 0}, errors.ArgumentError, "batch_size to be at least 1"),
        (("x", "y"), {"block": 0}, errors.ArgumentError, "block"),
        (("x", "y"), {"steps": 999}, errors.DataError, "steps=999"),
        (("x", "y"), {"readers": 2}, errors.ArgumentError, "readers to be 1 to 1"),
        (("x", "y"), {"mpi_io": "fast"}, errors.ArgumentError, "mpi_io to be one of"),
        (("x", "y"), {"mpi_io": "collective"}, errors.ArgumentError, "has been removed"),
        (("x", "y"), {"mpi_io": "independent", "readers": 1}, errors.ArgumentError, "not both"),
        (("chunks", "y"), {"mpi_io": "independent"}, errors.DataError, "contiguous layout"),
    ],
)
def test_bad_input(folder, names, arguments, error, culprit):
    with pytest.raises(error, match=culprit):
        hdf5(folder / "all.h5", *names, **arguments)


def test_bad_files(folder, caplog):
    (folder / "part1.h5").write_bytes(b"no HDF5")
    (folder / "short.npy").write_bytes((folder / "x.npy").read_bytes()[:-100])
    np.save(folder / "objects.npy", np.array([{}]))
    np.save(folder / "few.npy", np.arange(9))
    parts = [folder / f"part{part}.h5" for part in (0, 1, 2, 3)]
    with pytest.raises(errors.DataError, match=r"part1\.h5 to be readable"):
        hdf5(parts, "x", "y")
    data = hdf5(parts, "x", "y", unreadable="skip")
    assert sum(len(y) for _, y in epoch(data)) == ROWS - 10
    assert "skips 2 files" in caplog.text and "part3.h5" in caplog.text
    with pytest.raises(errors.DataError, match="readable files"):
        hdf5(parts[1:2], "x", "y", unreadable="skip")
    for name in ("short", "objects"):
        with pytest.raises(errors.DataError, match=f"{name}.npy to be readable"):
            npy(folder / f"{name}.npy")
    with pytest.raises(errors.DataError, match="files of equal length"):
        npy(folder / "x.npy", folder / "few.npy")
    (folder / "part0.h5").unlink()
    with pytest.raises(errors.DataError, match=r"no file .*part0\.h5"):
        hdf5(folder / "virtual.h5", "x", "y")
    with open(folder / "x.npy", "r+b") as file:
        data = npy(folder / "x.npy", shuffle=False)
        file.truncate(1000)
    with pytest.raises(errors.DataError, match="has changed"):
        epoch(data)


READERS = """
def order(name, reference, **way):
    data = hdf5("all.h5", name, "y", 16, block=100, **way)
    found = batches(data)
    for x, y in found:
        assert np.array_equal(x[:, 0, 0], y * 6), way
    mine = [y.tolist() for _, y in found]
    steps = data.plan.steps
    everyone = keras_dist.allgather_object(mine)
    for one in range(2):
        rows = [r for rank in everyone for b in rank[one * steps : (one + 1) * steps] for r in b]
        assert sorted(rows) == list(range(ROWS)), way
    assert reference is None or mine == reference, way
    return mine

plain, chunks = order("x", None), order("chunks", None)
assert plain[: len(plain) // 2] != plain[len(plain) // 2 :]
order("x", plain, mpi_io="independent")
for readers in range(1, size):
    order("x", plain, readers=readers)
order("chunks", chunks, readers=1)
def in_one_order(**way):
    found = batches(hdf5("all.h5", "x", "y", 12 // size, block=20, shuffle="global", **way))
    assert all(np.array_equal(x[:, 0, 0], y * 6) for x, y in found)
    everyone = keras_dist.allgather_object([y.tolist() for _, y in found])
    return [sorted(sum(step, [])) for step in zip(*everyone, strict=True)]

steps = in_one_order()
alone = json.loads(sys.argv[2])
assert [len(step) for step in steps] == [len(step) for step in alone]
assert steps == alone == in_one_order(mpi_io="independent") == in_one_order(readers=1)
found = batches(npy("x.npy", "y.npy", 16, block=100, readers=1))
assert [y.tolist() for _, y in found] == plain
for remainder in ("pad", "drop"):
    mine = hdf5("all.h5", "x", "y", 16, remainder=remainder, readers=1)
    other = hdf5("all.h5", "x", "y", 16, remainder=remainder, mpi_io="independent")
    same = zip(batches(mine), batches(other), strict=True)
    assert all(np.array_equal(a[1], b[1]) for a, b in same)
# Deleted data sets leave no files.
del found, mine, other, same
gc.collect()
names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
files = [os.readlink(name) for name in names if os.path.islink(name)]
assert not [name for name in files if name.endswith((".h5", ".npy"))], files
print("all the same", flush=True)
"""


@pytest.mark.slow
def test_all_readers_return_the_same_rows(run_ranks, folder):
    data = hdf5(folder / "all.h5", "x", "y", 12, block=20, shuffle="global")
    alone = [sorted(y.tolist()) for number in range(2) for _, y in epoch(data, number)]
    job = run_ranks(3, *script(RANKS + READERS)[1:], str(folder), json.dumps(alone))
    assert job.returncode == 0 and job.stdout.count("all the same") == 3, job.stdout


REFUSALS = """
def refused(kind, culprit, call):
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise SystemExit(f"not refused: {culprit}")
    assert culprit in text and text.startswith("[rank "), text
    return keras_dist.allgather_object(text)

mine = f"part{rank}.h5"
texts = refused(errors.DataError, "'no' in all.h5", lambda: hdf5("all.h5", "no"))
refused(errors.ArgumentError, "batch_size", lambda: hdf5("all.h5", "x", batch_size=0))
refused(errors.MismatchError, "block", lambda: hdf5("all.h5", "x", block=10 + rank))
refused(errors.DataError, "at least", lambda: npy("one.npy"))
refused(errors.MismatchError, "names", lambda: hdf5(mine, "x"))
# One node has a different file, or none.
os.makedirs(f"node{rank}", exist_ok=True)
if rank == 0:
    os.link("part0.h5", "node0/a.h5"); os.link("all.h5", "node0/b.h5")
else:
    os.link("part2.h5", f"node{rank}/a.h5")
texts = refused(errors.MismatchError, "as on the first rank", lambda: hdf5(f"node{rank}/a.h5", "x"))
assert len(set(texts)) == 1 and texts[0].startswith("[rank 1 of 2]")
texts = refused(errors.DataError, "b.h5 to be readable", lambda: hdf5(f"node{rank}/b.h5", "x"))
assert all(text.startswith("[rank 1 of 2]") for text in texts)
few = [f"node{rank}/b.h5", "part0.h5"]
data = hdf5(few, "x", "y", 16, unreadable="skip")
assert sum(map(sum, keras_dist.allgather_object([len(y) for _, y in batches(data, 1)]))) == 400
# Only the rank that reads needs access to the files.
data = hdf5(few, "x", "y", 16, readers=1)
assert sum(keras_dist.allgather_object(sum(len(y) for _, y in batches(data, 1)))) == ROWS + 400
# A read error on one rank is raised on all ranks.
if rank == 0:
    with open("cut.npy", "wb") as file:
        file.write(open("x.npy", "rb").read())
keras_dist.barrier()
data = npy("cut.npy", None, 16, shuffle=False, readers=1, block=40)
keras_dist.barrier()
os.truncate("cut.npy", 1000)
keras_dist.barrier()
try:
    batches(data)
except errors.DataError as error:
    assert "cut.npy" in str(error) and "[rank 0 of 2]" in str(error)
    print("all refused", flush=True)
"""


def test_an_error_on_one_rank_is_raised_on_all(run_ranks, folder):
    np.save(folder / "one.npy", np.arange(1))
    job = run_ranks(2, *script(RANKS + REFUSALS)[1:], str(folder))
    assert job.returncode == 0 and job.stdout.count("all refused") == 2, job.stdout


ENDS = """
data = hdf5("all.h5", "x", "y", 16, readers=1, block=40)
keras_dist.barrier()
if rank == 0:
    data.batch(0, 0)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    batches(data, 1)
"""


def test_no_rank_waits_for_one_that_reads_for_it_and_has_died(run_ranks, folder):
    assert run_ranks(2, *script(RANKS + ENDS)[1:], str(folder)).returncode != 0


def test_memory_of_kept_rows_is_released(folder):
    np.save(folder / "large.npy", np.ones((64, 2**18), "f4"))
    reader = FileReader([Column([segment_of_npy(str(folder / "large.npy"))])])
    before = shared_nbytes()
    kept = [reader.read(np.array([[row, row + 1]])) for row in range(64)]
    held = shared_nbytes() - before
    # The kernel counts pages per thread, so the number may lag behind by some pages.
    assert held >= 56 * 2**20
    del kept
    assert shared_nbytes() - before <= 4 * 2**20


def shared_nbytes():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["RssShmem"].split()[0]) * 1024


MEMORY = """
import resource
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
import h5py
for name in ("small.h5", "large.h5"):
    data = hdf5(name, "x", batch_size=64, block=256, readers=int(sys.argv[2]) or None)
    for step in range(data.plan.steps):
        data.batch(0, step)
    runtime.communicator()
    print(f"peak {name} {peak() >> 20};", flush=True)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_blocks(run_ranks, tmp_path):
    for name, rows in (("small.h5", 4096), ("large.h5", 40960)):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("x", (rows, 1024), "f4", chunks=(128, 1024))  # 16 and 160 MiB
            file["x"][::128] = 1
    for readers in (0, 1):
        job = run_ranks(2, *script(RANKS + MEMORY)[1:], str(tmp_path), str(readers))
        assert job.returncode == 0, job.stdout
        # The launcher may join lines of two ranks.
        peaks = re.findall(r"peak (\S+) (\d+);", job.stdout)
        small = max(int(peak) for name, peak in peaks if name == "small.h5")
        large = max(int(peak) for name, peak in peaks if name == "large.h5")
        assert large - small <= 24  # of 72 MiB more for each rank; blocks are of 1 MiB
