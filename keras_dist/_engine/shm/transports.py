"""Transports: how the rank that reduces a slice gets the contributions of the others.

A transport returns, for each chunk of a slice, the contributions of all ranks in rank order. The
arithmetic is the same for all transports.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from keras_dist._engine.buckets import Bucket, Piece, aligned
from keras_dist._engine.shm import process_vm
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.segments import Segment

__all__ = ["CopyIn", "RemoteRead"]


class CopyIn:
    """Each rank copies the slices that others reduce into shared memory.

    The first other contribution to a slice is written to the memory of its result and reduced in
    place, the rest to extra rows. For two ranks that is half a copy each, and no rows.

    All slices are copied before any is reduced. Copied and reduced in blocks that stay in cache,
    they would cross the memory bus less often, but a core would fetch lines that another core has
    just written, which took up to twice the time in a training step.

    Args:
        node: the ranks.
        bucket: the bucket.
        bounds: first element of the slice of each rank, and the end.
        scratch: three buffers, each of the size of the largest chunk.
    """

    def __init__(self, node: Node, bucket: Bucket, bounds: Sequence[int], scratch: np.ndarray):
        self._rank, self._size = node.rank, node.size
        self._bucket, self._bounds, self._scratch = bucket, bounds, scratch
        self._stride = aligned(bucket.nbytes)
        self._arrays: Sequence[np.ndarray] = ()
        self.nbytes = (node.size - 2) * self._stride

    def bind_memory(self, segment: Segment, offset: int, results: Sequence[np.ndarray]) -> None:
        """Uses a part of a segment, `offset` bytes from its start."""
        self._results = results
        self._rows = [
            segment.array(offset + row * self._stride, self._bucket.count, self._bucket.dtype)
            for row in range(self._size - 2)
        ]
        # By turn: the target, the index of the array and its part.
        self._copies = [list(self._plan_copies(turn)) for turn in range(len(results))]
        self._found: dict[tuple[int, int], list[np.ndarray]] = {}

    def publish(self, arrays: Sequence[np.ndarray], turn: int) -> None:
        """Makes the arrays of this rank visible to the others, before the rendezvous."""
        self._arrays = [array if array.ndim == 1 else array.reshape(-1) for array in arrays]
        for target, slot, part in self._copies[turn]:
            target[...] = self._arrays[slot][part]

    def parts(self, chunk: Piece, turn: int) -> list[np.ndarray]:
        """Returns a chunk of all contributions, in rank order.

        The first or second is the memory of the result, which is written after both are read.
        """
        others = self._found.get((turn, chunk.low))
        if others is None:
            others = self._found[turn, chunk.low] = [
                self._target(self._rank, rank, turn)[chunk.low : chunk.high]
                for rank in range(self._size)
                if rank != self._rank
            ]
        mine = chunk.of(self._arrays, self._scratch[0])
        return [*others[: self._rank], mine, *others[self._rank :]]

    def forget(self) -> None:
        """Releases the arrays of this rank, after it has reduced."""
        self._arrays = ()

    def _target(self, owner: int, rank: int, turn: int) -> np.ndarray:
        """Returns the memory to which `rank` copies the slice that `owner` reduces."""
        others_before = rank - (rank > owner)
        return self._results[turn] if others_before == 0 else self._rows[others_before - 1]

    def _plan_copies(self, turn: int) -> Iterator[tuple[np.ndarray, int, slice]]:
        for owner, (low, high) in enumerate(itertools.pairwise(self._bounds)):
            if owner != self._rank:
                target = self._target(owner, self._rank, turn)
                for slot, begin, at, count in Piece(self._bucket, low, high).parts:
                    yield target[low + at : low + at + count], slot, slice(begin, begin + count)


class RemoteRead:
    """Each rank reads its slice from the memory of the other ranks; nothing is copied first.

    Args:
        node: the ranks.
        bucket: the bucket.
        bounds: first element of the slice of each rank, and the end.
        scratch: three buffers, each of the size of the largest chunk.
    """

    def __init__(self, node: Node, bucket: Bucket, bounds: Sequence[int], scratch: np.ndarray):
        self._rank, self._size, self._pids = node.rank, node.size, node.pids
        self._bucket, self._scratch = bucket, scratch
        self._readers: dict[int, _Reader] = {}
        self._arrays: Sequence[np.ndarray] = ()
        self.nbytes = node.size * len(bucket.slots) * 8

    def bind_memory(self, segment: Segment, offset: int, results: Sequence[np.ndarray]) -> None:
        """Uses a part of a segment, `offset` bytes from its start."""
        slots = len(self._bucket.slots)
        table = segment.array(offset, self._size * slots, np.dtype(np.uint64))
        self._addresses = table.reshape(self._size, slots)

    def publish(self, arrays: Sequence[np.ndarray], turn: int) -> None:
        """Makes the arrays of this rank visible to the others, before the rendezvous."""
        # Kept until `forget`, when all ranks have read them.
        self._arrays = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        self._addresses[self._rank] = [_address(array) for array in self._arrays]

    def parts(self, chunk: Piece, turn: int) -> Iterator[np.ndarray]:
        """Yields a chunk of all contributions, in rank order; two at a time are valid."""
        reader = self._readers.get(chunk.low)
        if reader is None:
            reader = self._readers[chunk.low] = _Reader(self._bucket, chunk, self._scratch[1:])
        for rank in range(self._size):
            if rank == self._rank:
                yield chunk.of(self._arrays, self._scratch[0])
            else:
                yield reader.fetch(self._pids[rank], self._addresses[rank], rank % 2)

    def forget(self) -> None:
        """Releases the arrays of this rank, after all ranks have read them."""
        self._arrays = ()


class _Reader:
    """Reads one chunk of a bucket from another process.

    Args:
        bucket: the bucket.
        chunk: the chunk.
        scratch: two buffers of at least a chunk.
    """

    def __init__(self, bucket: Bucket, chunk: Piece, scratch: np.ndarray):
        parts = np.array(chunk.parts, np.uint64).reshape(-1, 4)
        parts[:, 1:] *= np.uint64(bucket.dtype.itemsize)
        slots, offsets, starts, lengths = parts.T
        self._nbytes = int(lengths.sum())
        self._slots = slots.astype(np.intp)
        self._offsets = offsets
        self._there = np.stack([offsets, lengths], axis=1)
        self._scratch = [buffer[: len(chunk)] for buffer in scratch]
        self._here = [
            np.stack([starts + np.uint64(_address(buffer)), lengths], axis=1) for buffer in scratch
        ]

    def fetch(self, pid: int, addresses: np.ndarray, turn: int) -> np.ndarray:
        """Reads the chunk of a process from the addresses of its arrays."""
        self._there[:, 0] = self._offsets + addresses[self._slots]
        process_vm.read(pid, self._here[turn], self._there, self._nbytes)
        return self._scratch[turn]


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
