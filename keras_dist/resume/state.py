"""What a fit has come to besides its variables: objects that give and take it. See decision 70.

Their values are JSON and bytes: reading them executes no code.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from keras_dist import runtime
from keras_dist.data import epochs
from keras_dist.storage.root_action import on_all
from keras_dist.training import layer_state, random_generators
from keras_dist.training.metric_states import states_of
from keras_dist.training.model_state import bytes_of, random_states, to_numpy
from keras_dist.training.random_generators import separate_generators

# Exact types: a `numpy.float64` is a `float` as well, and must keep its type.
PLAIN = (type(None), bool, int, float, str)
LISTS: dict[str, Any] = {"list": list, "tuple": tuple}


def pack(value: Any, arrays: list[np.ndarray]) -> Any:
    """Converts a nested value to JSON; appends the bytes of each array to `arrays`."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return {"dict": [[_key(key), pack(inner, arrays)] for key, inner in value.items()]}
    for name, kind in LISTS.items():
        if isinstance(value, kind):
            return {name: [pack(inner, arrays) for inner in value]}
    if isinstance(value, np.ndarray | np.generic):
        return _pack_array("array" if isinstance(value, np.ndarray) else "scalar", value, arrays)
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        return _pack_array("tensor", keras.ops.convert_to_numpy(value), arrays)
    raise TypeError(f"{value!r} of type {type(value).__name__}")


