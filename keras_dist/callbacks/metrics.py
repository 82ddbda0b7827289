"""Exact metrics of all ranks: metric states are merged before the result is computed."""

import hashlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, _engine, runtime
from keras_dist.training.fit_session import Compute, FirstStep, FitSession, Logs
from keras_dist.training.metric_states import merged_states, unmergeable
from keras_dist.training.model_state import bytes_of, to_numpy
from keras_dist.training.rank_exchanges import allgather_object, allreduce
from keras_dist.training.session_callback import VALIDATION, SessionCallback

#: names of a value in nested logs, the outermost first
Path = tuple[Any, ...]


class MetricAverageCallback(SessionCallback):
    """Computes the logs of `fit` and `evaluate` over the data of all ranks.

    A Keras metric computes its result from a state (totals, counts, confusion matrices). The
    callback merges the states of all ranks before the result is computed. Loss, accuracy and AUC
    are exact even if ranks have different numbers of samples; averages of results would not be.
    Every callback of the list receives these logs, regardless of its position.

    States that are sums, maxima or minima over samples, and constants, are recognized, in metrics
    of your own as well; boolean states are combined by "or", or by "and" if a reset sets them to
    true. `keras_dist.metrics.merge` declares other ways. The
    results of a metric that cannot be merged are averaged; the root names it in a warning, once per
    `fit` or `evaluate`. A function that returns one number for a batch, such as the root of a mean,
    is averaged and named as well. The mean over the samples of a batch is not named: it is exact if
    the batches of all ranks have the same size.

    Values that a custom `train_step` returns in addition to the model's metrics, also in nested
    dicts, are averaged: numbers over the ranks that have them, arrays if they have one shape. A
    boolean is true if it is on any rank. Text and `None` stay those of the rank.

    Collective: every rank must pass the callback to `fit` or `evaluate`. `evaluate` without the
    callback is local, also within a `fit` with it.

    Args:
        device: ignored; accepted for compatibility with Horovod.
        root_rank: rank that warns. Defaults to 0.

    Raises:
        ArgumentError: `root_rank` is not a rank.
    """

    agrees_on = VALIDATION
    evaluates_together = True

    def __init__(self, device: str = "", root_rank: int = 0):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self._warned: FitSession | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Activates the reduction of logs, until the end of this `fit`."""
        if runtime.fit_size() > 1:
            self.session.transform_logs(Logs.COMPUTE, self._exact)
            self.session.before_first_step(FirstStep.METRICS, self._build)

    def _build(self, *arguments: Any) -> tuple[Any, ...]:
        # Not `self.model`, which on JAX gives the model the state that this step donates.
        _backends.active().build_metrics(self.session.model, arguments[-1])
        return arguments

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Activates the reduction of logs, until the end of this `evaluate`."""
        if runtime.fit_size() > 1:
            self.session.transform_logs(Logs.COMPUTE, self._exact)
            self.session.is_evaluation = True

    def _exact(self, logs: Any, compute: Compute) -> dict[str, Any]:
        """Returns the logs of an epoch from the states of all ranks."""
        model = self.model
        if self.session.is_evaluation:
            _backends.active().finish_calls()
            # Others may have more batches.
            _engine.collectives.join_all(runtime.fit_communicators())
        # Not earlier: metrics create their variables at the first step.
        self._warn_once(model)
        with merged_states(model):
            found = as_numbers(compute(logs))
            exact = as_numbers(model.get_metrics_result())
        if not logs:  # no batch on this rank
            found = exact
        elif found.keys() != exact.keys():
            # A custom step returns other values, or metrics as they were after its last batch.
            own = as_numbers(model.get_metrics_result())
            found.update({at: exact[at] for at in own if is_close(found.get(at), own[at])})
        return agreed_logs(found, bool(logs))

    def _warn_once(self, model: keras.Model) -> None:
        """Warns of metrics whose results are not exact."""
        outermost = self.session.outermost
        if self._warned is outermost:
            return
        self._warned = outermost
        # On all ranks: functions that are tried may communicate.
        if (found := unmergeable(model)) and runtime.rank() == self.root_rank:
            self.warn(
                "metrics whose states on the ranks can be merged",
                f"{', '.join(found)}; the average of the ranks' results is logged instead",
                "Declare how to merge the states with keras_dist.metrics.merge(metric, how), "
                "and keep them in variables of Metric.add_variable. Let a function return one "
                "number for each sample.",
            )


