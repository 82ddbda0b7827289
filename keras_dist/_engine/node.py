"""The ranks of one node, reducing in shared memory. Knows no MPI.

Two ways lead the contributions in. Where the kernel lets ranks read each other's memory,
each rank reads its slice of every contribution where it lies, in chunks that stay in cache,
and nothing is copied first. Elsewhere each rank copies its contribution into shared memory,
which also fuses it. Either way each rank reduces its slice in rank order and writes it to a
result that all ranks see and read in place.

Why the result can be read in place. There are two results, used in turn. A rank writes to
the result of call t only after the ranks have met in call t + 2, and a rank comes to that
meeting only when it has entered call t + 2, that is, after the code behind its call t and
call t + 1 has run. So the result of call t stays as it is until this rank itself calls for
the second time from there; the same holds for calls on other buckets in between.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_dist._engine import peers
from keras_dist._engine.buckets import ALIGNMENT, Bucket
from keras_dist._engine.reduce import ReduceOp, reduce_into
from keras_dist._engine.shared import MeetingPlace, Segment, clean_up, make_segment

__all__ = ["BucketReduction", "Node", "join_node"]

CHUNK_NBYTES = 256 * 1024  # two of them and a result stay in a core's cache
SMALL_NBYTES = 128 * 1024  # up to here every rank reduces everything: one meeting, not two
IN_PLACE_NBYTES = 4 * 2**20  # from here on a copy costs more than asking the kernel
DONE = b"slices are ready"  # 16 bytes, as a digest
FAILED = b"a slice is not.."


class Node:
    """The ranks of a node, their meeting place and the way in which they reduce.

    Args:
        rank: this rank on the node.
        size: the number of ranks on the node.
        share: gives every rank's object to all ranks of the node, in rank order.
        place: where they meet.
        in_place: whether contributions are read where they lie.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        share: Callable[[Any], list[Any]],
        place: MeetingPlace,
        in_place: bool,
    ):
        self.rank = rank
        self.size = size
        self.share = share
        self.meet = place.meet
        self.in_place = in_place
        self.pids = share(os.getpid())

    def segment(self, nbytes: int) -> tuple[Segment | None, str | None]:
        """Makes a segment for all ranks of the node. Collective. See `make_segment`."""
        return make_segment(nbytes, self.rank, self.share)


def join_node(
    rank: int, size: int, share: Callable[[Any], list[Any]], copy: bool
) -> tuple[Node | None, str | None]:
    """Brings the ranks of a node together in shared memory.

    Collective: every rank of the node.

    Args:
        rank: this rank on the node.
        size: the number of ranks on the node.
        share: gives every rank's object to all ranks of the node, in rank order.
        copy: whether to copy contributions even where they could be read in place.

    Returns:
        The node and `None`; or `None` and the reason why there is no shared memory.
    """
    clean_up()
    segment, trouble = make_segment(MeetingPlace.nbytes_for(size), rank, share)
    if segment is None:
        return None, trouble
    in_place = not copy and peers.can_read_all(share)
    return Node(rank, size, share, MeetingPlace(segment, rank, size), in_place), None