def unpack(packed: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Returns the value of a result of `pack`; variables become tensors."""
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "dict":
        return {key: unpack(inner, arrays) for key, inner in content}
    if kind in LISTS:
        return LISTS[kind](unpack(inner, arrays) for inner in content)
    number, dtype, shape = content
    array = arrays[number].view(np.dtype(dtype)).reshape(shape).copy()
    if kind == "tensor":
        return keras.ops.convert_to_tensor(array)
    return array if kind == "array" else array[()]


def _key(key: Any) -> Any:
    if type(key) not in PLAIN:
        raise TypeError(f"the key {key!r} of type {type(key).__name__}")
    return key


def _pack_array(kind: str, value: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(f"an array of {array.dtype}")
    # numpy finds extension dtypes, such as bfloat16, only by name.
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    arrays.append(bytes_of(array))
    return {kind: [len(arrays) - 1, dtype, list(array.shape)]}


# JSON, and the bytes of its arrays.
Packed = tuple[Any, list[np.ndarray]]

# Key in the manifest, and names of arrays.
FIT, ARRAY = "fit", "fit {part} {number}"
GENERATORS = "random"  # of earlier versions


class Resumable(Protocol):
    """An object with state; `key` names it in a generation."""

    key: str

    def give(self) -> Any:
        """Returns the state of this rank, as JSON values, arrays and tensors in containers."""

    def take(self, states: Sequence[Any]) -> bool:
        """Takes the states of all ranks that gave one; returns whether they fit."""


class FitState:
    """The objects whose states are saved with a model, and the states that were found."""

    def __init__(self, shared: Any, *others: Resumable):
        self._shared, self._every = shared, (shared, *others)
        self.found: Sequence[Packed] = ()  # what `read` has returned

    def gather(self) -> list[Packed]:
        """Returns the states of all ranks; an error of a callback is raised on all. Collective."""

        def mine() -> Packed:
            return _packed({each.key: each.give() for each in self._every})

        return on_all(mine, "the states of ranks for a backup")

    def write(
        self, ranks: Sequence[Packed], about: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> None:
        """Adds the result of `gather`, and the state of all, to what the root writes."""
        parts = [_packed(self._shared.give_all()), *ranks]
        about[FIT] = [json for json, _ in parts]
        for part, (_, packed) in enumerate(parts):
            for number, array in enumerate(packed):
                arrays[ARRAY.format(part=part, number=number)] = array

    def ranks(self) -> list[dict[str, Any]]:
        """Returns the states of all ranks that were found."""
        return [unpack(*packed) for packed in self.found[1:]]

    def take(self, *keys: str) -> bool:
        """Lets objects take what was found, if anything was; returns whether it fits all."""
        if not (states := self.ranks()):
            return True
        self._shared.of_all = unpack(*self.found[0])
        # A generation of an earlier version may lack one.
        asked = [each for each in self._every if each.key in keys and each.key in states[0]]
        fit = [each.take([state[each.key] for state in states]) for each in asked]
        return all(fit)

    def take_on_all(self, *keys: str) -> None:
        """Does so on all ranks, where it may fail on some. Collective: every rank; blocks."""
        on_all(lambda: self.take(*keys), "the states of callbacks from a backup")


def read(about: Mapping[str, Any], file: Mapping[str, np.ndarray]) -> list[Packed]:
    """Returns what `FitState.write` has added: the state of all, and those of ranks."""
    found: list[Packed] = []
    for part, json in enumerate(about[FIT]):
        arrays: list[np.ndarray] = []
        while (name := ARRAY.format(part=part, number=len(arrays))) in file:
            arrays.append(file[name])
        found.append((json, arrays))
    return [found[0], *_with_generators(found[1:], about)] if GENERATORS in about else found


def _with_generators(ranks: Sequence[Packed], about: Mapping[str, Any]) -> list[Packed]:
    """Adds to the states of ranks what a manifest of earlier versions holds instead."""
    added = [(Generators.key, about[GENERATORS]), (DataPosition.key, [about["data"]] * len(ranks))]
    return [
        ({"dict": [*json["dict"], *([key, pack(each[rank], [])] for key, each in added)]}, arrays)
        for rank, (json, arrays) in enumerate(ranks)
    ]


def own(states: Sequence[Any]) -> Any:
    """Returns the state of this rank, or of rank 0 in a job of another size."""
    return states[runtime.fit_rank()] if len(states) == runtime.fit_size() else states[0]


class Seeds:
    """The random generators of a model."""

    key = "random"

    def __init__(self, model: keras.Model, root_rank: int):
        self._model, self._root_rank = model, root_rank

    def give(self) -> Any:
        return [to_numpy(variable) for variable in random_states(self._model)]

    def take(self, states: Sequence[Any]) -> bool:
        if len(states) != runtime.fit_size():
            separate_generators(self._model, self._root_rank)
            return True
        for variable, value in zip(random_states(self._model), own(states), strict=True):
            variable.assign(value)
        return True


class Statistics:
    """The moving statistics of each rank; a job of another size keeps their averages."""

    key = "statistics"

    def __init__(self, model: keras.Model):
        self._model = model
        self.values: Mapping[int, np.ndarray] = {}  # of non-trainable weights, by index

    def give(self) -> Any:
        return dict(self.values)

    def take(self, states: Sequence[Any]) -> bool:
        if len(states) == runtime.fit_size():
            self.assign(own(states))
        return True

    def assign(self, values: Mapping[int, np.ndarray]) -> None:
        weights = list(self._model.non_trainable_weights)
        for index, value in values.items():
            weights[index].assign(value)
        if values:
            layer_state.write(self._model, None)


class Metrics:
    """The metrics of an epoch; in a job of another size, rank 0 gets the totals."""

    key = "metrics"

    def __init__(self, model: keras.Model):
        self._model = model

    def give(self) -> Any:
        return [to_numpy(variable) for variable in self._model.metrics_variables]

    def take(self, states: Sequence[Any]) -> bool:
        variables = self._model.metrics_variables
        shapes = [tuple(variable.shape) for variable in variables]
        if any([value.shape for value in each] != shapes for each in states):
            return False
        known = states_of(self._model)
        for variable, *values in zip(variables, *states, strict=True):
            state = known.get(id(variable))
            if len(states) == runtime.fit_size():
                variable.assign(own(values))
            elif state is None:
                variable.assign(values[0])
            elif runtime.fit_rank() == 0 or state.how == "mean":
                variable.assign(state.joined(values))
        return True


class LastLogs:
    """The numbers in the logs of the last batch, which `read` returns."""

    key = "logs"

    def __init__(self, read: Callable[[], dict[str, float]]):
        self.give = read

    def take(self, states: Sequence[Any]) -> bool:
        return True


class DataPosition:
    """The epochs of data sets at the begin of the epoch; equal on all ranks."""

    key = "data"

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def note(self) -> None:
        """Notes the epochs of now."""
        self._numbers = epochs.numbers()

    def give(self) -> Any:
        return self._numbers

    def take(self, states: Sequence[Any]) -> bool:
        epochs.restore(states[0])
        return True


class Generators:
    """The random generators of the process and of its data; in a job of another size they restart.

    The order of data is drawn at the start of an epoch, and train steps draw in between. A fit that
    resumes within an epoch draws the order again, skips the batches, and then sets the generators
    to their states when the generation was written.
    """

    key = "generators"

    def __init__(self) -> None:
        self._at_begin: dict[str, Any] | None = None  # of this epoch; `None` between epochs
        self._resumed: dict[str, Any] = {}
        self._skipped: dict[str, Any] = {}

    def begin_epoch(self) -> None:
        """Notes the states from which the order of an epoch is drawn, or restores them."""
        _set(self._resumed)
        self._resumed = {}
        self._at_begin = random_generators.states(_data())

    def end_epoch(self) -> None:
        self._at_begin = None

    def give(self) -> Any:
        now = random_generators.states(_data())
        return [now] if self._at_begin is None else [self._at_begin, now]

    def take(self, states: Sequence[Any]) -> bool:
        self._resumed = self._skipped = {}
        if len(states) == runtime.fit_size():
            at_begin, *later = own(states)
            _set(at_begin)
            if later:
                self._resumed, self._skipped = at_begin, _of_steps(later[0])
        return True

    def skipped(self) -> None:
        """Sets the generators to their states after the skipped steps."""
        _set(self._skipped)
        self._skipped = {}


def _packed(states: Mapping[str, Any]) -> Packed:
    arrays: list[np.ndarray] = []
    return pack(dict(states), arrays), arrays


def _data() -> Any:
    return epochs.fits.get().arguments.get("x")


def _set(states: Mapping[str, Any]) -> None:
    random_generators.restore(states, _data())


def _of_steps(states: dict[str, Any]) -> dict[str, Any]:
    """Returns the states of generators that train steps use."""
    if keras.backend.backend() != "tensorflow":
        return states
    # A thread reads data ahead of training, so generators of data continue.
    return {name: state for name, state in states.items() if name == "keras"}
