"""Reduction of a bucket by the ranks of a node, in shared memory. Independent of MPI.

Every rank copies a small bucket into shared memory and reduces it whole: one rendezvous. Of a large
bucket each rank reduces a slice, in rank order, into a result that all ranks see and read in place.
That is safe: there are several rows for results, and a rank writes to the row of call t again in
call t + 2 at the earliest, which it enters only after all ranks have met in call t + 1, where each
said which results it still holds, see `ResultRows`. If all other rows are held, all ranks copy the
result of call t and meet once more. A result that is read in place starts on a page.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, reduce_each, reduce_into
from keras_dist._engine.buckets import Bucket, BucketRange, aligned, aligned_array, slice_bounds
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.region import Region, held_nbytes
from keras_dist._engine.shm.segments import PAGE
from keras_dist._engine.tracing import spans

SMALL_NBYTES = 128 * 1024  # up to here every rank reduces everything: one rendezvous, not two
CHUNK_NBYTES = 512 * 1024  # reduced at once, while the cache of a core holds it
WHOLE_NBYTES = 32 * 1024  # a part of an array of this size or more is a chunk of its own
RESULTS = 3  # at least: one is held while the next is computed and the one after it is copied in
DONE = b"slices are ready"  # 16 bytes, as a digest
FAILED = b"a slice is not.."
READ = b"results are read"

# Reduces this rank's slice over the nodes, in place, before the other ranks of the node see it.
# Takes the slice and whether it is ready; returns whether it is ready on all nodes.
Finish = Callable[[np.ndarray, bool], bool]


class SliceError(Exception):
    """A rank could not reduce its slice. Raised on every rank of all nodes."""


class Full:
    """Every rank reduces everything; two sets of rows, used in turn, save a rendezvous."""

    def __init__(self, node: Node, bucket: Bucket, op: ReduceOp):
        self._node, self._bucket, self._op = node, bucket, op
        #: size in bytes of a row of its region
        self.capacity = aligned(bucket.nbytes)

    def region_nbytes(self, size: int, capacity: int) -> int:
        """Returns the size in bytes of a region on a node of `size` ranks, of whole pages."""
        return aligned(2 * size * capacity, PAGE)

    def bind(self, region: Region) -> None:
        """Uses a region, whose rows have the `capacity` or more."""
        self.region, size = region, self._node.size
        bucket = self._bucket
        rows = [region.row(number, bucket.count, bucket.dtype) for number in range(2 * size)]
        #: by turn: the contributions of the ranks, and that of this rank
        self.contributions = (rows[:size], rows[size:])
        self.mine = [turn[self._node.rank] for turn in self.contributions]

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        """Makes the arrays of this rank visible to the others, before the rendezvous."""
        self._bucket.pack_into(self.mine[self.region.turn ^ 1], arrays)

    def reduce(self, finish: Finish | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Reduces, after the rendezvous. Collective: every rank of the node."""
        with spans.phase("reduce"):
            if out is None:
                out = aligned_array(self._bucket.count, self._bucket.dtype)
            self.reduce_published(out)
        self.next_turn()
        return out

    def reduce_published(self, result: np.ndarray) -> None:
        """Reduces what the ranks have published into an array; the same again until `next_turn`."""
        reduce_into(result, iter(self.contributions[self.region.turn ^ 1]), self._op)

    def next_turn(self) -> None:
        """Ends the call, after the rendezvous: the turns of the ranks stay equal."""
        self.region.turn ^= 1


