"""What collectives must return, by numpy: in rank order on each node, then in rounds of nodes."""

import functools

import ml_dtypes
import numpy as np

import keras_dist
from keras_dist._engine.collectives import cross_node

__all__ = ["COMPRESSIONS", "UFUNCS", "Half", "bits", "expected"]

UFUNCS = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class Half(keras_dist.Compressor):
    """float16 of numbers that are multiplied first."""

    def compress(self, array):
        return (array * 64).astype(np.float16)

    def decompress(self, array, dtype):
        return array.astype(dtype) / 64


COMPRESSIONS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, Half(): None}


def expected(call, everyone, nodes, first_added):
    """Returns the results of each rank.

    Args:
        call: the call.
        everyone: the arrays of each rank.
        nodes: ranks of each node.
        first_added: whether contributions are added on each node before they are compressed.
    """
    ranks, operation = range(len(everyone)), call.operation
    if operation == "sparse_allreduce":
        return [summed_rows(call, everyone)] * len(everyone)
    if operation in ("broadcast", "broadcast_"):
        return [everyone[call.root]] * len(everyone)
    columns = [list(column) for column in zip(*everyone, strict=True)]
    if operation in ("allgather", "grouped_allgather"):
        return [[np.concatenate(column) for column in columns]] * len(everyone)
    if operation == "alltoall":
        table = np.array(
            call.splits or [[len(row) // len(ranks)] * len(ranks) for row in columns[0]]
        )
        parts = [
            np.split(row, np.cumsum(counts)) for row, counts in zip(columns[0], table, strict=True)
        ]
        found = [[np.concatenate([part[rank] for part in parts])] for rank in ranks]
        return [
            mine if call.splits is None else [*mine, table[:, rank]]
            for rank, mine in zip(ranks, found, strict=True)
        ]
    scatters = "reducescatter" in operation
    before, after = call.factors
    results = []
    for column in columns:
        rows = [scaled(row, before).reshape(-1) for row in column]
        if call.op == "adasum":
            total = adasum(rows)
        else:
            wire = Wire(call.compression, rows[0], first_added, len(nodes) > 1)
            total = reduced(rows, call.op, [[*ranks]] if scatters else nodes, wire)
        results.append(scaled(total, after).reshape(column[0].shape))
    if not scatters:
        return [results] * len(everyone)
    return [[np.array_split(total, len(ranks))[rank] for total in results] for rank in ranks]


class Wire:
    """How numbers are rounded between nodes."""

    def __init__(self, kind, row, first_added, crosses):
        applies = crosses and row.nbytes > cross_node.SMALL_NBYTES and row.dtype.kind == "f"
        self.kind = kind if applies else "none"
        self.first_added = first_added

    def rounded(self, row):
        if self.kind == "none":
            return row
        if isinstance(self.kind, Half):
            return self.kind.decompress(self.kind.compress(row), row.dtype)
        return row.astype(COMPRESSIONS[self.kind]).astype(row.dtype)


def reduced(rows, op, nodes, wire):
    """Reduces flat arrays in rank order on each node, then the nodes in their rounds."""
    dtype, count = rows[0].dtype, len(rows)
    if op == "average" and dtype.kind in "iu":
        return mean(sum(row.astype(object) for row in rows), count, dtype)
    wide = dtype if dtype.itemsize >= 4 or dtype.kind in "iub" else np.dtype(np.float32)
    rows = [row.astype(wide) for row in rows]
    if not wire.first_added:
        rows = [wire.rounded(row) for row in rows]
    sums = [functools.reduce(UFUNCS[op], [rows[rank] for rank in ranks]) for ranks in nodes]
    if wire.first_added:
        sums = [wire.rounded(row) for row in sums]
    while len(sums) > 1:  # neighbours, at first as many as leave a power of two
        paired = 2 * (len(sums) - 2 ** (len(sums).bit_length() - 1)) or len(sums)
        sums = [*map(UFUNCS[op], sums[:paired:2], sums[1:paired:2]), *sums[paired:]]
    total = sums[0] / wide.type(count) if op == "average" else sums[0]
    return wire.rounded(total).astype(dtype)


def mean(total, count, dtype):
    """Divides Python's integers, and truncates towards zero; what does not fit wraps around."""
    quotients = [abs(each) // count * (1 if each > 0 else -1) for each in total.reshape(-1)]
    wrapped = np.array([each % 2**64 for each in quotients], np.uint64)
    return wrapped.reshape(total.shape).astype(dtype)


def scaled(array, factor):
    if factor == 1:
        return array
    if array.dtype.kind in "iu":
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    wide = np.dtype(np.float32) if array.dtype.itemsize < 4 else array.dtype
    return (array.astype(wide) * wide.type(factor)).astype(array.dtype)


def summed_rows(call, everyone):
    """Adds up rows of equal index: those of a rank, then those of the ranks in rank order."""
    places = np.unique(np.concatenate([indices for _, indices in everyone]))
    dtype, shape = everyone[0][0].dtype, everyone[0][0].shape[1:]
    if call.op == "average" and dtype.kind in "iu":
        wide = np.dtype(object)
    else:
        wide = dtype if dtype.itemsize >= 4 or dtype.kind in "iu" else np.dtype(np.float32)
    total = np.zeros((len(places), *shape), wide)
    for rows, indices in everyone:
        mine = np.zeros_like(total)
        np.add.at(mine, np.searchsorted(places, indices), rows.astype(wide))
        here = np.isin(places, indices)
        total[here] = total[here] + mine[here]
    if wide.hasobject:
        return [mean(total, len(everyone), dtype), places]
    if call.op == "average":
        total = total / wide.type(len(everyone))
    return [total.astype(dtype), places]


def adasum(rows):
    """Combines pairs, then pairs of pairs; a dot product is a sum over the parts of the ranks."""
    size, vectors = len(rows), [row.astype(np.float64) for row in rows]

    def dot(a, b):
        parts = zip(np.array_split(a, size), np.array_split(b, size), strict=True)
        return functools.reduce(np.add, [(x * y).sum() for x, y in parts], np.float64(0))

    def pair(a, b):
        ab, squares = dot(a, b), (dot(a, a), dot(b, b))
        left, right = [1 - ab / (2 * each) if each else 1.0 for each in squares]
        return left * a + right * b

    while len(vectors) > 1:
        vectors = [*map(pair, vectors[::2], vectors[1::2])]
    return vectors[0].astype(rows[0].dtype)


def bits(array):
    """Returns what must be equal: every NaN counts as the same."""
    flat = np.array(array, order="C").reshape(-1)
    parts = flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
    if parts.dtype.kind in "fV":
        parts = np.where(np.isnan(parts), parts.dtype.type(np.nan), parts)
    raw = parts.view(np.uint8).reshape(-1, parts.itemsize)
    if parts.dtype == np.longdouble and parts.itemsize == 16:
        raw = raw[:, :10]  # the others are not part of the number
    return array.dtype, array.shape, raw.tobytes()
