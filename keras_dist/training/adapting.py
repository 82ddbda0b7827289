"""`adapt`: preprocessing layers adapt to the data of all ranks.

Moments are merged in float64 and in rank order, so that all ranks have the same bits. Keras'
boundaries of bins depend on how values are summarized: the ranks join their arrays, or each batch.
"""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist._compat.keras.models import layers_of
from keras_dist._compat.python import replaced
from keras_dist.training.layer_state import is_lookup

CHUNK = 1 << 20  # elements of an array that are converted to float64 at a time
TOKENS = "the counts of tokens"


def adapt(layer: Any, data: Any, **options: Any) -> None:
    """Adapts a preprocessing layer to the data of all ranks, of which each rank passes its share.

    The result is that of `layer.adapt` in one process on the data of all ranks, and has the same
    bits on every rank. Shares may differ in size or be empty.

    - `Normalization`: mean and variance, computed in float64, so equal up to rounding. A share
      without data needs no shape.
    - `StringLookup`, `IntegerLookup`, `TextVectorization`: tokens of all ranks by their total
      counts, ties in the order of Keras, cut off at `max_tokens`; with `output_mode="tf_idf"`
      weights from the documents of all ranks.
    - `Discretization`: for arrays, the boundaries that Keras computes of the joined array. For
      batches, those that Keras computes if each batch is that of all ranks, joined in rank order.
      Keras' boundaries are approximate beyond `1 / epsilon` values.
    - `keras.utils.FeatureSpace`: adapts each of its features in this way. Every rank needs data.

    The layer may be part of a model already. As with `layer.adapt`, steps that TensorFlow or JAX
    has traced keep the earlier values; on several ranks, until the next `fit` with
    `keras_dist.callbacks()`.

    Collective: every rank, with a layer of the same class and configuration; blocks.

    Args:
        layer: one of these layers, or of a subclass that does not override `adapt`.
        data: the share of this rank, as for `layer.adapt`: an array, a tensor, a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or an iterable of batches; strings also as
            a list. `None` if this rank has no data.
        **options: further arguments of `layer.adapt`, such as `steps`.

    Raises:
        ArgumentError: the layer has no `adapt`, or one of its own; it was made with the values that
            `adapt` computes; no rank has data; or the data of a rank does not fit. Raised on every
            rank.

    Example:

    ```python
    normalization = keras.layers.Normalization()
    keras_dist.adapt(normalization, x[keras_dist.rank() :: keras_dist.size()])
    ```
    """
    comm = runtime.communicator()
    with _engine.collectives.raise_on_all(comm, "adapt"):
        way = _way_of(layer)
    way(layer, data, options, comm)


def _way_of(layer: Any) -> Callable[..., None]:
    """Returns the function that adapts a layer."""
    if isinstance(layer, keras.utils.FeatureSpace):
        return _adapt_features
    has_own = hasattr(layer, "adapt") and not is_part_of_keras(type(layer).adapt)
    if hasattr(layer, "adapt") and not has_own:
        if isinstance(layer, keras.layers.Normalization):
            return _adapt_moments
        if isinstance(layer, keras.layers.Discretization):
            return _adapt_bins
        if any(is_lookup(each) for each in layers_of(layer)):
            return _adapt_lookup
    kind = "with an adapt of its own" if has_own else "which has no adapt"
    raise errors.ArgumentError(
        "a preprocessing layer of Keras with adapt, such as Normalization or TextVectorization",
        f"{type(layer).__name__}, {kind}",
        "Call its adapt on rank 0 with the data of all ranks: the broadcast at the start of "
        "fit carries what the layer saves.",
    )


def _refused(layer: Any, expected: str, received: str) -> errors.ArgumentError:
    """Returns the error about a layer or its data."""
    remedy = f"Pass data as for {type(layer).__name__}.adapt, and None on ranks without data."
    return errors.ArgumentError(expected, received, remedy)


@contextlib.contextmanager
def _on_every_rank(comm: _engine.Communicator, layer: Any) -> Iterator[None]:
    """Raises an error of this rank on every rank, as an `ArgumentError`; holds no collective."""
    with _engine.collectives.raise_on_all(comm, "adapt"):
        try:
            yield
        except errors.KerasDistError:
            raise
        except Exception as error:  # Keras and readers of data raise errors of several classes
            expected = f"data that the layer {layer.name!r} of {type(layer).__name__} takes"
            raise _refused(layer, expected, f"{type(error).__name__}: {error}") from error


