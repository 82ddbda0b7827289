"""Reductions on GPUs, for which a test double stands in."""

from typing import Any
from unittest import mock

import numpy as np
from bare import runtime
from faults import die, run, tell

from keras_dist import _backends, _engine, _gpu
from keras_dist._engine.nccl.ranks import NcclRanks

_backends.active().gpu_number = lambda: 0  # type: ignore
runtime.init()
comm, me = runtime.communicator(), runtime.rank()


def on_gpu(array: Any) -> Any:
    def allocate(shape: Any, dtype: Any) -> Any:
        return on_gpu(np.empty(shape, dtype))

    address = array.ctypes.data
    return _gpu.DeviceArray(address, array.shape, array.dtype, array, allocate, stream=lambda: 0)


def reduced() -> Any:
    """Each rank contributes a power of two, so a sum shows which ranks contributed."""
    mine = on_gpu(np.full(50_000, 2.0**me, "float32"))
    options = _engine.OpOptions(_engine.ReduceOp.SUM)
    [total] = _engine.collectives.allreduce(comm, [mine], ["gradients"], options, 2**20)
    return total.finish(0) if isinstance(total, _gpu.DeviceArray) else total


def steps(reduce: Any = reduced) -> None:
    sums = []
    for _ in range(12):
        total = reduce()
        assert (total == total[0]).all()
        sums.append(int(total[0]))
    if runtime.rank() == 0:
        print("sums", sums)


def steps_after_errors() -> None:
    """All ranks raise the error of one, and can go on."""

    def reduce() -> Any:
        while True:
            try:
                return reduced()
            except RuntimeError as error:
                tell(f"rank {me} raises {type(error).__name__} {error}")

    steps(reduce)
    raise SystemExit(3)


def die_later() -> None:
    """Rank 1 fails before its fifth launch, and dies when all ranks know that."""
    if me == 1:
        mock.patch.object(NcclRanks, "_close_failures", lambda self: die()).start()
    steps()


run(globals())
