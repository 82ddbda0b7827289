"""Checkpoints of all ranks survive killed writers, full disks, stale handles and damage."""

import pytest
from jobs import lean
from test_checkpoints import TRAIN

WRITERS = """
import pathlib, random, signal, traceback
from keras_dist.checkpoints.writer import Writer
from keras_dist.storage import generations
from keras_dist.storage.tensor_file import Tensor, read_header, read_into

folder, RANKS, NBYTES = pathlib.Path(os.environ["FOLDER"]), 2, 200_000

def write_for_ever(rank, read, write):
    "Writes generations as a rank does; the root tells the others the number of each."
    writer = Writer(folder, keep=2)
    while True:
        if rank == 0:
            number = generations.begin(folder)
            os.write(write, number.to_bytes(4, "little") * (RANKS - 1))
        else:
            number = int.from_bytes(os.read(read, 4), "little")
        data = memoryview(number.to_bytes(4, "little") * (NBYTES // 4))
        about = {"number": number} if rank == 0 else None
        writer.start(number, (rank, RANKS), [Tensor("0:0", "int32", data)], about)
        assert writer.wait_for_part() is None
        assert writer.finish(are_whole=True) is None

def check():
    "Returns the number of the newest generation, which is whole."
    found = [generations.read(path) for path in generations.newest_first(folder)]
    assert found and None not in found
    for generation in found:
        assert generations.find_damage(generation, range(RANKS)) == []
        for path in generation.parts:
            read = bytearray(NBYTES)
            read_into(path, read_header(path)["0:0"].offset, memoryview(read))
            assert read == generation.about["number"].to_bytes(4, "little") * (NBYTES // 4)
    return found[0].about["number"]

def die_at(last):
    "Kills this process before a call of the file system."
    calls = iter(range(last))
    def counted(call):
        def call_or_die(*arguments, **options):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return call_or_die
    for name in ("write", "fsync", "replace"):
        setattr(os, name, counted(getattr(os, name)))

draw, before, within = random.Random(11), 0, 0
fault()
for turn in range(40):
    # After 30 calls the root has committed two generations, and another rank has written three.
    pipe, children, first, last = os.pipe(), [], turn % RANKS, draw.randrange(30, 60)
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                if rank == first:
                    die_at(last)
                write_for_ever(rank, *pipe)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert os.waitpid(children[first], 0)[1] == signal.SIGKILL
    time.sleep(draw.uniform(0.0, 0.005))
    for child in children[:first] + children[first + 1:]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for end in pipe:
        os.close(end)
    newest = check()
    assert newest > before
    before = newest
    within += len([*folder.glob("0*")]) > 2 * len(generations.newest_first(folder))
print("killed within a write:", within)
assert within
"""


@pytest.mark.fault(
    "processes that write parts of a sharded checkpoint, without MPI, are killed, 40 times before "
    "a random call of the file system",
    "the newest generation with a manifest is whole, and none older than the last one",
    within=60,
)
def test_writers_are_killed(job, tmp_path):
    ended = job(1, WRITERS, bare=True, FOLDER=str(tmp_path / "checkpoints"))
    assert ended.returncode == 0, ended.stdout


CHECKPOINTS = f"""{TRAIN}
import errno, threading
from keras_dist.callbacks import ShardedCheckpoint
from keras_dist.storage import generations

class During(keras.callbacks.Callback):
    "Does something on this rank at the begin of epochs, before the checkpoint is written."
    def __init__(self, by_epoch):
        super().__init__()
        self.by_epoch, self.epochs = by_epoch, []
    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        self.by_epoch.get(epoch, int)()

def checkpoint(**options):
    return ShardedCheckpoint(folder, **options)
"""