class Sliced:
    """Each rank reduces a slice, chunk by chunk, into a result that all ranks see.

    Each rank copies the slices that others reduce into shared memory. The first other contribution
    to a slice is written to the memory of its result and reduced in place, the rest to extra rows.
    For two ranks that is half a copy each, and no rows.

    All slices are copied before any is reduced. Copied and reduced in blocks that stay in cache,
    they would cross the memory bus less often, but a core would fetch lines that another core has
    just written, which took up to twice the time in a training step.
    """

    def __init__(self, node: Node, bucket: Bucket, op: ReduceOp, slices: int, results: int):
        self._node, self._bucket, self._op, self._count = node, bucket, op, results
        bounds = slice_bounds(bucket.count, slices, bucket.dtype.itemsize)
        bounds += [bucket.count] * (node.size - slices)
        self._mine = slice(*bounds[node.rank : node.rank + 2])
        self._chunks = _chunks(bucket, self._mine)
        self._others = [
            (owner, BucketRange(bucket, *ends))
            for owner, ends in enumerate(itertools.pairwise(bounds))
            if owner != node.rank
        ]
        self.capacity = aligned(max(1, bucket.nbytes), PAGE)
        #: number of elements of the slice of this rank
        self.count = self._mine.stop - self._mine.start
        self._turn = self._chosen = 0
        self._scratch = node.scratch(CHUNK_NBYTES).view(bucket.dtype)
        self._arrays: Sequence[np.ndarray] = ()

    def region_nbytes(self, size: int, capacity: int) -> int:
        return held_nbytes(size) + (self._count + max(0, size - 2)) * capacity

    def bind(self, region: Region) -> None:
        self.region, bucket, node = region, self._bucket, self._node
        self._rows = region.results or region.make_results(self._count, node.rank, node.size)
        every = [
            region.row(number, bucket.count, bucket.dtype)
            for number in range(self._rows.count + max(0, node.size - 2))
        ]
        self._results, rows = every[: self._rows.count], every[self._rows.count :]

        def target(owner: int, rank: int, turn: int) -> np.ndarray:
            """Returns the memory to which `rank` copies the slice that `owner` reduces."""
            others_before = rank - (rank > owner)
            return self._results[turn] if others_before == 0 else rows[others_before - 1]

        def others(chunk: BucketRange, turn: int, ranks: Iterable[int]) -> list[np.ndarray]:
            part = slice(chunk.low, chunk.low + len(chunk))
            return [target(node.rank, rank, turn)[part] for rank in ranks]

        before, after = range(node.rank), range(node.rank + 1, node.size)
        # By turn: the slices of other ranks, each with its target; the chunks of this rank, each
        # with the contributions of lower and of higher ranks.
        self._copies, self._parts = [], []
        for turn, result in enumerate(self._results):
            copies = [
                (target(owner, node.rank, turn)[piece.low : piece.low + len(piece)], piece)
                for owner, piece in self._others
            ]
            parts = [
                (
                    result[chunk.low : chunk.low + len(chunk)],
                    others(chunk, turn, before),
                    chunk,
                    others(chunk, turn, after),
                )
                for chunk in self._chunks
            ]
            self._copies.append(copies)
            self._parts.append(parts)

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [array if array.ndim == 1 else array.reshape(-1) for array in arrays]
        for target, piece in self._copies[self._rows.next]:
            piece.pack_into(target, self._arrays)
        self._rows.announce()

    def lend(self) -> np.ndarray | None:
        """Returns the fused result of the last call to read in place, or `None`: copy it."""
        return self._rows.lend(self._bucket.count, self._bucket.dtype)

    def end(self) -> None:
        """Ends a call: this rank has lent or copied its result. Collective on the node."""
        if self._rows.is_crowded:
            with spans.phase("wait for readers"):
                self._node.barrier(READ)

    def reduce(self, finish: Finish | None = None, out: np.ndarray | None = None) -> np.ndarray:
        # After the rendezvous: the ranks choose alike.
        turn = self._rows.advance()
        result = self._results[turn]
        failure = None
        try:
            with spans.phase("reduce"):
                reduce_each(self._pieces(turn, out), self._bucket.dtype, self._op)
        except Exception as error:  # ranks of all nodes wait for this slice
            failure = error
        ready = failure is None
        if finish is not None:
            ready = finish(result[self._mine], ready)
        with spans.phase("wait for slices"):
            same = self._node.barrier(DONE if ready else FAILED)
        self._arrays = ()
        if not (ready and same):
            what = "an error on another rank" if failure is None else repr(failure)
            raise SliceError(what) from failure
        if out is not None:
            with spans.phase("copy out"):
                for rest in (slice(0, self._mine.start), slice(self._mine.stop, None)):
                    out[rest] = result[rest]
        return result

    def reduce_published(self) -> tuple[np.ndarray, np.ndarray]:
        """Reduces the slice of this rank over the node, when all its ranks have published."""
        dtype = self._bucket.dtype
        self._turn, self._chosen = self._rows.next, self._rows.choose()
        if not self.count:
            return np.empty(0, dtype), np.empty(0, dtype)
        sums = self._node.scratch(self.count * dtype.itemsize, "sums").view(dtype)
        reduce_each(self._pieces(self._turn, sums=sums), dtype, self._op)
        return sums, self._results[self._turn][self._mine]

    def take(self) -> np.ndarray:
        """Returns the result, after the ranks have met again: all slices are there."""
        self._arrays = ()
        return self._results[self._rows.follow(self._chosen)]

    def _pieces(
        self, turn: int, out: np.ndarray | None = None, sums: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yields the chunks of this rank: the result, and all contributions in rank order."""
        # The first or second contribution is the memory of the result, which is written after both
        # are read. With `sums` the contributions stay as they are.
        arrays, scratch = self._arrays, self._scratch
        for result, before, chunk, after in self._parts[turn]:
            target = result
            if sums is not None:
                start = chunk.low - self._mine.start
                target = sums[start : start + len(chunk)]
            yield target, [*before, chunk.of(arrays, scratch), *after]
            if out is not None:
                out[chunk.low : chunk.low + len(chunk)] = target


#: The shared memory of one bucket: a call is `publish`, a rendezvous and `reduce`.
BucketReduction = Full | Sliced


def _chunks(bucket: Bucket, part: slice) -> list[BucketRange]:
    """Cuts a slice of a bucket into chunks for the cache of a core; small arrays share one."""
    step, whole = CHUNK_NBYTES // bucket.dtype.itemsize, WHOLE_NBYTES // bucket.dtype.itemsize
    cuts = {part.start, part.stop}
    for slot in bucket.slots:
        low, high = max(slot.offset, part.start), min(slot.offset + slot.count, part.stop)
        # Elements of a large array are a chunk of their own, which is read in place.
        if high - low >= whole:
            cuts.update((low, high))
    return [
        BucketRange(bucket, low, min(low + step, end))
        for begin, end in itertools.pairwise(sorted(cuts))
        for low in range(begin, end, step)
    ]
