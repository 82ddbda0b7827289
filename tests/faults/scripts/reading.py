"""Readers of data and cached copies, with ranks that die, block or change files."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from bare import runtime
from faults import die, fault, run, tell

from keras_dist import data, ops
from keras_dist.data import epochs, readers, row_source

STRANGER = 54321


def changed_copy(damage: str) -> None:
    """The root damages the cached copy of a folder, which is then used again."""
    runtime.init()
    for turn in range(2):
        fault()
        path = Path(data.cached(os.environ["SOURCE"], os.environ["CACHE"]))
        tell(f"turn {turn}: {(path / '1').read_text()}")
        ops.barrier()
        if runtime.rank() == 0 and turn == 0:
            other = path.with_name(path.name + "-other")
            if damage == "a link":
                path.rename(other)
                path.symlink_to(other)
            elif damage == "of another user":
                os.chown(path / "1", STRANGER, STRANGER)
            else:
                (path / "1").write_text("two")
        ops.barrier()


def rows(**options: Any) -> Any:
    row_source.for_keras = lambda batches, ahead: batches  # type: ignore
    runtime.init()
    return data.npy(os.environ["ROWS"], None, 16, block=40, **options)


def blocked() -> None:
    read = rows(readers=1)
    if runtime.rank() == 0:
        readers.FileReader.read = lambda *_: time.sleep(1000)  # type: ignore
    fault()
    read.batch(0, 0)


def without_two_ranks() -> None:
    """The first of four ranks dies in an epoch, and the last two epochs later."""
    read = rows()
    me = runtime.rank()
    for epoch, dies in (0, 0), (2, 3):
        for step in range(read.plan.steps):
            if me == dies and step == 5:
                die()
            read.batch(epoch, step)
            ops.allreduce(np.float32(1))
        epochs.reshard(runtime.rank(), runtime.size())
        steps = range(read.plan.steps)
        found = [row for step in steps for row in read.batch(epoch + 1, step).tolist()]
        found = [row for part in ops.allgather_object(found) for row in part]
        print(f"rows {len(found)} {len(set(found))}", flush=True)


run(globals())