@pytest.mark.fault(
    "the disk of one rank is full while a sharded checkpoint is written; then its file handle, and "
    "that of the manifest, is stale",
    "training continues; the root names rank and file once each time, and earlier generations stay",
    within=60,
)
def test_no_room_and_a_stale_handle(job, tmp_path):
    # A file size limit fails writes as a full disk does, and needs no privileges.
    text = f"""{CHECKPOINTS}
def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
flush = os.fsync
def fail(handle):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.readlink(f"/proc/self/fd/{{handle}}"))
def fail_behind_the_part(handle):
    if "json" in os.readlink(f"/proc/self/fd/{{handle}}"):
        fail(handle)
    flush(handle)
def work():
    limit(resource.RLIM_INFINITY)
    os.fsync = flush
on_one = {{1: lambda: limit(1000), 2: work, 3: lambda: setattr(os, "fsync", fail), 4: work}}
on_root = {{5: lambda: setattr(os, "fsync", fail_behind_the_part), 6: work}}
during = During(on_one if rank == 1 else on_root)
fault()
fit(during, checkpoint(keep=9, asynchronous=False), epochs=7)
assert during.epochs == [*range(7)]
if rank == 0:
    whole = [generations.read(path) for path in generations.newest_first(folder)]
    assert [found.about["epoch"] for found in whole] == [7, 5, 3, 1]
    assert not any(generations.find_damage(found, range(2)) for found in whole)
    assert len([*folder.iterdir()]) == 8  # nothing is left of the others
"""
    ended = job(2, text, FOLDER=str(tmp_path / "checkpoints"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
    lines = [line for line in ended.stdout.splitlines() if "Training continues" in line]
    assert len(lines) == 3 and all("[rank 0 of 2]" in line for line in lines), ended.stdout
    for line, words in zip(
        lines,
        (
            ("rank 1 to write its part", "File too large", "checkpoints/00000002/"),
            ("rank 1 to write its part", "Stale file handle", "checkpoints/00000003/"),
            ("to write the manifest", "Stale file handle", ".json"),
        ),
        strict=True,
    ):
        assert all(word in line for word in words), line


@pytest.mark.fault(
    "a part of the newest generation of a sharded checkpoint has other bytes; then all have",
    "training resumes from the generation before, and the root names file and digests; then an "
    "error on every rank",
    within=60,
)
def test_damaged_parts(job, tmp_path):
    text = f"""{CHECKPOINTS}
def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
fit(checkpoint(), epochs=2)
fault()
keras_dist.barrier()
if rank == 0:
    flip(generations.parts_of(folder, 2, 2)[1])
keras_dist.barrier()
during = During({{}})
fit(during, checkpoint(), epochs=2)
assert during.epochs == [1]
if rank == 0:
    for path in folder.glob("*/*"):
        flip(path)
keras_dist.barrier()
try:
    fit(checkpoint(), epochs=5)
    raise SystemExit("not found")
except errors.CheckpointError as error:
    assert "an undamaged generation in" in str(error), error
    assert "Restore the file, or remove the checkpoint to start over." in str(error), error
"""
    ended = job(2, text, FOLDER=str(tmp_path / "checkpoints"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
    [line] = [line for line in ended.stdout.splitlines() if "a checkpoint is damaged" in line]
    assert "00000002/1-of-2-" in line and "whose SHA-256 is" in line and "00000001-" in line


@pytest.mark.slow
@pytest.mark.fault(
    "the root is killed in the first write of a sharded checkpoint, and the next root behind the "
    "manifest of the second, with `on_failure=continue`",
    "training continues; the next root says that the first generation is lost, the second stays, "
    "and later ones describe the model",
    within=60,
)
def test_roots_die_before_and_behind_the_manifest(job, open_mpi, tmp_path):
    text = f"""{CHECKPOINTS}
import signal
commit = generations.commit
def die(*arguments):
    if rank == 1:
        commit(*arguments)
    if rank < 2:
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(*arguments)
generations.commit = die
fit(checkpoint(), epochs=3)
if keras_dist.rank() == 0:
    whole = [generations.read(path) for path in generations.newest_first(folder)]
    assert [found.about["epoch"] for found in whole] == [3, 2]
    assert all(found.about["model"] for found in whole)
    assert [len(found.parts) for found in whole] == [1, 2]
    assert not any(generations.find_damage(each, range(len(each.parts))) for each in whole)
    assert len([*folder.iterdir()]) == 4
    print("written by", keras_dist.size())
"""
    variables = {"KERAS_DIST_ON_FAILURE": "continue", "KERAS_BACKEND": "torch"}
    options = ("--with-ft", "ulfm")
    folder = str(tmp_path / "checkpoints")
    ended = job(3, text, python=open_mpi, options=options, FOLDER=folder, **variables)
    assert ended.returncode == 0, ended.stdout
    assert "written by 1" in ended.stdout
    [line] = [line for line in ended.stdout.splitlines() if "have died during the write" in line]
    assert "[rank 0 of 2]" in line and "Training continues" in line


KILLED = """
import os, random, signal, sys, threading
import keras, numpy as np, keras_dist
from keras_dist.storage import generations
keras_dist.init()
folder, turn = sys.argv[1], int(sys.argv[2])
x = np.ones((4000, 64), "float32")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512), keras.layers.Dense(1)])
adam = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)
model.compile(adam, "mse")
draw = random.Random(turn)

if keras_dist.rank() == turn % keras_dist.size():
    calls = iter(range(draw.randrange(30, 60)))  # of the thread that writes
    def counted(call):
        def call_or_die(*arguments, **options):
            own = threading.current_thread().name == "keras_dist checkpoint"
            if own and next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return call_or_die
    for name in ("write", "fsync", "replace"):
        setattr(os, name, counted(getattr(os, name)))

checkpoint = keras_dist.callbacks.ShardedCheckpoint(folder, save_freq=2)
class Told(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if keras_dist.rank() == 0 and not self.told:
            self.told = True
            print("resumes at", int(self.model.optimizer.iterations), flush=True)
    told = False
callbacks = keras_dist.callbacks(checkpoint, Told())
model.fit(x, x[:, :1], 2, 10**6, verbose=0, callbacks=callbacks)
"""


@pytest.mark.slow
@pytest.mark.parametrize("turns", [range(5), range(5, 10)], ids=["0-4", "5-9"])
def test_a_fit_is_killed_at_random_moments(turns, run_ranks, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    steps = 0
    for turn in turns:
        env = lean(KERAS_BACKEND="jax", TF_CPP_MIN_LOG_LEVEL="3")
        ended = run_ranks(2, script, tmp_path / "checkpoints", str(turn), env=env)
        assert ended.returncode != 0, ended.stdout
        [line] = [line for line in ended.stdout.splitlines() if line.startswith("resumes at")]
        resumed = int(line.split()[-1])
        assert resumed >= steps, (turn, resumed, steps)
        assert "damaged" not in ended.stdout
        steps = resumed
    assert steps > 0
