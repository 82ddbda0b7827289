"""Rows of a table in GPU memory, such as the gradient of an embedding: gathered, not added up.

Adding up rows of equal index is the work of a framework, which has a kernel for it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.nccl_launch import tell_all
from keras_dist._engine.collectives.on_device import gather
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.nccl.path import NCCL, is_defined, uses_nccl
from keras_dist._engine.options import OpOptions
from keras_dist._engine.recovery.retry import retry
from keras_dist._engine.signature import entries_of
from keras_dist._gpu import DeviceArray


def rows_through(on_host: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `reduce_slices` for rows wherever they are."""

    def run(
        comm: Communicator,
        values: Any,
        indices: Any,
        name: str,
        options: OpOptions,
        notices: bool = False,
    ) -> Any:
        if not isinstance(values, DeviceArray):
            return on_host(comm, values, indices, name, options, notices)
        sums = options.op in (ReduceOp.SUM, ReduceOp.AVERAGE)
        if uses_nccl(comm) and sums and is_defined(options.op, values.dtype, 1):
            return retry(comm, lambda: _gather(comm, values, indices, name, options, notices))

        def copy() -> tuple[np.ndarray, np.ndarray]:
            return values.to_host(), indices.to_host()

        host = tell_all(comm, "sparse_allreduce", copy, options.key)
        rows, numbers = on_host(comm, *host, name, options, notices)
        return values.from_host(rows), indices.from_host(numbers), 1

    return run


def _gather(
    comm: Communicator,
    values: DeviceArray,
    indices: DeviceArray,
    name: str,
    options: OpOptions,
    notices: bool,
) -> tuple[Any, Any, int]:
    names = [name, f"the indices of {name}"]
    specs = [((-1, *values.shape[1:]), values.dtype), ((-1,), indices.dtype)]
    entries = entries_of(names, specs)
    call = options.signature("sparse_allreduce", entries=entries, spares=True, library=NCCL)
    with comm.lock:
        rendezvous(comm, call, notices)
        if comm.faults.joined is not None:
            parts = exchange_among(comm, (values.to_host(), indices.to_host()))
            rows, numbers = (np.concatenate(each) for each in zip(*parts, strict=True))
            found, count = [values.from_host(rows), indices.from_host(numbers)], len(parts)
        else:
            found, count = gather(comm, call, [values, indices]), comm.size
            if comm.faults.retry is not None and found[0].completion is not None:
                found[0].completion.wait()
    return found[0], found[1], count if options.op is ReduceOp.AVERAGE else 1
