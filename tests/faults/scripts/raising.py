"""A rank raises within an operation, with operations queued, in a thread, or in a compressor."""

import threading
from typing import Any
from unittest import mock

import numpy as np
from bare import runtime
from faults import break_down, fault, run, tell

import keras_dist
from keras_dist import errors, ops
from keras_dist._engine.shm import bucket_reduction
from keras_dist.ops import asynchronous


def within_a_reduction() -> None:
    runtime.init()
    mine = np.full(2**20, 1.0, np.float32)

    def fail_once(*_: object) -> None:
        broken.stop()
        fault()
        raise MemoryError

    broken = mock.patch.object(bucket_reduction, "reduce_each", fail_once)
    if runtime.rank() == 1:
        broken.start()
    try:
        ops.allreduce(mine)
    except errors.RankError as error:
        tell(error)
    assert ops.allreduce(mine, op="sum").max() == 3


def with_queue(handles: str) -> None:
    handle = asynchronous.allreduce_async(1.0)
    if runtime.rank() == 1 and handles == "kept":
        handle.wait()
    asynchronous.allreduce_async(1.0)
    if runtime.rank() == 1:
        break_down()
    asynchronous.synchronize(asynchronous.allreduce_async(1.0))


def in_a_thread() -> None:
    runtime.init()

    def work() -> None:
        if runtime.rank() == 1:
            break_down()
        ops.allreduce(1.0, name="loss")

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()


class Broken(keras_dist.Compressor):
    def compress(self, array: Any) -> Any:
        if runtime.rank() == 1:
            break_down()
        return array.astype(np.float16)

    def decompress(self, array: Any, dtype: Any) -> Any:
        return array.astype(dtype)


def in_a_compressor() -> None:
    runtime.init()
    ops.allreduce(np.ones(100_000, np.float32), compression=Broken())


run(globals())