class _Moments(NamedTuple):
    """Number of values, mean and sum of the squared deviations from it."""

    number: int
    mean: Any
    squares: Any


def _adapt_moments(
    layer: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator
) -> None:
    """Adapts a `Normalization`. Collective: every rank; blocks. See `adapt`."""
    with _on_every_rank(comm, layer):
        if options or layer.input_mean is not None:
            expected = "a Normalization without mean and variance, and no options"
            received = f"options {sorted(options)}" if options else "one made with mean="
            raise _refused(layer, expected, received)
        batches = _batches_of(layer, data)
        first = next(batches, None)
        shape = None if first is None else first.shape
    shapes = _engine.collectives.allgather_object(comm, shape, operation="the shapes of data")
    with _on_every_rank(comm, layer):
        kept, reduced = _axes(layer, shapes)
        mine = _Moments(0, 0.0, 0.0)
        if first is not None:
            every = _chunks(first, 0 in reduced, batches)
            mine = functools.reduce(_merge, (_moments(batch, reduced) for batch in every), mine)
    parts = _engine.collectives.allgather_object(comm, mine, operation="the moments of data")
    total = functools.reduce(_merge, parts)
    if total.number == 0:
        raise _refused(layer, "data on a rank", "none on any rank")
    if not layer.built:
        known = next(shape for shape in shapes if shape is not None)
        layer.build(tuple(n if axis in kept else None for axis, n in enumerate(known)))
    layer.adapt_mean.assign(total.mean)
    layer.adapt_variance.assign(total.squares / total.number)
    layer.finalize_state()


def _is_array(data: Any) -> bool:
    """Returns whether data is one array or tensor, not batches."""
    return hasattr(data, "__array__") and hasattr(data, "shape")


