"""Mean and variance of the data of all ranks, for `Normalization`.

Each rank merges the moments of its batches in float64; the moments of all ranks are merged in rank
order, so that all have the same bits.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_dist import _engine
from keras_dist.training.adapt_errors import on_every_rank, refused

CHUNK = 1 << 20  # elements of an array that are converted to float64 at a time


class _Moments(NamedTuple):
    """Number of values, mean and sum of the squared deviations from it."""

    number: int
    mean: Any
    squares: Any


def adapt_moments(
    layer: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator
) -> None:
    """Adapts a `Normalization`. Collective: every rank; blocks. See `adapt`."""
    with on_every_rank(comm, layer):
        if options or layer.input_mean is not None:
            received = f"options {sorted(options)}" if options else "one made with mean="
            raise refused(
                layer, "a Normalization without mean and variance, and no options", received
            )
        batches = _batches_of(layer, data)
        first = next(batches, None)
        shape = None if first is None else first.shape
    shapes = _engine.collectives.allgather_object(comm, shape, operation="the shapes of data")
    with on_every_rank(comm, layer):
        kept, reduced = _axes(layer, shapes)
        mine = _Moments(0, 0.0, 0.0)
        if first is not None:
            every = _chunks(first, 0 in reduced, batches)
            mine = functools.reduce(_merge, (_moments(batch, reduced) for batch in every), mine)
    parts = _engine.collectives.allgather_object(comm, mine, operation="the moments of data")
    total = functools.reduce(_merge, parts)
    if total.number == 0:
        raise refused(layer, "data on a rank", "none on any rank")
    if not layer.built:
        known = next(shape for shape in shapes if shape is not None)
        layer.build(tuple(n if axis in kept else None for axis, n in enumerate(known)))
    layer.adapt_mean.assign(total.mean)
    layer.adapt_variance.assign(total.squares / total.number)
    layer.finalize_state()


def is_array(data: Any) -> bool:
    """Returns whether data is one array or tensor, not batches."""
    return hasattr(data, "__array__") and hasattr(data, "shape")


def as_numpy(value: Any) -> np.ndarray:
    """Returns an array or tensor as a numpy array."""
    tensor = keras.ops.is_tensor(value)
    return np.asarray(keras.ops.convert_to_numpy(value) if tensor else value)


def _batches_of(layer: Any, data: Any) -> Iterator[np.ndarray]:
    """Yields the inputs of batches, as `Normalization.adapt` takes data."""
    if data is None:
        return
    if is_array(data):
        yield as_numpy(data)
        return
    spec = getattr(data, "element_spec", None)
    inputs = spec[0] if isinstance(spec, tuple) else spec
    is_sample = inputs is not None and len(inputs.shape) == 1  # of a dataset that is not batched
    if isinstance(data, keras.utils.PyDataset):
        data = (data[number] for number in range(len(data)))
    for batch in data:
        array = as_numpy(batch[0] if isinstance(batch, tuple) else batch)
        if array.ndim == 0:
            raise refused(layer, "batches of data", "a number")
        yield array[None] if is_sample else array


def _axes(
    layer: Any, shapes: Sequence[tuple[int, ...] | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes that have moments of their own, and those that are reduced.

    Args:
        shapes: the shape of the first batch of each rank; `None` if it has no data.
    """
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return (), ()
    ndim = len(known[0])
    if any(not -ndim <= axis < ndim for axis in layer.axis):
        raise refused(layer, f"data with the axes {layer.axis}", f"shape {known[0]}")
    kept = tuple(sorted(axis % ndim for axis in layer.axis))
    sizes = {(len(shape), *(shape[axis] for axis in kept if axis < len(shape))) for shape in known}
    if layer.built:
        sizes.add((ndim, *layer.adapt_mean.shape))
    if len(sizes) > 1:
        received = f"shapes {known}"
        raise refused(
            layer, f"equal sizes of the axes {kept} on all ranks and in the layer", received
        )
    return kept, tuple(axis for axis in range(ndim) if axis not in kept)


def _chunks(first: np.ndarray, by_rows: bool, others: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields batches, large ones in groups of rows."""
    for batch in itertools.chain([first], others):
        rows = max(1, CHUNK * len(batch) // max(batch.size, 1)) if by_rows else len(batch)
        for row in range(0, len(batch), rows or 1):
            yield batch[row : row + rows]


def _moments(batch: np.ndarray, reduced: tuple[int, ...]) -> _Moments:
    values = batch.astype(np.float64)
    count = math.prod(values.shape[axis] for axis in reduced) if values.size else 0
    if count == 0:
        return _Moments(0, 0.0, 0.0)
    mean = values.mean(axis=reduced, keepdims=True)
    squares = np.square(values - mean).sum(axis=reduced)
    return _Moments(count, mean.reshape(squares.shape), squares)


def _merge(one: _Moments, other: _Moments) -> _Moments:
    if one.number == 0 or other.number == 0:
        return other if one.number == 0 else one
    if one.mean.shape != other.mean.shape:
        raise ValueError(f"batches with moments of shapes {one.mean.shape} and {other.mean.shape}")
    count, apart = one.number + other.number, other.mean - one.mean
    squares = one.squares + other.squares + apart**2 * (one.number * other.number / count)
    return _Moments(count, one.mean + apart * (other.number / count), squares)
