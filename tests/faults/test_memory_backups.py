"""A host is lost whole: the job goes on from a backup in the memory of another host."""

import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from jobs import BARE, lean
from namespaces import TOLD, hosts_or_skip
from test_lost_hosts import launcher_command, wait_for

# The root is on the second host, which is lost with its disk and its memory.
HEAD = """
import os, sys, time
from pathlib import Path
folder = Path(os.environ["FAULT_FOLDER"])
ON_DISK = Path("/dev/shm/disk-of-this-host")
has_begun_again = os.environ["KERAS_DIST_RESTART"] != "0"
def wait_for_loss(rank):
    if LOSES and rank == 1 and not has_begun_again:
        (folder / "ready").touch()
        time.sleep(100)
"""

STATE = """
import numpy as np
from keras_dist import _engine
from keras_dist.storage.memory_copies import MemoryCopies
comm = runtime.communicator()
copies = MemoryCopies(ON_DISK, 1)
found = copies.find()
read = _engine.collectives.broadcast_object(
    comm, None if found is None else found.read_bytes(), 1
)
assert (read is not None) == has_begun_again
state = np.zeros(50_000) if read is None else np.frombuffer(read)
first = 0 if read is None else int(state[0])
for step in range(first, 10):
    if step == 6:
        assert first == 5 or not has_begun_again
        wait_for_loss(comm.rank)
    mine = np.sin(state * 3) + np.arange(state.size) * comm.rank
    options = _engine.OpOptions(_engine.ReduceOp.AVERAGE)
    [state] = _engine.collectives.allreduce(comm, [mine], ["x"], options, 2**23)
    state = state.copy()
    state[0] = step + 1
    if step % 2 == 0:
        copies.write(lambda file: file.write(state.tobytes()))
copies.remove()
if comm.rank == 0:
    np.savez(folder / "weights", state)
"""

FIT = """
import keras, numpy as np, keras_dist
keras_dist.init()
keras.utils.set_random_seed(7)
x = np.random.default_rng(0).standard_normal((48, 4)).astype("float32")
data = keras_dist.data.shard((x, x.sum(axis=1, keepdims=True)), batch_size=4)
model = keras.Sequential([
    keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2, seed=3),
    keras.layers.Dense(1),
])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
class Loss(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        assert epoch >= 2 or not has_begun_again
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 2 and batch == 3:
            wait_for_loss(keras_dist.rank())
backup = keras_dist.callbacks.BackupAndRestore(ON_DISK, root_rank=1, memory=True)
model.fit(data, epochs=4, verbose=0, callbacks=keras_dist.callbacks(backup, Loss()))
if keras_dist.rank() == 0:
    np.savez(folder / "weights", *model.get_weights())
"""


@pytest.fixture
def weights_of(request, tmp_path):
    """A function that trains on two hosts, one of which may be lost, and returns the weights."""
    mark = request.node.get_closest_marker("fault")
    within = mark.kwargs["within"] if mark else 120

    def run(text, loses):
        folder = tmp_path / str(loses)
        folder.mkdir()
        (folder / "train.py").write_text(f"LOSES = {loses}{HEAD}{text}")
        (folder / "hosts").write_text("host1:1\nhost2:1\n")
        (folder / "discover").write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        (folder / "discover").chmod(0o755)
        with hosts_or_skip(2) as (hosts, reach):
            command, settings = launcher_command(Path(sys.executable), hosts, reach, folder / "bin")
            discovery = ["--host-discovery-script", folder / "discover", "--max-restarts", 1]
            arguments = [*command[: command.index("--hosts")], *discovery, folder / "train.py"]
            variables = {"FAULT_FOLDER": folder, "KERAS_DIST_STALL_ABORT_SECONDS": "10", TOLD: "1"}
            variables = {name: str(value) for name, value in variables.items()}
            with (
                subprocess.Popen(
                    [*map(str, (*hosts[0].enter, *arguments))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=lean(**settings, **variables),
                ) as job,
                ThreadPoolExecutor(1) as pool,
            ):
                output = pool.submit(job.communicate, timeout=180)
                try:
                    wait_for(lambda: (folder / "ready").exists() or output.done(), 60)
                    begin = time.monotonic()
                    if loses:
                        lose(folder, hosts[1])
                    printed, _ = output.result()
                    assert not loses or time.monotonic() - begin < within, printed
                finally:
                    job.kill()
                    for host in hosts:
                        host.kill_all()
            assert job.returncode == 0, printed
            assert ("Restart 1 of 1" in printed) == loses, printed
            assert not hosts[0].run("find", "/dev/shm", "-name", "*.npz"), printed
        with np.load(folder / "weights.npz") as found:
            return [found[name] for name in found.files]

    return run


def lose(folder, host):
    """Loses a host with its files. The first host takes its rank."""
    (folder / "hosts").write_text("host1:2\n")
    assert host.run("find", "/dev/shm", "-name", "*.npz")
    with contextlib.suppress(ProcessLookupError):
        host.lose()
    host.run("sh", "-c", "rm -rf /dev/shm/*")


def assert_equal_bits(first, second):
    assert len(first) == len(second)
    assert [each.tobytes() for each in first] == [each.tobytes() for each in second]


@pytest.mark.fault(
    "the host of the root is lost with its disk and its memory, under `keras-dist run "
    "--max-restarts`, with a backup in memory",
    "the job restarts on the host that is left from the copy in its memory; it ends with the bits "
    "of an uninterrupted job",
    within=30,
)
def test_the_state_of_a_lost_host_is_in_the_memory_of_another(weights_of):
    state = np.zeros(50_000)
    for step in range(10):
        same = np.sin(state * 3)
        state = (same + (same + np.arange(state.size))) / 2
        state[0] = step + 1
    assert_equal_bits(weights_of(BARE + STATE, True), [state])


@pytest.mark.slow
def test_a_fit_whose_host_is_lost_ends_with_the_weights_of_an_uninterrupted_one(weights_of):
    assert_equal_bits(weights_of(FIT, True), weights_of(FIT, False))
