"""The tables of Keras' preprocessing layers: vocabularies and boundaries of bins."""

import json
import weakref
from typing import Any

import keras
import numpy as np

VOCABULARY, WEIGHTS, BINS = "vocabulary", "idf weights", "bins"

# What was read of a lookup, with its table and weights, which Keras replaces when they change.
_read: Any = weakref.WeakKeyDictionary()


def is_lookup(layer: Any) -> bool:
    """Returns whether a layer keeps a vocabulary itself."""
    return isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup)


def is_table(layer: Any) -> bool:
    """Returns whether a layer keeps a vocabulary or boundaries of bins itself."""
    return is_lookup(layer) or isinstance(layer, keras.layers.Discretization)


def described(layer: Any) -> str:
    """Returns a phrase for what a layer keeps."""
    return "the vocabulary" if is_lookup(layer) else "the bin boundaries"


def read(layer: Any) -> dict[str, np.ndarray]:
    """Returns the table of a layer; of one that is not adapted, nothing."""
    if is_lookup(layer):
        return _vocabulary(layer)
    bins = layer.bin_boundaries
    return {} if bins is None else {BINS: np.array(bins, np.float64)}


def write(layer: Any, kept: dict[str, np.ndarray]) -> None:
    """Sets the table of a layer, from `read`."""
    if is_lookup(layer):
        _write_vocabulary(layer, kept)
    elif BINS in kept and not np.array_equal(kept[BINS], read(layer).get(BINS, ())):
        layer.bin_boundaries = kept[BINS].tolist()


def _vocabulary(layer: Any) -> dict[str, np.ndarray]:
    """Returns the vocabulary of a lookup as JSON, which keeps all characters, and its weights."""
    if int(layer.lookup_table.size()) == 0:
        return {}
    weights = layer.idf_weights_const if layer.output_mode == "tf_idf" else None
    table, before, kept = _read.get(layer, (None, None, {}))
    if table is layer.lookup_table and before is weights:
        return kept
    plain = str if layer.vocabulary_dtype == "string" else int
    vocabulary = [plain(token) for token in layer.get_vocabulary()]
    kept = {VOCABULARY: np.frombuffer(json.dumps(vocabulary).encode(), np.uint8)}
    if weights is not None:
        kept[WEIGHTS] = np.asarray(weights)[: len(vocabulary)]  # without padding
    _read[layer] = layer.lookup_table, weights, kept
    return kept


def _write_vocabulary(layer: Any, kept: dict[str, np.ndarray]) -> None:
    mine = _vocabulary(layer)
    names = {VOCABULARY, WEIGHTS} & kept.keys()
    if all(name in mine and np.array_equal(mine[name], kept[name]) for name in names):
        return
    vocabulary = json.loads(kept[VOCABULARY].tobytes())
    weights = kept.get(WEIGHTS)
    layer.set_vocabulary(vocabulary, weights)
    if layer.input_vocabulary is not None:  # the one in the configuration
        layer.input_vocabulary = vocabulary
        layer.input_idf_weights = weights if weights is None else weights.tolist()