class BucketReduction:
    """The shared memory of one bucket, and the arithmetic in it.

    A call is `publish`, a meeting and `reduce`; `FusedAllreduce` puts them together.

    Args:
        node: the ranks.
        bucket: the bucket.
        op: the reduction.
    """

    def __init__(self, node: Node, bucket: Bucket, op: ReduceOp):
        self._node = node
        self._bucket = bucket
        self._op = op
        self._turn = 0
        self._layout = _Layout(node, bucket)
        self._arrays: list[np.ndarray] = []

    @property
    def is_shared(self) -> bool:
        """Whether the result of `reduce` lies in memory that all ranks share."""
        return not self._layout.small

    @property
    def is_wide_float(self) -> bool:
        """Whether the bucket holds real or complex numbers of 32 bits or more."""
        return self._bucket.dtype.kind in "fc" and self._bucket.dtype.itemsize >= 4

    @property
    def nbytes(self) -> int:
        """How much shared memory it takes, in bytes, for all ranks together."""
        return self._layout.nbytes

    def settle(self, segment: Segment, offset: int) -> None:
        """Takes its place in a segment, `offset` bytes from its start."""
        dtype, count, size = self._bucket.dtype, self._bucket.count, self._node.size
        layout = self._layout
        self._rows = [
            [segment.array(offset + layout.row(turn, rank), count, dtype) for rank in range(size)]
            for turn in range(layout.turns_of_rows)
        ]
        self._results = [
            segment.array(offset + layout.result(turn), count, dtype)
            for turn in range(layout.results)
        ]
        bounds = _slice_bounds(count, size, dtype.itemsize)
        self._start, self._stop = start, stop = bounds[self._node.rank : self._node.rank + 2]
        step = CHUNK_NBYTES // dtype.itemsize
        self._chunks = [(low, min(low + step, stop)) for low in range(start, stop, step)]
        if layout.in_place:
            slots = len(self._bucket.slots)
            table = segment.array(offset + layout.table, size * slots, np.dtype(np.uint64))
            self._addresses = table.reshape(size, slots)
            self._scratch = [np.empty(step, dtype) for _ in range(3)]
            self._pieces = [_Pieces(self._bucket, *chunk, self._scratch) for chunk in self._chunks]

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        """Makes this rank's arrays visible to the others, before the ranks meet."""
        if self._layout.in_place:
            # Kept until all have read them: `reduce` lets go of them.
            self._arrays = [np.ascontiguousarray(array) for array in arrays]
            self._addresses[self._node.rank] = [_address(array) for array in self._arrays]
        else:
            self._bucket.pack_into(self._row(self._node.rank, self._turn ^ 1), arrays)

    def reduce(self, finish: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
        """Reduces, after the ranks have met. Collective: every rank of the node.

        Args:
            finish: what is left to do, in place, with this rank's slice of the result
                before the others see it. Defaults to nothing.

        Returns:
            The fused result: this rank's own when the bucket is small, else shared memory
            that holds until the second call from here.

        Raises:
            OSError: another rank's memory could not be read; raised on every rank.
        """
        # Only now, when all have come for the same call: the turns of the ranks stay equal.
        self._turn ^= 1
        if self._layout.small:
            result = np.empty(self._bucket.count, self._bucket.dtype)
            reduce_into(
                result, (self._row(rank, self._turn) for rank in range(self._node.size)), self._op
            )
            return result
        result = self._results[self._turn]
        trouble = None
        try:
            for number, (low, high) in enumerate(self._chunks):
                reduce_into(result[low:high], self._parts(number, low, high), self._op)
            if finish is not None:
                finish(result[self._start : self._stop])
        except OSError as error:
            trouble = error
        together = self._node.meet(DONE if trouble is None else FAILED)
        self._arrays = []
        if trouble is not None:
            raise trouble
        if not together:
            raise OSError("another rank of this node could not read its peers' memory")
        return result

    def _row(self, rank: int, turn: int) -> np.ndarray:
        return self._rows[turn % len(self._rows)][rank]

    def _parts(self, number: int, low: int, high: int) -> Iterator[np.ndarray]:
        """Yields a chunk of the contributions, in rank order."""
        for rank in range(self._node.size):
            if not self._layout.in_place:
                yield self._row(rank, self._turn)[low:high]
            elif rank == self._node.rank:
                yield self._pieces[number].own(self._arrays)
            else:
                yield self._pieces[number].fetch(
                    self._node.pids[rank], self._addresses[rank], self._scratch[rank % 2]
                )


class _Pieces:
    """The pieces of arrays that make up one chunk of a fused bucket.

    Args:
        bucket: the bucket.
        low: the first element of the chunk.
        high: the element behind its last.
        scratch: buffers of at least a chunk: two for others' pieces, one for the own.
    """

    def __init__(self, bucket: Bucket, low: int, high: int, scratch: Sequence[np.ndarray]):
        itemsize = bucket.dtype.itemsize
        self._count = high - low
        self._own = scratch[2]
        self._places = []  # slot, start in the array, start in the chunk, count
        for number, slot in enumerate(bucket.slots):
            begin, end = max(slot.offset, low), min(slot.offset + slot.count, high)
            if begin < end:
                self._places.append((number, begin - slot.offset, begin - low, end - begin))
        places = np.array(self._places, np.uint64).reshape(-1, 4)
        lengths = places[:, 3] * np.uint64(itemsize)
        self._nbytes = int(lengths.sum())
        self._slots = places[:, 0].astype(np.intp)
        self._offsets = places[:, 1] * np.uint64(itemsize)
        self._there = np.stack([self._offsets, lengths], axis=1)
        starts = places[:, 2] * np.uint64(itemsize)
        self._here = {
            id(buffer): np.stack([starts + np.uint64(_address(buffer)), lengths], axis=1)
            for buffer in scratch[:2]
        }

    def own(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the chunk of this rank's own arrays; a view when it lies in one of them."""
        if len(self._places) == 1 and self._places[0][3] == self._count:
            number, begin, _, count = self._places[0]
            return arrays[number].reshape(-1)[begin : begin + count]
        for number, begin, at, count in self._places:
            self._own[at : at + count] = arrays[number].reshape(-1)[begin : begin + count]
        return self._own[: self._count]

    def fetch(self, pid: int, addresses: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        """Reads the chunk of another rank, whose arrays lie at `addresses`, into `scratch`."""
        self._there[:, 0] = self._offsets + addresses[self._slots]
        peers.read(pid, self._here[id(scratch)], self._there, self._nbytes)
        return scratch[: self._count]


class _Layout:
    """Where the rows, the results and the addresses of a bucket lie, in bytes."""

    def __init__(self, node: Node, bucket: Bucket):
        nbytes = bucket.count * bucket.dtype.itemsize
        self.small = nbytes <= SMALL_NBYTES
        self.in_place = node.in_place and nbytes >= IN_PLACE_NBYTES
        self.turns_of_rows = 2 if self.small else 0 if self.in_place else 1
        self.results = 0 if self.small else 2
        self._stride = _aligned(nbytes)
        self._size = node.size
        self.table = self.result(self.results)
        table_nbytes = node.size * len(bucket.slots) * 8 if self.in_place else 0
        self.nbytes = self.table + _aligned(table_nbytes)

    def row(self, turn: int, rank: int) -> int:
        return (turn * self._size + rank) * self._stride

    def result(self, turn: int) -> int:
        return (self.turns_of_rows * self._size + turn) * self._stride


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _slice_bounds(count: int, size: int, itemsize: int) -> list[int]:
    """Returns where the slices of the ranks begin and end, on cache lines."""
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-count // step)
    return [min(count, lines * rank // size * step) for rank in range(size + 1)]