def _as_numpy(value: Any) -> np.ndarray:
    """Returns an array or tensor as a numpy array; raises if values are masked."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(
        value
    ):  # `numpy.asarray` would drop the mask
        raise ValueError("masked values, which filled() of the array replaces")
    tensor = keras.ops.is_tensor(value)
    return np.asarray(keras.ops.convert_to_numpy(value) if tensor else value)


def _batches_of(layer: Any, data: Any) -> Iterator[np.ndarray]:
    """Yields the inputs of batches, as `Normalization.adapt` takes data."""
    if data is None:
        return
    if _is_array(data):
        yield _as_numpy(data)
        return
    spec = getattr(data, "element_spec", None)
    inputs = spec[0] if isinstance(spec, tuple) else spec
    # Of a dataset that is not batched: vectors, or numbers, which only one mean for all takes.
    ndim = None if inputs is None else len(inputs.shape)
    is_sample = ndim == 1 or (ndim == 0 and not layer.axis)
    is_indexed = isinstance(data, keras.utils.PyDataset)
    for batch in map(data.__getitem__, range(len(data))) if is_indexed else data:
        array = _as_numpy(batch[0] if isinstance(batch, tuple) else batch)
        if array.ndim == 0 and not is_sample:
            raise _refused(layer, "batches of data", "a number")
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
        raise _refused(layer, f"data with the axes {layer.axis}", f"shape {known[0]}")
    kept = tuple(sorted(axis % ndim for axis in layer.axis))
    sizes = {(len(shape), *(shape[axis] for axis in kept if axis < len(shape))) for shape in known}
    if layer.built:
        sizes.add((ndim, *layer.adapt_mean.shape))
    if len(sizes) > 1:
        expected = f"equal sizes of the axes {kept} on all ranks and in the layer"
        raise _refused(layer, expected, f"shapes {known}")
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


def _adapt_bins(layer: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator) -> None:
    """Adapts a `Discretization`. Collective: every rank; blocks. See `adapt`."""
    with _on_every_rank(comm, layer):
        unknown = sorted(options.keys() - {"steps"})
        if layer.num_bins is None or unknown:
            expected = "a Discretization with num_bins, and no options but steps"
            received = f"options {unknown}" if unknown else "one made with bin_boundaries="
            raise _refused(layer, expected, received)
        if isinstance(data, list | tuple) and all(np.ndim(value) == 0 for value in data):
            data = np.asarray(data) if data else None  # numbers
        kind = None if data is None else "one array" if _is_array(data) else "batches"
        given = () if data is None else (data,) if kind == "one array" else data
        batches = itertools.islice(given, options.get("steps"))
    kinds = _engine.collectives.allgather_object(comm, kind, operation="the kind of data")
    if len(set(kinds) - {None}) > 1:
        raise _refused(layer, "data of the same kind on all ranks", ", ".join(map(str, kinds)))
    layer.reset_state()
    total = 0
    while True:
        with _on_every_rank(comm, layer):
            batch = next(batches, None)
            mine = None if batch is None else _as_numpy(batch).astype(np.float32).reshape(-1)
        everyone = _engine.collectives.allgather_object(
            comm, mine is not None, operation="whether there is a batch"
        )
        if not any(everyone):
            break
        own = np.empty(0, np.float32) if mine is None else mine
        joined = _engine.collectives.allgather(comm, own, "a batch of data")
        total += joined.size
        layer.update_state(joined)
    if not total:
        raise _refused(layer, "data on a rank", "none on any rank")
    layer.finalize_state()


def _adapt_lookup(
    layer: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator
) -> None:
    lookup = next(each for each in layers_of(layer) if is_lookup(each))
    with _on_every_rank(comm, layer):
        _count(layer, data, options)
        mine = [_entries(table) for table in _tables(lookup)]
    documents = int(lookup.num_documents) if lookup.output_mode == "tf_idf" else 0
    everyone = _engine.collectives.allgather_object(comm, (mine, documents), operation=TOKENS)
    if not any(tables[0] for tables, _ in everyone):
        raise _refused(layer, "tokens on a rank", "none on any rank")
    layer.reset_state()
    for number, table in enumerate(_tables(lookup)):
        total: collections.Counter[Any] = collections.Counter()
        for tables, _ in everyone:
            total.update(tables[number])
        table.insert(list(total), list(total.values()))
    if lookup.output_mode == "tf_idf":
        lookup.num_documents.assign(sum(count for _, count in everyone))
    with _on_every_rank(comm, layer):
        layer.finalize_state()


def _count(layer: Any, data: Any, options: dict[str, Any]) -> None:
    """Counts tokens as `layer.adapt` does, without a vocabulary of them."""
    if data is None or ((_is_array(data) or isinstance(data, list | tuple)) and len(data) == 0):
        layer.reset_state()
        return
    with replaced(layer, finalize_state=lambda: None):
        layer.adapt(data, **options)


def _tables(lookup: Any) -> list[Any]:
    """Returns the tables of counts of a lookup: of tokens, and of documents with a token."""
    documents = [lookup.token_document_counts] if lookup.output_mode == "tf_idf" else []
    return [lookup.token_counts, *documents]


def _entries(table: Any) -> dict[Any, int]:
    keys, counts = table.export()
    return dict(zip(keys.numpy().tolist(), counts.numpy().tolist(), strict=True))


def _adapt_features(
    space: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator
) -> None:
    """Adapts the features of a `FeatureSpace` one after the other."""
    found: list[tuple[Any, Any]] = []
    with _on_every_rank(comm, space), _adapting_by(space, lambda *each: found.append(each)):
        stops = replaced(space, get_encoded_features=_stop)
        with stops, contextlib.suppress(_FeaturesAreKnown):
            space.adapt(data, **options)
    for layer, share in found:
        _way_of(layer)(layer, share, {}, comm)
    with _adapting_by(space, lambda *feature: None):
        space.adapt(data)  # builds it


class _FeaturesAreKnown(Exception):
    """Ends the `adapt` of a `FeatureSpace` when it has called those of its layers."""


def _stop() -> None:
    raise _FeaturesAreKnown


@contextlib.contextmanager
def _adapting_by(space: Any, adapt_one: Callable[[Any, Any], None]) -> Iterator[None]:
    """Returns a context in which a `FeatureSpace` calls a function with each layer and its data."""
    layers = [layer for layer in space.preprocessors.values() if hasattr(layer, "adapt")]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            by_one = functools.partial(adapt_one, layer)
            stack.enter_context(replaced(layer, adapt=by_one))
        yield
