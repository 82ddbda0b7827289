"""The states of metrics, and how those of all ranks are merged to the state of one process.

Keras gives every variable of a metric `aggregation="sum"` unless its author says otherwise, a
running maximum as well. A metric that is not part of Keras is therefore tried, see `metric_trials`.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist._compat.keras.metrics import (
    function_of,
    metrics_inside,
    metrics_of,
    own_variables,
)
from keras_dist.training.batch_trials import averages_no_means
from keras_dist.training.metric_trials import (
    UnmergeableMetric,
    behaviours,
    reset_values,
)
from keras_dist.training.model_state import to_numpy
from keras_dist.training.rank_exchanges import allreduce

#: the reduction of each way to merge states
MERGES = {
    "sum": _engine.ReduceOp.SUM,
    "mean": _engine.ReduceOp.AVERAGE,
    "max": _engine.ReduceOp.MAX,
    "min": _engine.ReduceOp.MIN,
    "any": _engine.ReduceOp.MAX,
    "all": _engine.ReduceOp.MIN,
    "first": _engine.ReduceOp.SUM,
}
#: attribute of a metric: the way in which its states are merged, or that of each variable by name
DECLARED = "_keras_dist_merge"
JOINS: dict[_engine.ReduceOp, Callable[..., Any]] = {
    _engine.ReduceOp.SUM: np.sum,
    _engine.ReduceOp.AVERAGE: np.mean,
    _engine.ReduceOp.MAX: np.max,
    _engine.ReduceOp.MIN: np.min,
}
ONE_NUMBER = "a function that returns one number for a batch, which is no mean over samples"
AGGREGATIONS = {"mean": "mean", "only_first_replica": "first"}


@dataclasses.dataclass(frozen=True)
class MetricState:
    """A variable of a metric."""

    variable: Any
    how: str
    reset: np.ndarray | None = None

    def contribution(self, own: np.ndarray) -> np.ndarray:
        """Returns what this rank reduces."""
        if own.dtype == bool or self.how in ("any", "all"):
            own = (own != 0).astype(np.uint8)
        if self.how == "first" and runtime.fit_rank() > 0:
            return np.zeros_like(own)
        return own if self.reset is None else own - self.reset

    def merged(self, reduced: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns the state of all ranks."""
        whole = reduced if self.reset is None else reduced + self.reset
        return whole.astype(dtype, copy=False)

    def joined(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the state of all ranks from their states, in rank order."""
        if self.how == "first":
            return values[0]
        contributions = [self.contribution(value) for value in values]
        return self.merged(JOINS[MERGES[self.how]](contributions, axis=0), values[0].dtype)


@contextlib.contextmanager
def merged_states(model: keras.Model) -> Iterator[None]:
    """Sets metrics of a model that can be merged to the states of all ranks. Collective; blocks."""
    states = states_of(model)
    own = {key: np.array(to_numpy(state.variable)) for key, state in states.items()}
    for key, value in _reduced(states, own).items():
        states[key].variable.assign(states[key].merged(value, own[key].dtype))
    try:
        yield
    finally:
        for key, value in own.items():
            states[key].variable.assign(value)


def states_of(model: keras.Model) -> dict[int, MetricState]:
    """Returns the states of the metrics that can be merged, by the id of the variable."""
    plans = [_plan(metric) for metric in metrics_of(model)]
    return {id(s.variable): s for plan in plans if isinstance(plan, list) for s in plan}


def unmergeable(model: keras.Model) -> list[str]:
    """Returns the names of metrics whose states cannot be merged, with the reasons."""
    metrics = metrics_of(model)
    plans = {metric.name: _plan(metric) for metric in metrics}
    found = [f"{name} ({plan})" for name, plan in plans.items() if isinstance(plan, str)]
    shapes = _output_shapes(model)
    undeclared = [metric for metric in metrics if DECLARED not in vars(metric)]
    return found + [f"{m.name} ({ONE_NUMBER})" for m in undeclared if averages_no_means(m, shapes)]


def _output_shapes(model: keras.Model) -> list[tuple[int, ...]]:
    """Returns the shapes of a sample of each output, as far as the model knows them."""
    try:
        outputs = keras.tree.flatten(model.outputs)
    except AttributeError:  # a model that is not a graph of layers
        return []
    shapes = [tuple(output.shape[1:]) for output in outputs]
    return [shape for shape in shapes if None not in shape]


def _reduced(states: dict[int, MetricState], own: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    reduced: dict[int, np.ndarray] = {}
    for op in dict.fromkeys(MERGES.values()):
        members = [key for key, state in states.items() if MERGES[state.how] is op]
        if not members:
            continue
        contributions = [states[key].contribution(own[key]) for key in members]
        paths = [states[key].variable.path for key in members]
        values = allreduce(runtime.fit_communicator(), contributions, paths, op)
        reduced.update(zip(members, values, strict=True))
    return reduced


# What is known of a metric, for its number of variables and what it declares.
_plans: "weakref.WeakKeyDictionary[Any, tuple[Any, list[MetricState] | str]]"
_plans = weakref.WeakKeyDictionary()


def _plan(metric: Any) -> list[MetricState] | str:
    """Returns the states of a metric, or why they cannot be merged."""
    key = len(metric.variables), str(vars(metric).get(DECLARED))
    if metric not in _plans or _plans[metric][0] != key:
        plan: list[MetricState] | str
        try:
            plan = list(_states(metric, None))
            if not plan and not _is_of_keras(metric):
                plan = "state outside of its variables"
        except UnmergeableMetric as reason:
            plan = str(reason)
        _plans[metric] = key, plan
    return _plans[metric][1]


def _states(metric: Any, declared_outside: Any) -> Iterator[MetricState]:
    """Yields the states of a metric and of those in it."""
    _check_names(metric)
    declared = vars(metric).get(DECLARED, declared_outside)
    own = own_variables(metric)
    is_of_keras = _is_of_keras(metric)
    reset = {} if is_of_keras else reset_values(metric)
    hows = {id(v): _told(v, declared, reset.get(id(v))) for v in own}
    rest = [variable for variable in own if hows[id(variable)] is None]
    if is_of_keras:
        found = ["sum"] * len(rest)
        function, _ = function_of(metric)
        if isinstance(function, keras.losses.Loss) and function.reduction == "sum":
            # A step adds the sum over its samples and counts once, though on every rank.
            found = ["max" if variable is metric.count else "sum" for variable in rest]
    else:
        found = behaviours(metric, rest) if rest or declared is None else []
    hows.update(zip(map(id, rest), found, strict=True))
    for variable in own:
        how, start = hows[id(variable)], reset.get(id(variable))
        counts_once = how == "sum" and start is not None and start.any()
        yield MetricState(variable, str(how), start if counts_once else None)
    for inner in metrics_inside(metric):
        yield from _states(inner, declared)


def _told(variable: Any, declared: Any, reset: np.ndarray | None) -> str | None:
    """Returns how a variable is merged as its metric or Keras says; `None` if neither does."""
    how = declared.get(variable.name) if isinstance(declared, dict) else declared
    if how is None and variable.aggregation == "sum" and variable.dtype == "bool":
        return "all" if reset is not None and reset.all() else "any"
    if how is not None or variable.aggregation == "sum":
        return how
    if variable.aggregation not in AGGREGATIONS:
        raise UnmergeableMetric(f"{variable.name} with aggregation={variable.aggregation!r}")
    return AGGREGATIONS[variable.aggregation]


def _check_names(metric: Any) -> None:
    declared = vars(metric).get(DECLARED)
    names = {variable.name for variable in metric.variables}
    if isinstance(declared, dict) and not declared.keys() <= names:
        raise errors.ArgumentError(
            f"variables of metric {metric.name!r}: {', '.join(sorted(names))}",
            ", ".join(sorted(declared.keys() - names)),
            "Pass names of its variables to keras_dist.metrics.merge.",
        )


def _is_of_keras(metric: Any) -> bool:
    """Returns whether Keras alone updates and resets the variables of a metric: their sums."""
    return is_part_of_keras(metric.update_state) and is_part_of_keras(metric.reset_state)
