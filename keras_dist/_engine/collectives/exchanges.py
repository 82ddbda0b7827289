"""What ranks exchange of compressed gradients: narrow matrices, elements with places, integers.

Error feedback: what a rank has not sent of its gradients, it adds to the next ones. For each
variable, the updates so far and the mean of the errors of all ranks add up to the mean of the
gradients so far. So whatever changes the errors must keep their mean.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import divide
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.rows import Rows, exchange_rows_of_nodes
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.gradient_compression import GradientCompression, PowerSGD
from keras_dist._engine.low_rank import (
    first_basis,
    matrix_shape,
    next_basis,
    orthonormal,
    places_of_largest,
    split,
)
from keras_dist._engine.quantization import add_quantized, packed_nbytes, quantize
from keras_dist._engine.recovery import retried
from keras_dist._engine.signature import CollectiveSignature, Entry

Add = Callable[[Sequence[np.ndarray]], np.ndarray]
Shapes = Sequence[tuple[str, tuple[int, ...]]]
LEAST_COUNT = 1024  # elements: smaller arrays travel whole


@dataclasses.dataclass
class Feedback:
    """What a rank keeps of the gradients of one optimizer, by the key of the variable."""

    step: int = 0  # number of updates; equal on all ranks
    #: flat arrays, what this rank has not sent
    errors: dict[Hashable, np.ndarray] = dataclasses.field(default_factory=dict)
    #: columns onto which the next gradients are projected; equal on all ranks
    bases: dict[Hashable, np.ndarray] = dataclasses.field(default_factory=dict)
    agreed: Any = None  # the ranks that have made sure that the bases are equal
    keys: Sequence[Hashable] = ()  # in the order of all ranks, where plans have some of them each

    def error(self, key: Hashable, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns the error of a variable; zeros if there is none of this size and dtype."""
        found = self.errors.get(key)
        if found is None or found.shape != (count,) or found.dtype != dtype:
            found = self.errors[key] = np.zeros(count, dtype)
        return found

    def give(self, keys: Sequence[Hashable]) -> dict[str, Any]:
        """Returns the state as values to save, by the index of the variable among `keys`."""
        indexed = list(enumerate(keys))
        errors = {index: self.errors[key] for index, key in indexed if key in self.errors}
        bases = {index: self.bases[key] for index, key in indexed if key in self.bases}
        return {"step": self.step, "errors": errors, "bases": bases}

    def take(
        self, keys: Sequence[Hashable], states: Sequence[dict[str, Any]], scale: float
    ) -> None:
        """Takes the states of ranks; the errors of this rank are their sums times `scale`."""
        self.step, self.agreed = states[0]["step"], None
        self.bases = {keys[index]: basis for index, basis in states[0]["bases"].items()}
        self.errors = {}
        for state in states:
            for index, error in state["errors"].items():
                total = self.error(keys[index], error.size, error.dtype)
                total += error * error.dtype.type(scale)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient, by the key of its variable."""

    key: Hashable
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Hashable, int, np.dtype]:
        return self.key, self.count, self.dtype


class LowRankExchange:
    """PowerSGD: one step of the power iteration, which begins where the last one ended.

    Reference:
        Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization", NeurIPS 2019.
    """

    def __init__(
        self,
        members: Sequence[Gradient],
        feedback: Feedback,
        rank: int,
        plan: Callable[[Shapes], Any],
    ):
        self._members, self._feedback = members, feedback
        self._shapes = [matrix_shape(member.shape) for member in members]
        self._ranks = [min(rank, *shape) for shape in self._shapes]
        sizes = [
            (member.name, *shape, columns)
            for member, shape, columns in zip(members, self._shapes, self._ranks, strict=True)
        ]
        self.first: Shapes = [(f"{n}, left factor", (rows, r)) for n, rows, _, r in sizes]
        second = [(f"{n}, right factor", (columns, r)) for n, _, columns, r in sizes]
        self._plan = plan(second)

    def begin(self, totals: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the first message of this rank, of flat gradients with their errors."""
        return [
            total.reshape(shape) @ self._basis(member, shape[1], rank)
            for total, member, shape, rank in zip(
                totals, self._members, self._shapes, self._ranks, strict=True
            )
        ]

    def _basis(self, member: Gradient, columns: int, rank: int) -> np.ndarray:
        found = self._feedback.bases.get(member.key)
        if found is None or found.shape != (columns, rank) or found.dtype != member.dtype:
            found = first_basis(columns, rank, member.dtype)
        return found

    def end(self, totals: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> bool:
        """Makes totals what all apply and sets the errors, unless numbers overflow. Collective."""
        if not _are_finite(received):
            return False
        matrices = [t.reshape(shape) for t, shape in zip(totals, self._shapes, strict=True)]
        lefts = [orthonormal(array) for array in received]
        rights = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        shared = self._plan(rights)
        if not _are_finite(shared):
            return False
        for member, matrix, left, own, right in zip(
            self._members, matrices, lefts, rights, shared, strict=True
        ):
            error = self._feedback.error(*member.place)
            split(matrix, left, own, right, error.reshape(matrix.shape))
            self._feedback.bases[member.key] = next_basis(right, self._feedback.step)
        return True


def _are_finite(arrays: Sequence[np.ndarray]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


class LargestExchange:
    """Top-k: of each gradient the elements of largest magnitude."""

    def __init__(
        self,
        members: Sequence[Gradient],
        feedback: Feedback,
        ratio: float,
        reduce_rows: Callable[..., tuple[np.ndarray, np.ndarray]],
    ):
        self._members, self._feedback, self._reduce_rows = members, feedback, reduce_rows
        self._counts = [max(1, math.ceil(ratio * m.count)) for m in members]
        self._ends = np.cumsum([member.count for member in members])
        self._dtype = np.int32 if sum(m.count for m in members) < 2**31 else np.int64
        self.first: Shapes = ()

    def begin(self, totals: Sequence[np.ndarray]) -> list[np.ndarray]:
        return []

    def end(self, totals: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> bool:
        places = [places_of_largest(t, k) for t, k in zip(totals, self._counts, strict=True)]
        starts = [0, *self._ends[:-1]]
        indices = np.concatenate([p + start for p, start in zip(places, starts, strict=True)])
        values = np.concatenate([t[p] for t, p in zip(totals, places, strict=True)])
        sums, found = self._reduce_rows(values, indices.astype(self._dtype))
        bounds = np.searchsorted(found, [0, *self._ends])
        for number, (member, total) in enumerate(zip(self._members, totals, strict=True)):
            error = self._feedback.error(*member.place)
            np.copyto(error, total)
            error[places[number]] = 0
            part = slice(bounds[number], bounds[number + 1])
            total.fill(0)
            total[found[part] - starts[number]] = sums[part]
        return True


class QuantizedExchange:
    """Each rank sends its integers and scales, and adds up those of all in rank order."""

    def __init__(
        self,
        members: Sequence[Gradient],
        feedback: Feedback,
        bits: int,
        reduce_packed: Callable[[np.ndarray, Add], np.ndarray],
    ):
        self._members, self._feedback, self._bits = members, feedback, bits
        self._reduce_packed = reduce_packed
        sizes = [packed_nbytes(member.count, bits, member.dtype) for member in members]
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        self._bytes = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._count = sum(sizes)
        self.first: Shapes = [("the largest magnitude of gradients", (1,))]

    def begin(self, totals: Sequence[np.ndarray]) -> list[np.ndarray]:
        # What the scales add by rounding is less than a hundredth.
        largest = max(max(total.max(), -total.min()) for total in totals)
        return [np.array([largest * 1.01], totals[0].dtype)]

    def end(self, totals: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> bool:
        if not np.isfinite(received[0]).all():
            return False
        packed = np.empty(self._count, np.uint8)
        for member, total, part in zip(self._members, totals, self._bytes, strict=True):
            quantize(total, self._bits, packed[part])
            error = self._feedback.error(*member.place)
            np.copyto(error, total)
            add_quantized(packed[part], self._bits, error, -1)
        low, sums = 0, self._reduce_packed(packed, self._add)
        for total in totals:
            np.copyto(total, sums[low : low + total.size])
            low += total.size
        return True

    def _add(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the sums of the numbers of ranks, in their order."""
        sums = np.zeros(sum(member.count for member in self._members), self._members[0].dtype)
        low = 0
        for member, part in zip(self._members, self._bytes, strict=True):
            for row in rows:
                add_quantized(row[part], self._bits, sums[low : low + member.count])
            low += member.count
        return sums


@retried
def reduce_packed(comm: Communicator, packed: np.ndarray, averages: bool, add: Add) -> np.ndarray:
    """Returns what `add` makes of the bytes of all ranks but those that have joined. Collective."""
    entry = Entry("quantized gradients", packed.shape, str(packed.dtype))
    rows: Sequence[np.ndarray]
    with comm.lock:
        rendezvous(comm, CollectiveSignature("exchange of gradients", (entry,), spares=True))
        if comm.faults.joined is not None:
            rows = exchange_among(comm, packed)
        else:
            write = functools.partial(np.copyto, src=packed.reshape(1, -1))
            mine = Rows(packed.size, packed.dtype, np.zeros(1, np.int64), write)
            memory, _, places = exchange_rows_of_nodes(comm, mine, [1] * comm.size)
            rows = [memory[at] for at in (range(comm.size) if places is None else places)]
        sums = add(rows)
        if averages and len(rows) > 1:
            divide(sums, len(rows))
    return sums


def is_taken(compression: GradientCompression, gradient: Gradient) -> bool:
    """Returns whether a gradient is compressed: of float32 or float64, and sent in fewer bytes."""
    is_wide = gradient.dtype.kind == "f" and gradient.dtype.itemsize in (4, 8)
    if gradient.key is None or not is_wide:
        return False
    if isinstance(compression, PowerSGD):
        rows, columns = matrix_shape(gradient.shape)
        sent = (rows + columns) * min(compression.rank, rows, columns)
        return sent * compression.min_compression_rate < gradient.count
    return gradient.count >= LEAST_COUNT
