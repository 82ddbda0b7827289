"""The arithmetic of a reduction: op x dtype. Pure numpy, independent of MPI.

Contributions are combined in the order of the ranks, and those of nodes in the order of their
rounds, so equal inputs give equal bits on every rank and in every run. Floats narrower than 32 bits
are summed in float32 and rounded once, at the end.
"""

import contextvars
import enum
import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from keras_dist import errors


class ReduceOp(enum.Enum):
    """How the contributions of the ranks are reduced to one value.

    `AVERAGE` is the sum divided by the number of ranks; for integers it is exact, whatever
    their sum, and truncated towards zero. `PRODUCT`, `MIN` and `MAX` work element by element; on
    booleans they are "and", "and", "or". `ADASUM` works on whole vectors, see
    `keras_dist._engine.collectives.adasum`.
    """

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


_BY_NAME = {member.value: member for member in ReduceOp}

#: writes the reduction of arrays of equal shape, one for each rank, into the first argument
Reducer = Callable[[np.ndarray, Iterable[np.ndarray]], None]

_UFUNCS = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def parse_op(op: ReduceOp | str, where: str = "[keras_dist]") -> ReduceOp:
    """Returns the reduction of a user's argument."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.lower() in _BY_NAME:
        return _BY_NAME[op.lower()]
    raise errors.ArgumentError(
        where,
        f"op to be one of {', '.join(_BY_NAME)}",
        repr(op),
        "Use keras_dist.Average, Sum, Min, Max, Product or Adasum; a name is passed as name=.",
    )


def parse_factor(factor: Any, label: str, where: str) -> float:
    """Returns a factor of a user's argument."""
    if type(factor) is float and math.isfinite(factor):
        return factor
    expected, remedy = f"{label} to be a finite number", "Pass a float; 1.0 changes nothing."
    number = factor.item() if isinstance(factor, np.ndarray) and factor.ndim == 0 else factor
    if not isinstance(number, numbers.Real):
        received = f"{factor!r} of type {type(factor).__name__}"
        raise errors.ArgumentTypeError(where, expected, received, remedy)
    if not math.isfinite(number):
        raise errors.ArgumentError(where, expected, repr(factor), remedy)
    return float(number)


def check_factors(
    dtype: np.dtype, prescale: float, postscale: float, where: str, name: str
) -> None:
    """Checks that an array can be multiplied by the factors; booleans cannot."""
    if prescale == postscale == 1 or ReduceOp.SUM in _ops_of(dtype):
        return
    raise errors.ArgumentTypeError(
        where,
        f"{name} to have a dtype that prescale_factor and postscale_factor can multiply",
        str(dtype),
        "Cast it first, for example to float32 or int64.",
    )


def scaled(array: np.ndarray, factor: float) -> np.ndarray:
    """Multiplies by a factor: integers in float64, truncated, narrow floats in float32."""
    if factor == 1:
        return array
    if np.issubdtype(array.dtype, np.integer):
        wide = np.dtype(np.float64)
    else:
        wide = accumulator(array.dtype, ReduceOp.SUM)
    # Overflow is the caller's to judge, as in a sum.
    with np.errstate(all="ignore"):
        product = np.multiply(array.astype(wide, copy=False), wide.type(factor))
        return np.asarray(product).astype(array.dtype, copy=False)


def check_dtype(dtype: np.dtype, op: ReduceOp, where: str, name: str) -> None:
    """Checks that `op` is defined for `dtype`."""
    if op in _ops_of(dtype):
        return
    raise errors.ArgumentTypeError(
        where,
        f"{name} to have a dtype that {op.value} is defined for",
        str(dtype),
        "Cast it first, for example to float32 or int64.",
    )


def check_sum(op: ReduceOp, where: str, operation: str, remedy: str) -> None:
    """Checks that a reduction is a sum or an average."""
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        expected = f"op to be Average or Sum in {operation}"
        raise errors.ArgumentError(where, expected, op.value, remedy)


def reduce_rows(rows: np.ndarray, op: ReduceOp) -> np.ndarray:
    """Reduces the first axis, which has the contributions in rank order."""
    result = np.empty(rows.shape[1:], rows.dtype)
    reduce_into(result, rows, op)
    return result


def reduce_into(result: np.ndarray, parts: Iterable[np.ndarray], op: ReduceOp) -> None:
    """Reduces flat arrays in rank order, of which at most two are used at a time, into another."""
    # All reductions of the engine use it, so all give the same bits.
    reduce_each([(result, parts)], result.dtype, op)


def reduce_each(
    pieces: Iterable[tuple[np.ndarray, Iterable[np.ndarray]]], dtype: np.dtype, op: ReduceOp
) -> None:
    """Runs `reduce_into` for several results."""
    reduce = reducer(dtype, op)
    # Infinities and overflow are the caller's to judge: they reach every rank alike.
    with np.errstate(all="ignore"):
        for result, parts in pieces:
            reduce(result, parts)


