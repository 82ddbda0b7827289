"""Exact metrics of all ranks: metric states are summed before the result is computed."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.models import compiled_metrics
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.tasks import Compute, Task, task_of
from keras_dist.training.trainer import watch_models

__all__ = ["MetricAverageCallback"]

REDUCTIONS = {"sum": _engine.ReduceOp.SUM, "mean": _engine.ReduceOp.AVERAGE}


class MetricAverageCallback(keras.callbacks.Callback):
    """Computes the logs of `fit` and `evaluate` over the data of all ranks.

    A Keras metric computes its result from a state (totals, counts, confusion matrices). The
    callback sums the states of all ranks before the result is computed. Loss, accuracy and AUC
    are exact even if ranks have different numbers of samples; averages of results would not be.
    Every callback of the list receives these logs, regardless of its position. Values that a
    custom `train_step` returns in addition to the model's metrics are averaged. Metrics whose
    variables have an `aggregation` other than `"sum"` are averaged as well; the root names them
    in a warning, once per `fit` or `evaluate`.

    Collective: every rank must pass the callback to `fit` or `evaluate`. `evaluate` without the
    callback is local, also within a `fit` with it.

    Args:
        device: ignored; accepted for compatibility with Horovod.
        root_rank: rank that warns. Defaults to 0.

    Raises:
        ArgumentError: `root_rank` is not a rank.
    """

    def __init__(self, device: str = "", root_rank: int = 0):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        watch_models()  # without a distributed optimizer, no other code has called it
        self.root_rank = root_rank
        self._warned: Task | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Activates the reduction of logs, until the end of this `fit`."""
        self._reduce()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Activates the reduction of logs, until the end of this `evaluate`."""
        self._reduce()
        task_of(self.model).is_evaluation = runtime.size() > 1

    def _reduce(self) -> None:
        if runtime.size() > 1:
            task = task_of(self.model)
            warns = runtime.rank() == self.root_rank and self._warned is not task.outermost
            self._warned = task.outermost
            task.reduce_logs = _exact(self.model, warns)


def _exact(model: keras.Model, warns: bool) -> Callable[[Compute, Any], Any]:
    """Returns a function that computes Keras' logs from the states of all ranks."""
    pending_warnings = [_warn_of_averages] if warns else []

    def exact_result(result: Compute, logs: Any) -> Any:
        if task_of(model).is_evaluation and distributed_optimizers(model):
            _backends.active().finish_calls()
            _engine.collectives.join_all(runtime.communicators())  # others may have more batches
        if pending_warnings:  # not earlier: metrics create their variables at the first step
            pending_warnings.pop()(model)
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
        if not logs:  # no batch on this rank; other ranks have logs with these names
            combined = dict(exact)
        # A custom step may return values besides metrics, or metrics of its last batch.
        combined.update({name: exact[name] for name in combined if name in exact})
        return _averaged(combined)

    return exact_result


def _warn_of_averages(model: keras.Model) -> None:
    """Warns of metrics whose results are not exact."""
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
                "metrics whose state can be summed over the ranks (aggregation='sum')",
                f"{', '.join(dict.fromkeys(averaged))}; they are averaged",
                "If the average of the ranks' results is not the result over all data, keep totals "
                "and counts in variables of Metric.add_variable.",
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
    """Averages the scalars of the logs over the ranks, in the order of their names.

    Exact metrics are equal on all ranks and do not change. All other scalars become equal, so
    that callbacks decide alike on all ranks.
    """
    arrays = {name: np.asarray(keras.ops.convert_to_numpy(logs[name])) for name in sorted(logs)}
    scalars = {n: a.astype(np.float64) for n, a in arrays.items() if a.ndim == 0}
    values = _reduce(list(scalars.values()), list(scalars), _engine.ReduceOp.AVERAGE)
    return {**logs, **{n: float(v) for n, v in zip(scalars, values, strict=True)}}


def _reduce(values: list[np.ndarray], names: list[str], op: _engine.ReduceOp) -> list[np.ndarray]:
    comm = runtime.communicator()
    options = _engine.OpOptions(op)
    return _engine.collectives.allreduce(comm, values, names, options, bucket_nbytes(comm))
