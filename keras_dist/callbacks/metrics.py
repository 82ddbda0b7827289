"""Exact metrics of all ranks: metric states are merged before the result is computed."""

import warnings
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.callbacks.log_values import agreed_logs, as_numbers, is_close
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_session import Compute, FitSession, Logs
from keras_dist.training.metric_states import merged_states, unmergeable
from keras_dist.training.session_callback import VALIDATION, SessionCallback


class MetricAverageCallback(SessionCallback):
    """Computes the logs of `fit` and `evaluate` over the data of all ranks.

    A Keras metric computes its result from a state (totals, counts, confusion matrices). The
    callback merges the states of all ranks before the result is computed. Loss, accuracy and AUC
    are exact even if ranks have different numbers of samples; averages of results would not be.
    Every callback of the list receives these logs, regardless of its position.

    States that are sums, maxima or minima over samples are recognized, in metrics of your own as
    well; boolean states are combined by "or". `keras_dist.metrics.merge` declares other ways. The
    results of a metric that cannot be merged are averaged; the root names it in a warning, once per
    `fit` or `evaluate`.

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

    def __init__(self, device: str = "", root_rank: int = 0):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self._warned: FitSession | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Activates the reduction of logs, until the end of this `fit`."""
        if runtime.fit_size() > 1:
            self.session.transform_logs(Logs.COMPUTE, self._exact)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Activates the reduction of logs, until the end of this `evaluate`."""
        if runtime.fit_size() > 1:
            self.session.transform_logs(Logs.COMPUTE, self._exact)
            self.session.is_evaluation = True

    def _exact(self, logs: Any, compute: Compute) -> dict[str, Any]:
        """Returns the logs of an epoch from the states of all ranks."""
        model = self.model
        if self.session.is_evaluation and distributed_optimizers(model):
            _backends.active().finish_calls()
            # Others may have more batches.
            _engine.collectives.join_all(runtime.fit_communicators())
        # Not earlier: metrics create their variables at the first step.
        self._warn_once(model)
        with merged_states(model):
            found = as_numbers(dict(compute(logs)))
            exact = as_numbers(model.get_metrics_result())
        if not logs:  # no batch on this rank
            found = exact
        elif found.keys() != exact.keys():
            # A custom step returns other values, or metrics as they were after its last batch.
            own = as_numbers(model.get_metrics_result())
            last = {name for name in found.keys() & own.keys() if is_close(found[name], own[name])}
            found.update({name: exact[name] for name in last})
        return agreed_logs(found, bool(logs))

    def _warn_once(self, model: keras.Model) -> None:
        """Warns of metrics whose results are not exact."""
        outermost = self.session.outermost
        if self._warned is outermost or runtime.rank() != self.root_rank:
            return
        self._warned = outermost
        if found := unmergeable(model):
            warnings.warn(
                errors.explain(
                    runtime.where(),
                    "metrics whose states on the ranks can be merged",
                    f"{', '.join(found)}; the average of the ranks' results is logged instead",
                    "Declare how to merge the states with keras_dist.metrics.merge(metric, how), "
                    "and keep them in variables of Metric.add_variable.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )
