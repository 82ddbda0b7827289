"""Metrics of all ranks, exact: their states are added up, then the result is computed."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.models import LOGS, compiled_metrics
from keras_dist.ops.bucket_size import bucket_nbytes

__all__ = ["MetricAverageCallback"]

REDUCTIONS = {"sum": _engine.ReduceOp.SUM, "mean": _engine.ReduceOp.AVERAGE}


class MetricAverageCallback(keras.callbacks.Callback):
    """Makes the logs of an epoch and of `evaluate` those of one process over all the data.

    A Keras metric is a state (totals, counts, confusion tables) and a result computed from
    it. The states of all ranks are added, so loss, accuracy or AUC are exact also when the
    ranks hold different numbers of samples; an average of the ranks' results would not be.
    Every callback sees these logs, wherever it stands in the list. What a custom
    `train_step` returns beside the model's metrics is averaged, and so is a metric that
    keeps its state in variables which are not to be added (an `aggregation` other than
    `"sum"`): the root names those in a warning, once a `fit` or `evaluate`.

    Collective: every rank must pass it to `fit` or `evaluate`. It acts between the begin
    and the end of these two, so `evaluate` without it is this rank's own affair; but after
    a fit that ended in an exception it acts once more, until the next fit or evaluate with it.

    Args:
        device: accepted for scripts written for Horovod; has no effect.
        root_rank: the rank that warns. Defaults to 0.

    Raises:
        ArgumentError: `root_rank` is not a rank.
    """

    def __init__(self, device: str = "", root_rank: int = 0):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self._depth = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to act."""
        self._depth = 0
        self._enter()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to act, unless it does so already in the fit around."""
        self._enter()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops, unless a fit is going on."""
        self._leave()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops."""
        self._leave()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1 and runtime.size() > 1:
            model = self.model
            # On the instance, past Keras' tracking: it lives as long as this fit.
            model.__dict__.pop(LOGS, None)
            warns = runtime.rank() == self.root_rank
            object.__setattr__(model, LOGS, _exact(model, getattr(model, LOGS), warns))

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.model.__dict__.pop(LOGS, None)


def _exact(model: keras.Model, result: Callable[[Any], Any], warns: bool) -> Callable[[Any], Any]:
    """Returns Keras' own function of the logs, computed from the states of all ranks."""
    waiting = [_warn_of_averages] if warns else []

    def exact_result(logs: Any) -> Any:
        if waiting:  # only now: a metric makes its variables at the first step
            waiting.pop()(model)
        variables = [v for v in model.metrics_variables if v.aggregation in REDUCTIONS]
        own = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
        for variable, value in zip(variables, _reduced(variables, own), strict=True):
            variable.assign(value)
        try:
            combined = dict(result(logs))
            exact = model.get_metrics_result()
        finally:
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)
        if not logs:  # no batch on this rank: the others have logs with these names
            combined = dict(exact)
        # A custom step may return more than metrics, or the values of its last batch.
        combined.update({name: exact[name] for name in combined if name in exact})
        return _averaged(combined)

    return exact_result


def _warn_of_averages(model: keras.Model) -> None:
    """Names the metrics whose results are no exact ones."""
    compiled: Any = compiled_metrics(model)
    averaged = [
        f"{metric.name} ({variable.aggregation!r})"
        for outer in model.metrics
        for metric in (outer.metrics if outer is compiled else [outer])
        for variable in metric.variables
        if variable.aggregation != "sum"
    ]
    if averaged:
        warnings.warn(
            errors.explain(
                runtime.where(),
                "metrics whose state can be added over the ranks (aggregation='sum')",
                f"{', '.join(dict.fromkeys(averaged))}; they are averaged",
                "Keep totals and counts, in variables of Metric.add_variable, where one process "
                "over all the data would give another value than the ranks' average.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )


def _reduced(variables: list[Any], values: list[np.ndarray]) -> list[np.ndarray]:
    reduced = list(values)
    for aggregation, op in REDUCTIONS.items():
        members = [i for i, v in enumerate(variables) if v.aggregation == aggregation]
        results = _reduce([values[i] for i in members], [variables[i].path for i in members], op)
        for i, value in zip(members, results, strict=True):
            reduced[i] = value
    return reduced


def _averaged(logs: dict[str, Any]) -> dict[str, Any]:
    """Averages the numbers of a log, in the order of their names.

    It leaves metrics that are exact, and so equal on all ranks, as they are; the others come
    out equal as well, and callbacks that decide by them decide alike.
    """
    arrays = {name: np.asarray(keras.ops.convert_to_numpy(logs[name])) for name in sorted(logs)}
    scalars = {n: a.astype(np.float64) for n, a in arrays.items() if a.ndim == 0}
    values = _reduce(list(scalars.values()), list(scalars), _engine.ReduceOp.AVERAGE)
    return {**logs, **{n: float(v) for n, v in zip(scalars, values, strict=True)}}


def _reduce(values: list[np.ndarray], names: list[str], op: _engine.ReduceOp) -> list[np.ndarray]:
    comm = runtime.communicator()
    options = _engine.OpOptions(op)
    return _engine.collectives.allreduce(comm, values, names, options, bucket_nbytes(comm))
