"""Names of Keras: metrics."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_dist._compat.contract import Owner


def metrics_of(model: Any) -> list[Any]:
    """Returns the metrics of a model, with those passed to `compile` one by one."""
    compiled = model._compile_metrics
    return [
        metric
        for outer in model.metrics
        for metric in (outer.metrics if outer is compiled else [outer])
    ]


def build_metrics(model: Any, batch: Any) -> None:
    """Makes the metrics that are passed to `compile` by name, from specifications of a batch."""
    # Keras does so before the first step on JAX and torch, and within it on TensorFlow.
    compiled = model._compile_metrics
    if compiled is not None and not compiled.built:
        model._symbolic_build(data_batch=batch)


def build_from(model: Any, data: Any, begins: bool) -> None:
    """Makes what a fit or an evaluation makes from a batch of data, which is read if need be."""

    def first() -> Iterator[Any]:
        if begins:  # Keras calls the hook at the end of an epoch before the first one
            data.on_epoch_begin()
        yield 0, 0, [data[0]]

    model._symbolic_build(iterator=first())


def metrics_inside(metric: Any) -> list[Any]:
    """Returns the metrics that are attributes of a metric."""
    return list(metric._metrics)


def own_variables(metric: Any) -> list[Any]:
    """Returns the variables of a metric, without those of metrics in it."""
    return list(metric._variables)


def samples_weighted(loss: Any) -> Any:
    """Returns the number of samples in a mean of losses; `None` for other metrics."""
    return loss.count if isinstance(loss, keras.metrics.Mean) else None


def function_of(metric: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function whose values a metric averages, or `None`, and its further arguments."""
    is_wrapper = isinstance(metric, keras.metrics.MeanMetricWrapper)
    return (metric._fn, metric._fn_kwargs) if is_wrapper else (None, {})


METRIC = Owner("keras:metrics.Metric")
WRAPPER = Owner("keras:metrics.MeanMetricWrapper")
TRIED = "to try the function of a metric", "metrics that are not exact would not be named"
MERGED = "to merge the states of the ranks", "metrics of an epoch would not be exact"

CONTRACT = (
    Owner("keras:Model").attribute("_compile_metrics", *MERGED),
    Owner("keras:Model").method(
        "_symbolic_build(iterator, data_batch)",
        "to make metrics before the first step is traced, and before workers read data",
        "TensorFlow would trace the first step twice, others repeat batches of workers",
        on_use=True,
    ),
    METRIC.attribute("_metrics", *MERGED),
    METRIC.attribute("_variables", *MERGED),
    WRAPPER.attribute("_fn", *TRIED),
    WRAPPER.attribute("_fn_kwargs", *TRIED),
    Owner("keras:metrics.Mean").attribute(
        "count", "to count the samples of an epoch", "the logs would lack the throughput"
    ),
)
