"""`adapt` for numbers: moments for `Normalization`, boundaries of bins for `Discretization`.

Moments are merged in float64 and in rank order, so that all ranks have the same bits. Keras'
boundaries depend on how values are summarized: the ranks join their arrays, or each batch.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_dist import _engine, errors

CHUNK = 1 << 20  # elements of an array that are converted to float64 at a time


def refused(layer: Any, expected: str, received: str) -> errors.ArgumentError:
    """Returns the error about a layer or its data."""
    remedy = f"Pass data as for {type(layer).__name__}.adapt, and None on ranks without data."
    return errors.ArgumentError(expected, received, remedy)


@contextlib.contextmanager
def on_every_rank(comm: _engine.Communicator, layer: Any) -> Iterator[None]:
    """Raises an error of this rank on every rank, as an `ArgumentError`; holds no collective."""
    with _engine.collectives.raise_on_all(comm, "adapt"):
        try:
            yield
        except errors.KerasDistError:
            raise
        except Exception as error:  # Keras and readers of data raise errors of several classes
            expected = f"data that the layer {layer.name!r} of {type(layer).__name__} takes"
            raise refused(layer, expected, f"{type(error).__name__}: {error}") from error


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
    # Of a dataset that is not batched: vectors, or numbers, which only one mean for all takes.
    ndim = None if inputs is None else len(inputs.shape)
    is_sample = ndim == 1 or (ndim == 0 and not layer.axis)
    is_indexed = isinstance(data, keras.utils.PyDataset)
    for batch in map(data.__getitem__, range(len(data))) if is_indexed else data:
        array = as_numpy(batch[0] if isinstance(batch, tuple) else batch)
        if array.ndim == 0 and not is_sample:
            raise refused(layer, "batches of data", "a number")
        yield array[None] if is_sample else array


def _axes(
    layer: Any, shapes: Sequence[tuple[int, ...] | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes with moments of their own and the others, from shapes of ranks with data."""
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


def adapt_bins(layer: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator) -> None:
    """Adapts a `Discretization`. Collective: every rank; blocks. See `adapt`."""
    with on_every_rank(comm, layer):
        if layer.num_bins is None or options.keys() - {"steps"}:
            unknown = sorted(options.keys() - {"steps"})
            received = f"options {unknown}" if unknown else "one made with bin_boundaries="
            raise refused(
                layer, "a Discretization with num_bins, and no options but steps", received
            )
        if isinstance(data, list | tuple) and all(np.ndim(value) == 0 for value in data):
            data = np.asarray(data) if data else None  # numbers
        kind = None if data is None else "one array" if is_array(data) else "batches"
        given = () if data is None else (data,) if kind == "one array" else data
        batches = itertools.islice(given, options.get("steps"))
    kinds = _engine.collectives.allgather_object(comm, kind, operation="the kind of data")
    if len(set(kinds) - {None}) > 1:
        raise refused(layer, "data of the same kind on all ranks", ", ".join(map(str, kinds)))
    layer.reset_state()
    total = 0
    while True:
        with on_every_rank(comm, layer):
            batch = next(batches, None)
            mine = None if batch is None else as_numpy(batch).astype(np.float32).reshape(-1)
        everyone = _engine.collectives.allgather_object(comm, mine, operation="a batch of data")
        found = [values for values in everyone if values is not None]
        if not found:
            break
        joined = np.concatenate(found)
        total += joined.size
        layer.update_state(joined)
    if not total:
        raise refused(layer, "data on a rank", "none on any rank")
    layer.finalize_state()
