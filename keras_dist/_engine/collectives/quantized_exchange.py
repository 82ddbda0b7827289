"""What ranks exchange of quantized gradients: the integers of each rank, with their scales."""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist._engine.arithmetic import divide
from keras_dist._engine.collectives.exchanges import Feedback, Gradient, Shapes
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.row_exchange import Rows, exchange_rows_of_nodes
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.quantization import add_quantized, packed_nbytes, quantize
from keras_dist._engine.recovery import retried
from keras_dist._engine.signature import CollectiveSignature, Entry

Add = Callable[[Sequence[np.ndarray]], np.ndarray]


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
        self.first: Shapes = [("the largest magnitude of gradients", (1,))] if members else []

    def begin(self, totals: Sequence[np.ndarray]) -> list[np.ndarray]:
        if not totals:
            return []
        # What the scales add by rounding is less than a hundredth.
        largest = max(max(total.max(), -total.min()) for total in totals)
        return [np.array([largest * 1.01], totals[0].dtype)]

    def end(self, totals: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> bool:
        if not totals:
            return True
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
