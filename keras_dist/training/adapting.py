"""`adapt`: preprocessing layers adapt to the data of all ranks."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist._compat.keras.models import layers_of
from keras_dist.training.adapted_numbers import (
    adapt_bins,
    adapt_moments,
    is_array,
    on_every_rank,
    refused,
)
from keras_dist.training.layer_state import is_lookup

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
            return adapt_moments
        if isinstance(layer, keras.layers.Discretization):
            return adapt_bins
        if any(is_lookup(each) for each in layers_of(layer)):
            return _adapt_lookup
    kind = "with an adapt of its own" if has_own else "which has no adapt"
    raise errors.ArgumentError(
        "a preprocessing layer of Keras with adapt, such as Normalization or TextVectorization",
        f"{type(layer).__name__}, {kind}",
        "Call its adapt on rank 0 with the data of all ranks: the broadcast at the start of "
        "fit carries what the layer saves.",
    )


def _adapt_lookup(
    layer: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator
) -> None:
    lookup = next(each for each in layers_of(layer) if is_lookup(each))
    with on_every_rank(comm, layer):
        _count(layer, data, options)
        mine = [_entries(table) for table in _tables(lookup)]
    documents = int(lookup.num_documents) if lookup.output_mode == "tf_idf" else 0
    everyone = _engine.collectives.allgather_object(comm, (mine, documents), operation=TOKENS)
    if not any(tables[0] for tables, _ in everyone):
        raise refused(layer, "tokens on a rank", "none on any rank")
    layer.reset_state()
    for number, table in enumerate(_tables(lookup)):
        total: collections.Counter[Any] = collections.Counter()
        for tables, _ in everyone:
            total.update(tables[number])
        table.insert(list(total), list(total.values()))
    if lookup.output_mode == "tf_idf":
        lookup.num_documents.assign(sum(count for _, count in everyone))
    with on_every_rank(comm, layer):
        layer.finalize_state()


def _count(layer: Any, data: Any, options: dict[str, Any]) -> None:
    """Counts tokens as `layer.adapt` does, without a vocabulary of them."""
    if data is None or ((is_array(data) or isinstance(data, list | tuple)) and len(data) == 0):
        layer.reset_state()
        return
    with _replaced(layer, "finalize_state", lambda: None):
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
    with on_every_rank(comm, space), _adapting_by(space, lambda *each: found.append(each)):
        stops = _replaced(space, "get_encoded_features", _stop)
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
            stack.enter_context(_replaced(layer, "adapt", by_one))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of one object within the context."""
    vars(owner)[name] = method
    try:
        yield
    finally:
        del vars(owner)[name]
