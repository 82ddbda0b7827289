"""What layers compute with besides their variables, and constants that they derive from them.

A layer may keep a vocabulary, boundaries of bins, or what the methods `save_own_variables` and
`save_assets` of a user's class save, and derive constants, as `Normalization` does in
`finalize_state`. Wherever variables are set, `write` sets this state as well, or `refresh` derives
the constants anew.
"""

import contextlib
import hashlib
import io
import json
import logging
import pathlib
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist._compat.keras.models import is_trainer, layers_of
from keras_dist.training.model_state import layer_name, local_variables, to_numpy
from keras_dist.training.train_functions import retrace

# What each layer with such state keeps: arrays by kind and key, in the order of the layers.
Kept = Sequence[dict[str, np.ndarray]]

# Prefixes: an asset file; a stored value; the index of a variable that is stored under a key.
ASSET, STORED, REFERENCE = "asset/", "stored/", "variable/"
# Attribute of a model: digests of what its layers computed with when its steps were last renewed.
TRACED_WITH = "_keras_dist_traced_with"
# Name of a mark: a method has failed.
UNREADABLE = "unreadable"
# Names of what tables keep.
VOCABULARY, WEIGHTS, BINS = "vocabulary", "idf weights", "bins"
METHODS = ("save_own_variables", "load_own_variables", "save_assets", "load_assets")
DIGEST_NBYTES = 16

_log = logging.getLogger("keras_dist")
# What was read of a lookup, with its table and weights, which Keras replaces when they change.
_vocabularies: Any = weakref.WeakKeyDictionary()


def is_stateful(model: keras.Model) -> bool:
    """Returns whether a layer of a model keeps or derives state that is no variable."""
    return bool(_layers(model))


def read(model: keras.Model) -> list[dict[str, np.ndarray]]:
    """Returns what the layers of a model keep besides their variables."""
    return [_kept_by(layer) for layer in _layers(model)]


def write_tables(model: keras.Model, kept: Kept) -> None:
    """Sets vocabularies and boundaries of bins, which do not depend on variables."""
    for layer, mine in zip(_layers(model), kept, strict=True):
        try:
            if is_lookup(layer):
                _write_vocabulary(layer, mine)
            elif BINS in mine:
                layer.bin_boundaries = mine[BINS].tolist()
        except Exception as error:  # Keras raises errors of several classes
            raise _refused(layer, error) from error


def refresh(model: keras.Model, kept: Kept | None = None) -> None:
    """Sets the state of users' layers, and derives constants anew, after variables were set."""
    every = _layers(model)
    for layer, mine in zip(every, read(model) if kept is None else kept, strict=True):
        try:
            if _defines(layer, "load_own_variables") and UNREADABLE not in mine:
                _load_store(layer, mine)
            if kept is not None and _defines(layer, "load_assets"):
                _load_assets(layer, mine)
            if _derives(layer):
                layer.finalize_state()
        except Exception as error:  # of a user's method
            raise _refused(layer, error) from error


def write(model: keras.Model, kept: Kept | None) -> None:
    """Sets what the layers of a model keep, after its variables were set."""
    if kept is not None:
        if len(kept) != len(_layers(model)):
            what = "layers with state besides variables"
            raise ValueError(f"{len(kept)} {what}; the model has {len(_layers(model))}")
        write_tables(model, kept)
    refresh(model, kept)
    retrace_if_changed(model)


def retrace_if_changed(model: keras.Model) -> None:
    """Makes a model trace its steps again if constants in them have changed since the last call."""
    now = [_digest(layer) for layer in _layers(model)]
    if now and model.__dict__.get(TRACED_WITH) != now:
        object.__setattr__(model, TRACED_WITH, now)
        retrace(model)


def digests(model: keras.Model) -> list[tuple[str, bytes]]:
    """Returns names and digests of what layers keep and have derived, without local layers."""
    layers = zip(_layers(model), _are_local(model), strict=True)
    return [(_label(layer), _digest(layer)) for layer, is_local in layers if not is_local]


