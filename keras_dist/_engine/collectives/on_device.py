"""Collectives of arrays in GPU memory: by NCCL, or staged on the host.

What NCCL does not define runs on the host, as do all operations where a rank has no GPU of its own
or has joined.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.nccl_launch import launch_on_all, tell_all
from keras_dist._engine.collectives.rendezvous import (
    by_name,
    key_of,
    raise_on_all,
    rendezvous,
)
from keras_dist._engine.collectives.rows import check_rows, check_scattered, row_bounds
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.nccl.path import NCCL, are_on_device, is_defined, on_gpu, uses_nccl
from keras_dist._engine.nccl.ranks import NcclRanks
from keras_dist._engine.recovery import retried
from keras_dist._engine.signature import CollectiveSignature, OpOptions, entries_of
from keras_dist._gpu import DeviceArray


def through(on_host: Callable[..., Any], on_device: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a collective of a list of arrays that runs where they are."""
    key_among = key_of(on_host)

    @functools.wraps(on_host)
    def run(comm: Communicator, arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not are_on_device(arrays):
            return on_host(comm, arrays, *args, **kwargs)
        results = on_device(comm, arrays, *args, **kwargs) if uses_nccl(comm) else None
        if results is None:
            operation, key = on_host.__name__.lstrip("_"), key_among(arrays, *args, **kwargs)
            host = tell_all(comm, operation, lambda: [each.to_host() for each in arrays], key)
            results = on_host(comm, host, *args, **kwargs)
        return on_gpu(results, arrays)

    return run


def broadcast(
    comm: Communicator,
    arrays: Sequence[DeviceArray],
    names: Sequence[str],
    root: int,
    operation: str = "broadcast",
    key: str | None = None,
    remedy: str = CollectiveSignature.remedy,
) -> list[Any] | None:
    """Copies the root's arrays to every rank by NCCL. See `collectives.broadcast`."""
    with raise_on_all(comm, operation, key):
        source = comm.index_of_root(root)
    entries = entries_of(names, [(array.shape, array.dtype) for array in arrays])
    call = CollectiveSignature(
        operation, entries, root=int(root), key=key, remedy=remedy, library=NCCL
    )

    def launch(ranks: NcclRanks) -> list[DeviceArray]:
        targets = [array.empty() for array in arrays]

        def group() -> None:
            for array, target in zip(arrays, targets, strict=True):
                if array.nbytes:
                    ranks.broadcast(array.address, target.address, array.nbytes, source)

        ranks.launch(call, arrays, targets, group)
        return targets

    return _run(comm, call, lambda: launch_on_all(comm, call, launch), key)


def allgather(
    comm: Communicator, arrays: Sequence[DeviceArray], names: Sequence[str], key: str | None = None
) -> list[Any] | None:
    """Concatenates arrays of all ranks by NCCL. See `collectives.grouped_allgather`."""
    with raise_on_all(comm, "allgather", key):
        for name, array in zip(names, arrays, strict=True):
            check_rows(comm, array, name, "to gather along")
    specs = [((-1, *array.shape[1:]), array.dtype) for array in arrays]
    call = CollectiveSignature("allgather", entries_of(names, specs), key=key, library=NCCL)

    return _run(comm, call, lambda: gather(comm, call, arrays), key)


def gather(
    comm: Communicator, call: CollectiveSignature, arrays: Sequence[DeviceArray]
) -> list[DeviceArray]:
    """Launches an allgather after its rendezvous. Collective: every rank; blocks."""
    mine = np.array([len(array) for array in arrays], np.int64)
    lengths = [raw.view(np.int64) for raw in comm.allgather_bytes(mine.tobytes())]
    counts = np.stack(lengths, axis=1)  # by array and rank
    return launch_on_all(comm, call, lambda ranks: _gather(ranks, call, arrays, counts))


def _gather(
    ranks: NcclRanks, call: CollectiveSignature, arrays: Sequence[DeviceArray], counts: np.ndarray
) -> list[DeviceArray]:
    targets = [
        array.empty((int(rows.sum()), *array.shape[1:]))
        for array, rows in zip(arrays, counts, strict=True)
    ]

    def group() -> None:
        for array, target, rows in zip(arrays, targets, counts, strict=True):
            width = target.nbytes // max(1, target.shape[0])
            place = target.address
            for root, count in enumerate(rows.tolist()):
                if count * width:
                    ranks.broadcast(array.address, place, count * width, root)
                place += count * width

    ranks.launch(call, arrays, targets, group)
    return targets


def reducescatter(
    comm: Communicator, arrays: Sequence[DeviceArray], names: Sequence[str], options: OpOptions
) -> list[Any] | None:
    """Reduces arrays and scatters their rows by NCCL. See `collectives.reducescatter`."""
    factor = options.prescale * options.postscale
    if not all(is_defined(options.op, array.dtype, factor) for array in arrays):
        return None
    specs = [(array.shape, array.dtype) for array in arrays]
    call = options.signature("reducescatter", entries=entries_of(names, specs), library=NCCL)

    def launch(ranks: NcclRanks) -> list[DeviceArray]:
        bounds = [row_bounds(len(array), comm.size).tolist() for array in arrays]
        targets = [
            array.empty((ends[comm.rank + 1] - ends[comm.rank], *array.shape[1:]))
            for array, ends in zip(arrays, bounds, strict=True)
        ]
        codes = [ranks.code_of(options.op, factor, array.dtype) for array in arrays]

        def group() -> None:
            for array, target, ends, code in zip(arrays, targets, bounds, codes, strict=True):
                if array.count:
                    ranks.reduce_rows(array, target, ends, code)

        ranks.launch(call, arrays, targets, group)
        return targets

    def check_and_launch() -> list[DeviceArray]:
        check_scattered(comm, arrays, names, options.op)
        return launch_on_all(comm, call, launch)

    return _run(comm, call, check_and_launch, options.key)


@by_name
@retried
def _run(
    comm: Communicator,
    call: CollectiveSignature,
    launch: Callable[[], list[DeviceArray]],
    key: str | None,
) -> list[Any]:
    """Runs an operation by NCCL after a rendezvous. Collective: every rank."""
    with comm.lock:
        rendezvous(comm, call)
        results = launch()
        if comm.faults.retry is not None:
            for result in results:
                result.finish(None)
        return results


def rows_through(on_host: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `reduce_slices` for rows anywhere; those of a GPU are gathered, not added up."""

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
            return _gather_rows(comm, values, indices, name, options, notices)

        def copy() -> tuple[np.ndarray, np.ndarray]:
            return values.to_host(), indices.to_host()

        host = tell_all(comm, "sparse_allreduce", copy, options.key)
        rows, numbers = on_host(comm, *host, name, options, notices)
        return values.from_host(rows), indices.from_host(numbers), 1

    return run


@by_name
@retried
def _gather_rows(
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
