"""Checkpoints survive a killed writer, a full disk and corrupted bytes."""

import pytest

BEGIN = """
import pathlib, random, resource, shutil, signal
import numpy as np
from keras_dist.storage import versioned_backups

folder = pathlib.Path(os.environ["FOLDER"])
"""

TRAIN = f"""{BEGIN}
import keras
import keras_dist
from keras_dist import errors
from keras_dist.callbacks import BackupAndRestore, ModelCheckpoint

rank = keras_dist.rank()

class At(keras.callbacks.Callback):
    "Does something on the root at the begin of epochs; notes which there were."
    def __init__(self, by_epoch=()):
        super().__init__()
        self.by_epoch, self.epochs = by_epoch, []
    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        if rank == 0 and epoch in self.by_epoch:
            self.by_epoch[epoch]()

def fit(*callbacks, epochs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    x = np.ones((16, 6), "float32")
    callbacks = keras_dist.callbacks(*callbacks)
    model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=callbacks)
    return model
"""


@pytest.mark.fault(
    "the writer of backups is killed, 40 times at random moments",
    "the newest or the previous backup is intact, and a restart uses it",
    within=60,
)
def test_the_writer_is_killed(job, tmp_path):
    text = f"""{BEGIN}
def write_for_ever(acknowledge):
    whole, number = next(iter(versioned_backups.newest_first(folder)), None), 0
    while True:
        number += 1
        def save(file):
            np.savez(file, number=number, values=np.full(100_000, number))
        whole = versioned_backups.add(folder, save, whole)
        os.write(acknowledge, number.to_bytes(4, "little"))

draw = random.Random(7)
fault()
within = []
for turn in range(40):
    shutil.rmtree(folder, ignore_errors=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        write_for_ever(write)
    os.close(write)
    last = int.from_bytes(os.read(read, 4), "little")
    time.sleep(draw.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while told := os.read(read, 4):
        last = int.from_bytes(told, "little")
    os.close(read)
    within.append(any(path.name.startswith(".") for path in folder.iterdir()))
    found = versioned_backups.newest_first(folder)
    assert all(versioned_backups.is_intact(path) for path in found), found
    with np.load(found[0], allow_pickle=False) as file:
        number = int(file["number"])
        assert (file["values"] == number).all()
    assert number in (last, last + 1), (number, last)
    # What was left of it goes when the next one is written.
    whole = versioned_backups.add(folder, lambda file: file.write(b"new"), found[0])
    assert {{path.name for path in folder.iterdir()}} == {{whole.name, found[0].name}}
print("killed within a write:", sum(within))
assert sum(within) > 10
"""
    ended = job(1, text, bare=True, FOLDER=str(tmp_path / "backups"))
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "the newest backup is damaged or truncated; then all are",
    "training resumes from the previous one, with a warning; then an error on every rank",
    within=60,
)
def test_damaged_backups(job, tmp_path):
    text = f"""{TRAIN}
def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
def cut_off(path):
    os.truncate(path, path.stat().st_size - 1)

backup = BackupAndRestore(folder, delete_checkpoint=False)
fit(backup, epochs=2)
fault()
for epochs, damage in (3, flip), (4, cut_off):
    keras_dist.barrier()
    if rank == 0:
        damage(versioned_backups.newest_first(folder)[0])
    keras_dist.barrier()
    at = At()
    fit(at, backup, epochs=epochs)
    assert at.epochs == [epochs - 2, epochs - 1], at.epochs
if rank == 0:
    for path in versioned_backups.newest_first(folder):
        flip(path)
keras_dist.barrier()
try:
    fit(backup, epochs=5)
    raise SystemExit("not found")
except errors.CheckpointError as error:
    assert "an intact backup in" in str(error), error
    assert "Remove the backup to start over." in str(error), error
"""
    ended = job(2, text, FOLDER=str(tmp_path / "backup"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("is damaged: the digest does not match.") == 2


@pytest.mark.fault(
    "the disk is full while a backup and checkpoints are written",
    "training continues with a warning each time; earlier files stay, and no partial file is left",
    within=60,
)
def test_no_room(job, tmp_path):
    # A file size limit fails writes as a full disk does, and needs no privileges.
    text = f"""{TRAIN}
def contents():
    return {{path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}}
def fill():
    while not (folder / "behind.keras").exists():
        time.sleep(0.05)
    before.update(contents())
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
def make_room():
    after.update(contents())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

before, after = {{}}, {{}}
at = At({{1: fill, 3: make_room}})
written = [
    BackupAndRestore(folder / "backup", delete_checkpoint=False),
    ModelCheckpoint(folder / "model.keras"),
    ModelCheckpoint(folder / "model.weights.h5", save_weights_only=True),
    ModelCheckpoint(folder / "behind.keras", asynchronous=True),
]
fault()
fit(at, *written, epochs=4)
assert at.epochs == [0, 1, 2, 3]
if rank == 0:
    assert before == after
    names = {{path.name for path in contents()}}
    new = versioned_backups.newest_first(folder / "backup")
    assert names == {{*(p.name for p in new), "model.keras", "model.weights.h5", "behind.keras"}}
    assert len(new) == 2 and new[1] in before and new[0] not in before
    assert all(contents()[path] != before[path] for path in folder.glob("*.*"))
"""
    ended = job(2, text, FOLDER=str(tmp_path / "out"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
    lines = [line for line in ended.stdout.splitlines() if "Training continues" in line]
    # Two epochs without space, with four writes each.
    assert len(lines) == 8 and all("File too large" in line for line in lines), ended.stdout


@pytest.mark.fault(
    "the directory of backups is removed while training, then a file takes its place",
    "it is created again; then training continues without backups, with a warning",
    within=60,
)
def test_the_directory_goes_away(job, tmp_path):
    text = f"""{TRAIN}
def remove():
    shutil.rmtree(folder)
def take_place():
    assert len(versioned_backups.newest_first(folder)) == 1
    shutil.rmtree(folder)
    folder.write_text("")
fault()
at = At({{1: remove, 2: take_place}})
fit(at, BackupAndRestore(folder, delete_checkpoint=False), epochs=3)
assert at.epochs == [0, 1, 2]
"""
    ended = job(2, text, FOLDER=str(tmp_path / "backup"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("Training continues, and earlier files are unchanged") == 1
    assert "FileExistsError" in ended.stdout
