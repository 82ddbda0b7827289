"""Programs on two test hosts, whose links fail, or one of which is lost."""

import os
import time
from pathlib import Path

import numpy as np
from bare import runtime
from faults import FOLDER, run

from keras_dist import _engine
from keras_dist.resume import format
from keras_dist.resume.memory import MemoryCopies
from keras_dist.resume.read import bytes_by_name
from keras_dist.resume.tensor_file import Tensor

COMM = runtime.communicator()
HAS_BEGUN_AGAIN = os.environ.get("KERAS_DIST_RESTART", "0") != "0"
# Not shared with the other host, with which the root is lost.
DISK_OF_THIS_HOST = Path("/dev/shm/disk-of-this-host")


def steps() -> None:
    """Each rank contributes different numbers; every result is checked.

    The root adds a byte to a file in each step, and ends when it finds another file.
    """
    options = _engine.OpOptions(_engine.ReduceOp.SUM)
    start = np.arange(300_000, dtype=np.float32) % 100
    for step in range(3 if HAS_BEGUN_AGAIN else 10**6):
        if step >= 5 and COMM.rank == 0:
            with (FOLDER / "ready").open("a") as ready:
                ready.write(".")
        mine = start + step % 100 + COMM.rank
        ends = COMM.rank == 0 and (FOLDER / "enough").exists()
        arrays = [mine, np.array([ends], np.float32)]
        [total, ended] = _engine.collectives.allreduce(COMM, arrays, ["x", "ends"], options, 2**23)
        expected = COMM.size * (start + step % 100) + sum(range(COMM.size))
        assert np.array_equal(total, expected), f"step {step} is wrong"
        if ended[0]:
            break
        time.sleep(0.01)
    print(f"rank {COMM.rank} ends well", flush=True)


def bytes_of(path: Path) -> bytes:
    generation = format.read(path)
    assert generation is not None
    return bytes_by_name(generation.parts[0])["x"].tobytes()


def state_in_memory() -> None:
    copies = MemoryCopies(DISK_OF_THIS_HOST, 1)
    found = copies.find()
    sent = None if found is None else bytes_of(found)
    read = _engine.collectives.broadcast_object(COMM, sent, 1)
    assert (read is not None) == HAS_BEGUN_AGAIN
    state = np.zeros(50_000) if read is None else np.frombuffer(read)
    first = 0 if read is None else int(state[0])
    for step in range(first, 10):
        if step == 6:
            assert first == (5 if HAS_BEGUN_AGAIN else 0)
            if COMM.rank == 1 and not HAS_BEGUN_AGAIN:
                (FOLDER / "ready").touch()
                time.sleep(100)
        mine = np.sin(state * 3) + np.arange(state.size) * COMM.rank
        options = _engine.OpOptions(_engine.ReduceOp.AVERAGE)
        [state] = _engine.collectives.allreduce(COMM, [mine], ["x"], options, 2**23)
        state = state.copy()
        state[0] = step + 1
        if step % 2 == 0:
            tensor = Tensor("x", "uint8", memoryview(state.tobytes()))
            copies.write(step + 1, [tensor], {})
    copies.remove()
    if COMM.rank == 0:
        np.savez(FOLDER / "weights", state)


run(globals())
