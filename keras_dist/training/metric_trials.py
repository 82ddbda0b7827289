"""What a metric of a user does with a few small batches, tried apart from its state."""

import collections
import copy
import inspect
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist.training.model_state import to_numpy

BATCHES, SAMPLES = 3, 4  # the number of batches, and of samples in each
SHIFTS = (0, -1000, 2, 1000)  # of a state after a reset
# Of variables before a reset: in the marks none has the value of another one.
ZEROS, MARKS = itertools.repeat(0), range(2, 2**15)
OF_BATCH = "sum of numbers of batches"  # or the trial is not what the metric was made for


class UnmergeableMetric(Exception):
    """The states of a metric cannot be merged; the message is the reason, as a phrase."""


def behaviours(metric: keras.metrics.Metric, variables: Iterable[Any]) -> list[str]:
    """Returns for each variable whether it is a `"sum"`, a `"max"` or a `"min"` over samples."""
    # A sum over batches is a `"mean"`: each rank has a part of each batch.
    asked, twin = list(variables), _twin(metric, {})
    before = _twin(twin, {})
    every, reset = list(twin.variables), list(reset_values(twin).values())
    start = [_start(variable, value) for variable, value in zip(every, reset, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = ((batch, _updated(twin, start, batch)) for batch in _batches(metric))
        valid = ((batch, state) for batch, state in runs if state is not None)
        tried = list(itertools.islice(valid, BATCHES))
        constants = _constants(twin, start, [state for _, state in tried])
        for place in constants:  # other variables may depend on them
            start[place] = np.array(to_numpy(every[place]))
        known = {id(every[place]): "max" for place in constants}
        found = [known.get(id(v)) or _behaviour(twin, start, reset, tried, v) for v in asked]
    if not _same(before, twin, set()):
        raise UnmergeableMetric("state outside of its variables")
    if "mean" in found and OF_BATCH in found:  # a sum is divided by a number of batches
        raise UnmergeableMetric(
            f"{asked[found.index(OF_BATCH)].name}, which is no sum over samples"
        )
    return ["sum" if how == OF_BATCH else how for how in found]


def reset_values(metric: keras.metrics.Metric) -> dict[int, np.ndarray | None]:
    """Returns what `reset_state` sets each variable to, by its id; `None` if that may vary."""
    variables = metric.variables
    pairs = zip(*(_after_reset(metric, fill) for fill in (ZEROS, MARKS)), strict=True)
    return {
        id(variable): value if np.array_equal(value, other, equal_nan=True) else None
        for variable, (value, other) in zip(variables, pairs, strict=True)
    }


def _after_reset(metric: keras.metrics.Metric, fill: Iterable[int]) -> list[np.ndarray]:
    """Returns the state after a reset of one whose variables are filled with numbers."""
    given = zip(metric.variables, fill, strict=False)
    filled = [(v, keras.ops.full(v.shape, number, v.dtype)) for v, number in given]
    try:
        with keras.StatelessScope(state_mapping=filled) as scope:
            _twin(metric, {}).reset_state()
    except Exception as error:  # of other people's code
        raise UnmergeableMetric(f"a reset_state that could not be tried: {error}") from error
    return [np.array(to_numpy(scope.get_current_value(v))) for v, _ in filled]


def _start(variable: Any, reset: np.ndarray | None) -> np.ndarray:
    """Returns a finite value of a variable before a trial."""
    if reset is None:
        return np.zeros_like(to_numpy(variable))
    return np.where(np.isfinite(reset), reset, 0).astype(reset.dtype)


def _constants(
    metric: Any, start: Sequence[np.ndarray], afters: Sequence[Sequence[np.ndarray]]
) -> list[int]:
    """Returns the places of variables that neither a reset nor a batch changes."""
    marked = zip(_after_reset(metric, MARKS), MARKS, strict=False)
    kept = [bool((value == value.dtype.type(mark)).all()) for value, mark in marked]
    return [
        place
        for place, value in enumerate(start)
        if kept[place] and afters and all(np.array_equal(value, each[place]) for each in afters)
    ]


def _behaviour(
    twin: Any,
    start: list[np.ndarray],
    reset: list[np.ndarray | None],
    tried: Sequence[tuple[Any, list[np.ndarray]]],
    variable: Any,
) -> str:
    place = next(index for index, other in enumerate(twin.variables) if other is variable)
    if not tried:
        raise UnmergeableMetric(f"{variable.name}, which could not be tried")
    after = [state[place] for _, state in tried]
    common = set.intersection(*(_fitting(twin, start, place, batch, after) for batch, _ in tried))
    if common == {"sum"}:
        # Targets of another shape than the predictions may be broadcast, each with all others.
        alike = [batch for batch, _ in tried if len({tuple(each.shape) for each in batch}) == 1]
        found = [_of_halves(twin, start, place, batch) for batch in alike]
        common = set.intersection({"sum", "mean"}, *found) or {OF_BATCH}
        return "sum" if "sum" in common else common.pop()
    if len(common) == 1:
        return common.pop()
    value = reset[place]
    if common:
        if value is None:
            raise UnmergeableMetric(f"{variable.name}, which reset_state computes from states")
        if np.isfinite(value).all():
            return "sum"  # no batch changes it
    raise UnmergeableMetric(f"{variable.name}, which is no sum, maximum or minimum")


def _fitting(
    twin: Any, start: list[np.ndarray], place: int, batch: Any, after: Sequence[np.ndarray]
) -> set[str]:
    """Returns the behaviours that fit what a batch does to the variable at `place`."""
    shifted = [(start[place] + shift).astype(start[place].dtype) for shift in SHIFTS]
    # `after` has values of the variable after other batches, whose elements differ.
    befores, afters, others = [*shifted[:-1], *after, shifted[-1]], [], []
    for before in befores:
        state = list(start)
        state[place] = before
        result = _updated(twin, state, batch)
        if result is None:
            return set()
        afters.append(result.pop(place))
        others.append(result)
    if not all(_close(a, b) for other in others for a, b in zip(others[0], other, strict=True)):
        return set()  # other variables depend on this one
    change = afters[0] - befores[0]
    lowest, highest = afters[1], afters[-1]
    pairs = list(zip(befores, afters, strict=True))
    fits = {
        "sum": all(_close(after, before + change) for before, after in pairs),
        "max": all(_close(after, np.maximum(before, lowest)) for before, after in pairs),
        "min": all(_close(after, np.minimum(before, highest)) for before, after in pairs),
    }
    return {name for name, fit in fits.items() if fit}


def _of_halves(twin: Any, start: list[np.ndarray], place: int, batch: Any) -> set[str]:
    """Returns whether a batch adds the `"sum"` or the `"mean"` of what its halves add."""
    # The mean it is for a number of batches and a sum of means: ranks have parts of each batch.
    parts = [slice(SAMPLES), slice(SAMPLES // 2), slice(SAMPLES // 2, SAMPLES)]
    added = []
    for rows in parts:
        after = _updated(twin, start, tuple(given[rows] for given in batch))
        if after is None:  # it does not take other numbers of samples
            return {"sum"}
        added.append(after[place] - start[place])
    whole, one, other = added
    fits = {"sum": _close(whole, one + other), "mean": _close(whole, (one + other) / 2)}
    return {name for name, fit in fits.items() if fit}


def _updated(twin: Any, state: list[np.ndarray], batch: Any) -> list[np.ndarray] | None:
    """Returns the state after a batch; `None` if the metric does not accept the batch."""
    try:
        tensors = [
            keras.ops.convert_to_tensor(value.copy(), variable.dtype)
            for value, variable in zip(state, twin.variables, strict=True)
        ]
        found = twin.stateless_update_state(tensors, *batch)
        return [np.array(to_numpy(value)) for value in found]
    except Exception:  # of other people's code, for data that it was not made for
        return None


def _batches(metric: keras.metrics.Metric) -> Iterator[tuple[Any, ...]]:
    """Returns batches for `update_state`: targets and predictions, or values."""
    parameters = inspect.signature(metric.update_state).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    rng = np.random.default_rng(0)
    # A state for each class has the shape of the predictions of a sample.
    for width in dict.fromkeys([*(v.shape[-1] for v in metric.variables if len(v.shape)), 1, 3]):
        shape = (SAMPLES, width)
        inputs = [rng.random(shape, np.float32) for _ in needed[1:]]
        for first in (
            rng.normal(0, 3, shape).astype(np.float32),
            rng.integers(0, 2, shape).astype(np.float32),
            rng.integers(0, 2, SAMPLES),
        ):
            yield tuple(keras.ops.convert_to_tensor(value) for value in (first, *inputs))


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    if found.dtype.kind in "biu":
        return np.array_equal(found, expected)
    tolerance = 2.0 * {2: 2**-7, 4: 2**-23, 8: 2**-52}[found.itemsize]
    a, b = found.astype(np.float64), expected.astype(np.float64)
    return np.allclose(a, b, rtol=tolerance, atol=max(SHIFTS) * tolerance, equal_nan=True)


def _twin(value: Any, made: dict[int, Any]) -> Any:
    """Copies metrics and what they hold, at any depth; shares variables and parts of Keras."""
    # `made` has the copies by the `id` of the original, as `copy.deepcopy` has them.
    if isinstance(value, keras.metrics.Metric):
        if id(value) not in made:
            made.update((id(variable), variable) for variable in value.variables)
            made[id(value)] = object.__new__(type(value))
            vars(made[id(value)]).update(
                {name: _twin(inner, made) for name, inner in vars(value).items()}
            )
        return made[id(value)]
    if isinstance(value, dict):
        return {key: _twin(inner, made) for key, inner in value.items()}
    if isinstance(value, list):
        return [_twin(inner, made) for inner in value]
    if type(value) is tuple:
        return tuple(_twin(inner, made) for inner in value)
    owner = value.__self__ if inspect.ismethod(value) else value
    bases = type(owner).__mro__  # weights of a module of torch are no state
    if any(is_part_of_keras(base) or base.__module__.startswith("torch.nn.") for base in bases):
        return value
    copies = dict(made)
    try:  # such as a variable of the backend, a deque, or an object of the user with state
        copied = copy.deepcopy(value, copies)
    except Exception:  # such as of a module of Python, which cannot be copied
        return value
    made.update(copies)
    return copied


def _same(a: Any, b: Any, seen: set[int]) -> bool:
    """Returns whether two twins are equal; what cannot be compared is."""
    if a is b or id(a) in seen:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, int | float | str | set | frozenset):
        return bool(a == b)
    if isinstance(a, np.ndarray) or keras.ops.is_tensor(a):
        return np.array_equal(to_numpy(a), to_numpy(b))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(lambda x, y: _same(x, y, seen), a, b))
    if not isinstance(a, dict):
        seen.add(id(a))
        a, b = (vars(each) if hasattr(each, "__dict__") else {} for each in (a, b))
    return a.keys() == b.keys() and all(_same(a[key], b[key], seen) for key in a)