def without_local(model: keras.Model, kept: Kept) -> list[dict[str, np.ndarray]]:
    """Returns what layers keep, of local layers what they keep on this rank."""
    triples = zip(_layers(model), kept, _are_local(model), strict=True)
    return [_kept_by(layer) if is_local else given for layer, given, is_local in triples]


def pack(kept: Kept) -> np.ndarray:
    """Returns what layers keep as one uint8 array, which holds no code."""
    arrays = {f"{at}/{name}": array for at, mine in enumerate(kept) for name, array in mine.items()}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{"layers": np.array(len(kept)), **arrays})
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack(packed: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Returns what `pack` has packed."""
    with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as file:
        kept: list[dict[str, np.ndarray]] = [{} for _ in range(int(file["layers"]))]
        for name in file.files:
            number, _, rest = name.partition("/")
            if rest:
                kept[int(number)][rest] = file[name]
    return kept


def _layers(model: keras.Model) -> list[Any]:
    """Returns the layers that keep or derive state that is no variable."""
    return [
        layer
        for layer in layers_of(model)
        if _is_table(layer) or _derives(layer) or _defines(layer, *METHODS)
    ]


def _are_local(model: keras.Model) -> list[bool]:
    """Returns for each such layer whether it has a variable that is local to each rank."""
    local = {id(variable) for variable in local_variables(model)}
    return [any(id(v) in local for v in layer.variables) for layer in _layers(model)]


def _defines(layer: Any, *names: str) -> bool:
    """Returns whether a method is that of a user's class: Keras' own save and load variables."""
    methods = [getattr(type(layer), name, None) for name in names]
    return any(method is not None and not is_part_of_keras(method) for method in methods)


def _derives(layer: Any) -> bool:
    """Returns whether `finalize_state` of a layer derives constants from its variables."""
    # Those of Keras' tables compute a new table from counts that are gone.
    is_table = _is_table(layer) or isinstance(layer, keras.layers.TextVectorization)
    return hasattr(layer, "finalize_state") and not is_table


def _refused(layer: Any, error: Exception) -> ValueError:
    received = f"{type(error).__name__}: {error}"
    return ValueError(f"layer {layer_name(layer)!r} cannot take the state: {received}")


def _label(layer: Any) -> str:
    if _is_table(layer):
        kind = "the vocabulary" if is_lookup(layer) else "the bin boundaries"
        return f"{kind} of {layer_name(layer)}"
    return f"what {layer_name(layer)} computes with besides its variables"


def _digest(layer: Any) -> bytes:
    """Returns a digest of what a layer keeps and has derived."""
    found = hashlib.blake2b(digest_size=DIGEST_NBYTES)
    for name, array in sorted({**_kept_by(layer), **_constants(layer)}.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.digest()


def _constants(layer: Any) -> dict[str, np.ndarray]:
    """Returns arrays and numbers that a layer holds as attributes."""
    found: dict[str, np.ndarray] = {}
    if _is_table(layer) or (is_trainer(layer) and not _derives(layer)):
        return found
    for name, value in vars(layer).items():
        is_array = isinstance(value, float | np.ndarray | np.generic) or _is_tensor(value)
        if is_array and not isinstance(value, keras.Variable):
            with contextlib.suppress(Exception):  # a tensor of a step that was traced
                found[f"constant/{name}"] = _plain(value)
    return found


def _kept_by(layer: Any) -> dict[str, np.ndarray]:
    kept = dict(_read_table(layer)) if _is_table(layer) else {}
    try:
        if _defines(layer, *METHODS[:2]):
            kept.update(_store_of(layer))
        if _defines(layer, "save_assets"):
            kept.update(_assets_of(layer))
    except Exception as error:  # of a user's method, perhaps since the layer is not adapted
        _log.debug("keras_dist: what layer %r keeps cannot be saved: %s", layer_name(layer), error)
        kept[UNREADABLE] = np.array(True)
    return kept


def _store_of(layer: Any) -> dict[str, np.ndarray]:
    """Returns what `save_own_variables` stores; of variables of the layer their indices."""
    if not layer.built:
        return {}
    store: dict[str, Any] = {}
    layer.save_own_variables(store)
    indices = {}
    for index, variable in enumerate(layer.variables):
        indices[id(variable)] = indices[id(variable.value)] = index
    found = {}
    for key, value in store.items():
        at = indices.get(id(value))
        found.update(
            {f"{STORED}{key}": _plain(value)} if at is None else {f"{REFERENCE}{key}": np.array(at)}
        )
    return found


def _load_store(layer: Any, kept: dict[str, np.ndarray]) -> None:
    """Calls `load_own_variables`; the variables of the layer keep their values."""
    if not layer.built:
        return
    variables = list(layer.variables)
    values = [to_numpy(variable).copy() for variable in variables]
    store = {}
    for name, array in kept.items():
        kind, _, key = name.partition("/")
        if f"{kind}/" == REFERENCE:
            store[key] = values[int(array)]
        elif f"{kind}/" == STORED:
            store[key] = array
    layer.load_own_variables(store)
    for variable, value in zip(variables, values, strict=True):
        if to_numpy(variable).tobytes() != value.tobytes():
            variable.assign(value)  # as an adapted layer may have been merged when it was saved


def _assets_of(layer: Any) -> dict[str, np.ndarray]:
    """Returns the files that `save_assets` writes."""
    with tempfile.TemporaryDirectory() as directory:
        layer.save_assets(directory)
        root = pathlib.Path(directory)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return {
            f"{ASSET}{path.relative_to(root).as_posix()}": np.frombuffer(
                path.read_bytes(), np.uint8
            )
            for path in files
        }


def _load_assets(layer: Any, kept: dict[str, np.ndarray]) -> None:
    files = {name: array for name, array in kept.items() if name.startswith(ASSET)}
    if not files:
        return
    with tempfile.TemporaryDirectory() as directory:
        for name, array in files.items():
            path = pathlib.Path(directory, name.removeprefix(ASSET)).resolve()
            if not path.is_relative_to(pathlib.Path(directory).resolve()):
                raise ValueError(f"the asset {name!r}, which lies outside of its directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(array.tobytes())
        layer.load_assets(directory)


def _plain(value: Any) -> np.ndarray:
    """Returns a value as an array that a file holds without pickling."""
    array = np.asarray(keras.ops.convert_to_numpy(value) if _is_tensor(value) else value)
    if array.dtype.kind == "V":  # bfloat16
        return array.astype(np.float32)
    return array.astype(np.str_) if array.dtype.kind == "O" else array


def _is_tensor(value: Any) -> bool:
    return isinstance(value, keras.Variable) or bool(keras.ops.is_tensor(value))


# --- The tables of Keras' preprocessing layers: vocabularies and boundaries of bins


def is_lookup(layer: Any) -> bool:
    """Returns whether a layer keeps a vocabulary itself."""
    return isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup)


def _is_table(layer: Any) -> bool:
    """Returns whether a layer keeps a vocabulary or boundaries of bins itself."""
    return is_lookup(layer) or isinstance(layer, keras.layers.Discretization)


def _read_table(layer: Any) -> dict[str, np.ndarray]:
    """Returns the table of a layer; of one that is not adapted, nothing."""
    if is_lookup(layer):
        return _vocabulary(layer)
    bins = layer.bin_boundaries
    return {} if bins is None else {BINS: np.array(bins, np.float64)}


def _vocabulary(layer: Any) -> dict[str, np.ndarray]:
    """Returns the vocabulary of a lookup as JSON, which keeps all characters, and its weights."""
    if int(layer.lookup_table.size()) == 0:
        return {}
    weights = layer.idf_weights_const if layer.output_mode == "tf_idf" else None
    table, before, kept = _vocabularies.get(layer, (None, None, {}))
    if table is layer.lookup_table and before is weights:
        return kept
    plain = str if layer.vocabulary_dtype == "string" else int
    vocabulary = [plain(token) for token in layer.get_vocabulary()]
    kept = {VOCABULARY: np.frombuffer(json.dumps(vocabulary).encode(), np.uint8)}
    if weights is not None:
        kept[WEIGHTS] = np.asarray(weights)[: len(vocabulary)]  # without padding
    _vocabularies[layer] = layer.lookup_table, weights, kept
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