@functools.cache
def reducer(dtype: np.dtype, op: ReduceOp) -> Reducer:
    """Returns `reduce_into` for a dtype and a reduction, which may warn of infinities."""
    ufunc, wide = _UFUNCS[op], accumulator(dtype, op)
    narrow, averages = wide != dtype, op is ReduceOp.AVERAGE

    def reduce_halves(result: np.ndarray, parts: Iterable[np.ndarray]) -> None:
        result[...] = _integer_mean(parts)

    def reduce(result: np.ndarray, parts: Iterable[np.ndarray]) -> None:
        total = np.empty(result.shape, wide) if narrow else result
        each = (part.astype(wide) for part in parts) if narrow else iter(parts)
        left, count = next(each), 1
        for part in each:
            ufunc(left, part, out=total)
            left, count = total, count + 1
        if left is not total:
            total[...] = left
        if averages and count > 1:
            divide(total, count)
        if narrow:
            result[...] = total.astype(dtype)

    return reduce_halves if needs_halves(dtype, op) else reduce


def combine(left: np.ndarray, right: np.ndarray, op: ReduceOp, out: np.ndarray) -> None:
    """Combines two contributions whose dtype is that of the accumulator."""
    with np.errstate(all="ignore"):
        combine_into(left, right, op, out)


def combine_into(left: np.ndarray, right: np.ndarray, op: ReduceOp, out: np.ndarray) -> None:
    """Does what `combine` does, and may warn of infinities."""
    if out.size > 1:
        _UFUNCS[op](left, right, out=out)
    else:
        # Of one element in place numpy may swap the operands, and the sign of NaN is that of one.
        out[...] = _UFUNCS[op](left, right)


def divide(total: np.ndarray, count: int) -> None:
    """Divides a sum by the number of its contributions, in place. Never warns or raises."""
    # A rank may divide only a part of the sum, so that an error would not be that of all ranks.
    with np.errstate(all="ignore"):
        if total.dtype.kind in "iu":
            # Without float64, which would lose bits beyond 2**53.
            magnitude = np.abs(total) // np.asarray(count, total.dtype)
            total[...] = np.where(total < 0, -magnitude, magnitude)
        elif count & (count - 1) == 0:
            # The bits of a division, in half its time.
            np.multiply(total, total.dtype.type(1 / count), out=total)
        else:
            np.divide(total, total.dtype.type(count), out=total)


def needs_halves(dtype: np.dtype, op: ReduceOp) -> bool:
    """Returns whether a reduction adds up integers whose sum may fit no dtype."""
    return op is ReduceOp.AVERAGE and dtype.kind in "iu" and dtype.itemsize == 8


def halves(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits integers of 64 bits into an upper and a lower half, whose sums do not overflow."""
    return numbers >> numbers.dtype.type(32), numbers & numbers.dtype.type(2**32 - 1)


def mean_of_halves(high: np.ndarray, low: np.ndarray, count: int) -> np.ndarray:
    """Divides a sum of integers by a count, exactly, and truncates towards zero."""
    number = high.dtype.type
    upper, rest = np.divmod(high, number(count))
    lower, rest = np.divmod((rest << number(32)) + low, number(count))
    floor = (upper << number(32)) + lower
    return floor + ((floor < 0) & (rest > 0)).astype(floor.dtype)


def _integer_mean(parts: Iterable[np.ndarray]) -> np.ndarray:
    each = iter(parts)
    (high, low), count = halves(next(each)), 1
    for part in each:
        for total, half in zip((high, low), halves(part), strict=True):
            total += half
        count += 1
    return mean_of_halves(high, low, count)


@functools.cache
def accumulator(dtype: np.dtype, op: ReduceOp) -> np.dtype:
    """Returns the dtype in which contributions of `dtype` are combined."""
    if _is_float(dtype):
        return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
    if op is ReduceOp.AVERAGE and np.issubdtype(dtype, np.integer):
        return np.dtype(np.uint64 if np.issubdtype(dtype, np.unsignedinteger) else np.int64)
    return dtype


def is_own_accumulator(dtype: np.dtype, op: ReduceOp) -> bool:
    """Returns whether a reduction needs neither a wider dtype nor halves."""
    return accumulator(dtype, op) == dtype and not needs_halves(dtype, op)


@functools.cache
def _ops_of(dtype: np.dtype) -> frozenset[ReduceOp]:
    everything = frozenset(ReduceOp) - {ReduceOp.ADASUM}
    if dtype == np.bool_:
        return everything - {ReduceOp.SUM, ReduceOp.AVERAGE}
    if np.issubdtype(dtype, np.complexfloating):
        return everything - {ReduceOp.MIN, ReduceOp.MAX}
    if np.issubdtype(dtype, np.integer):
        return everything
    if _is_float(dtype):
        return frozenset(ReduceOp)
    return frozenset()


def _is_float(dtype: np.dtype) -> bool:
    """Returns whether a dtype is a float of numpy or of an extension, such as bfloat16."""
    if np.issubdtype(dtype, np.floating):
        return True
    # An extension float (ml_dtypes) has kind "V" or "f" and can be cast to float32.
    return dtype.kind in "Vf" and dtype.fields is None and dtype.isbuiltin == 2


def silencer() -> Callable[..., None]:
    """Returns a function that calls another, without warnings of numpy. One thread at a time."""
    # Infinities are the caller's to judge, as they reach every rank alike. A context in which numpy
    # is silent takes a tenth of the time of `numpy.errstate`.
    if int(np.__version__.partition(".")[0]) >= 2:  # its settings are those of a context
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        return context.run

    def run(function: Callable[..., None], *arguments: Any) -> None:
        with np.errstate(all="ignore"):
            function(*arguments)

    return run
