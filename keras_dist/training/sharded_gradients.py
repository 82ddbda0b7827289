"""ZeRO-2: each rank keeps its parts of the reduced gradients, and frees the whole ones.

Gradients are cut into pieces, which fill small buckets. A bucket is reduced as soon as
backpropagation has produced its pieces; a rank keeps what belongs to its slices and drops the rest.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.ops.gradient_plans import SAME_MODEL
from keras_dist.ops.reduction_options import ReductionOptions

# The whole gradients in memory are those of a bucket, besides the one that is computed.
BUCKET_NBYTES = 2**19
REDUCTION = "the reduction of sharded gradients"


class GradientSlices:
    """Reduces gradients as they come, and keeps the parts of this rank.

    Args:
        shapes: their shapes, by index.
    """

    def __init__(
        self,
        comm: _engine.Communicator,
        names: Mapping[int, str],
        shapes: Mapping[int, tuple[int, ...]],
        dtypes: Mapping[int, np.dtype],
        parts: Mapping[int, slice],
        options: ReductionOptions,
    ):
        self._names, self._parts = names, parts
        #: of each piece, in the order of backpropagation: index of the variable, first element, end
        self._pieces = [
            (index, *bounds)
            for index in reversed(list(shapes))
            for bounds in _pieces(math.prod(shapes[index]), dtypes[index].itemsize)
        ]
        self._plan = _plan(
            comm,
            [names[index] for index, _, _ in self._pieces],
            [((end - low,), dtypes[index]) for index, low, end in self._pieces],
            options,
        )
        self._members = [[slot.index for slot in b.slots] for b in self._plan.buckets]
        self._kept = {i: np.zeros(p.stop - p.start, dtypes[i]) for i, p in parts.items()}
        self._reset()

    def _reset(self) -> None:
        self._ready: dict[int, np.ndarray] = {}  # flat gradients by index
        self._left: dict[int, int] = {}  # pieces of them that are not reduced yet
        self._done = 0  # buckets that are reduced

    def has(self, index: int) -> bool:
        """Returns whether the gradient of a variable has been added since the last update."""
        return index in self._left

    def add(self, index: int, gradient: np.ndarray) -> None:
        """Adds a gradient of this rank, and reduces the buckets that it completes.

        Collective: the ranks, as soon as each has added the gradients of a bucket; blocks.
        """
        if self.has(index):
            received = f"a second gradient of {self._names[index]}"
            remedy = "Make one backward pass in a step, or omit shard_gradients."
            raise _error("one gradient of each variable in an update", received, remedy)
        self._ready[index] = gradient.reshape(-1)
        self._left[index] = sum(1 for piece in self._pieces if piece[0] == index)
        while self._done < len(self._members) and self._is_complete(self._members[self._done]):
            self._reduce(self._done)
            self._done += 1

    def take(self) -> dict[int, np.ndarray]:
        """Returns the reduced parts of this rank by index, for one update.

        They may be read until the next gradient is added.
        """
        missing = [name for index, name in self._names.items() if not self.has(index)]
        self._reset()
        if missing:
            remedy = "Set trainable=False for variables without gradient, or omit shard_gradients."
            error = _error("a gradient of each variable", f"none of {missing[0]}", remedy)
            # Ranks that have the gradient wait for this one.
            _engine.collectives.report_error(self._plan.comm, REDUCTION, error)
            raise error
        return self._kept

    @property
    def nbytes(self) -> int:
        """Size in bytes of what stays between updates, with the shared memory of all ranks."""
        kept = sum(part.nbytes for part in self._kept.values())
        return kept + self._plan.comm.regions.nbytes

    def _is_complete(self, members: Sequence[int]) -> bool:
        return all(self._pieces[member][0] in self._ready for member in members)

    def _reduce(self, number: int) -> None:
        """Reduces a bucket and copies what this rank keeps."""
        pieces = [self._pieces[member] for member in self._members[number]]
        arrays = [self._ready[index][low:end] for index, low, end in pieces]
        for (index, low, end), result in zip(
            pieces, self._plan.reduce_bucket(number, arrays), strict=True
        ):
            part = self._parts[index]
            first, last = max(low, part.start), min(end, part.stop)
            if first < last:
                kept = self._kept[index][first - part.start : last - part.start]
                kept[...] = result[first - low : last - low]
            self._left[index] -= 1
            if not self._left[index]:
                del self._ready[index]


def _pieces(count: int, itemsize: int) -> list[tuple[int, int]]:
    """Returns the first element and the end of each piece of a gradient."""
    step = BUCKET_NBYTES // itemsize
    return [(low, min(low + step, count)) for low in range(0, count, step)] or [(0, 0)]


def _plan(
    comm: _engine.Communicator,
    names: Sequence[str],
    specs: Sequence[tuple[tuple[int, ...], np.dtype]],
    options: ReductionOptions,
) -> _engine.FusedAllreduce:
    op, prescale, postscale = options.scaling(comm.size)
    plan = _engine.BucketOptions(
        BUCKET_NBYTES,
        operation=REDUCTION,
        remedy=SAME_MODEL,
        lend=True,
        counts_updates=True,
        divides=op is not options.op,
        ranks=options.ranks,
        pooled=True,  # all buckets share memory, in turn
    )
    return _engine.FusedAllreduce(
        comm, names, specs, _engine.OpOptions(op, prescale=prescale, postscale=postscale), plan
    )


def _error(expected: str, received: str, remedy: str) -> errors.BackendError:
    where = runtime.where()
    return errors.BackendError(where, f"{expected}, with shard_gradients=True", received, remedy)