def as_numbers(logs: Mapping[Any, Any]) -> dict[Path, Any]:
    """Returns the values of nested logs by path; numbers, tensors and arrays as numpy arrays."""
    found: dict[Path, Any] = {}
    for name, value in logs.items():
        if isinstance(value, dict) and value:
            found.update({(name, *path): leaf for path, leaf in as_numbers(value).items()})
        else:
            found[name,] = value if (own := number_of(value)) is None else own
    return found


def is_close(found: Any, expected: Any) -> bool:
    """Returns whether two values of logs are arrays that are equal up to rounding."""
    if not (isinstance(found, np.ndarray) and isinstance(expected, np.ndarray)):
        return False
    is_alike = found.shape == expected.shape
    return is_alike and np.allclose(found, expected, rtol=1e-5, equal_nan=True)


def agreed_logs(logs: Mapping[Path, Any], counts: bool) -> dict[str, Any]:
    """Returns nested logs with the averages of numbers, by path. Collective; blocks."""
    # Equal on all ranks, so that callbacks decide alike. Scalars become floats. Booleans are true
    # if they are on any rank. Numbers that are equal on all ranks do not change, and other values,
    # such as text and `None`, stay those of the rank. A rank that lacks a scalar, or has `None` in
    # its place, receives that of the others. Arrays of one shape on all ranks are averaged.
    own = {path: value for path, value in logs.items() if isinstance(value, np.ndarray)}
    mine = counts, {path: _described(value) for path, value in own.items()}
    everyone = allgather_object(mine, "averaging the logs")
    counting = [found for counted, found in everyone if counted]
    if not counting:  # as in Keras on torch, whose epochs without batches have no logs
        return {}
    agreed: dict[Path, Any] = {}
    arrays: list[Path] = []
    for path in dict.fromkeys(path for found in counting for path in found):
        shapes = {found[path][0] if path in found else None for _, found in everyone}
        contents = [found[path][1] for found in counting if path in found]
        if shapes <= {(), None}:
            agreed[path] = _average(contents)
        elif len(shapes) == 1 and len(set(contents)) > 1:
            arrays.append(path)
    agreed.update(_averages(own, arrays, counts, len(counting)))
    # What is no number on this rank stays; what this rank lacks comes last.
    kept = {path: leaf for path, leaf in logs.items() if leaf is not None and path not in own}
    return _nested({**logs, **agreed, **kept})


def _average(values: list[bool | float]) -> bool | float:
    if all(isinstance(value, bool) for value in values):
        return any(values)
    return float(values[0]) if len(set(values)) == 1 else float(np.mean(values))


def _averages(
    own: dict[Path, np.ndarray], paths: list[Path], counts: bool, counting: int
) -> dict[Path, np.ndarray]:
    """Returns averages of arrays over the ranks that count. Collective unless there are none."""
    if not paths:
        return {}
    values = [own[path] for path in paths]
    floats = [value if value.dtype.kind == "f" else value.astype(float) for value in values]
    names = [".".join(map(str, path)) for path in paths]
    sums = allreduce(runtime.fit_communicator(), [value * counts for value in floats], names)
    return {path: value / counting for path, value in zip(paths, sums, strict=True)}


def _described(value: np.ndarray) -> tuple[tuple[int, ...], bool | float | bytes]:
    """Returns the shape of an array, and its value, or for larger ones a digest."""
    if value.ndim:
        return value.shape, hashlib.blake2b(bytes_of(value).data, digest_size=16).digest()
    return (), bool(value) if value.dtype == bool else float(value)


def number_of(leaf: Any) -> np.ndarray | None:
    """Returns a copy of a number, tensor or array; `None` for other values."""
    if leaf is None or isinstance(leaf, str | bytes):
        return None
    try:
        array = np.array(to_numpy(leaf))
    except Exception:  # of a framework, about a value that is no number
        return None
    if array.dtype.kind == "V" and not array.dtype.names:  # such as bfloat16
        return array.astype(np.float32)
    return array if array.dtype.kind in "biuf" else None


def _nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns nested logs of values by path; where ranks nest otherwise, the first one counts."""
    logs: dict[Any, Any] = {}
    for (*outer, name), value in values.items():
        inner: Any = logs
        for each in outer:
            inner = inner.setdefault(each, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.setdefault(name, value)
    return logs
