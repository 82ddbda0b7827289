"""Metrics over the data of all ranks.

`keras_dist.callbacks.MetricAverageCallback` merges the states of Keras' metrics. A metric may say
how its states are merged:

```python
class LargestError(keras.metrics.Metric):
    def __init__(self, name="largest_error", **options):
        super().__init__(name=name, **options)
        self.largest = self.add_variable((), "zeros", name="largest")
        keras_dist.metrics.merge(self, "max")
```
"""

from collections.abc import Mapping

import keras

from keras_dist import errors, runtime
from keras_dist.training.metric_states import DECLARED, MERGES

__all__ = ["merge"]


def merge(metric: keras.metrics.Metric, how: str | Mapping[str, str]) -> keras.metrics.Metric:
    """Declares how the states of a metric on the ranks are merged to the state over all the data.

    Without a declaration, sums, maxima, minima and constants of a metric are recognized, boolean
    states are true if they are on any rank, or on all if a reset sets them to true, and variables
    with another `aggregation` of Keras than `"sum"` are merged accordingly: `"mean"` as `"mean"`,
    `"only_first_replica"` as `"first"`.

    A copy of the metric that is made from its configuration has the declaration if the constructor
    of the metric makes it.

    Args:
        metric: the metric.
        how: for all variables of the metric, or for each variable by its name: `"sum"`, `"mean"`,
            `"max"`, `"min"`, `"any"` (not 0 on any rank), `"all"` (not 0 on all ranks) or `"first"`
            (the state of rank 0). A sum counts the value of a variable after a reset once.
            Variables that are not named are merged as without a declaration.

    Returns:
        The metric.

    Raises:
        ArgumentTypeError: `metric` is no metric.
        ArgumentError: `how` is unknown. A name that is no variable of the metric is an error in
            `fit`.

    Example:
    ```python
    metric = keras_dist.metrics.merge(keras.metrics.Mean(name="level"), "max")
    ```
    """
    if not isinstance(metric, keras.metrics.Metric):
        raise errors.ArgumentTypeError(
            runtime.where(),
            "a keras.metrics.Metric",
            f"{metric!r} of type {type(metric).__name__}",
            "Pass the metric that you pass to compile.",
        )
    hows = list(how.values()) if isinstance(how, Mapping) else [how]
    unknown = [each for each in hows if not isinstance(each, str) or each not in MERGES]
    if unknown or not hows:
        raise errors.ArgumentError(
            runtime.where(),
            f"how to be one of {', '.join(map(repr, MERGES))}, or a dict of these by variable",
            ", ".join(map(repr, unknown)) or repr(how),
            "Omit the call for sums, maxima and minima.",
        )
    # Past Keras' tracking, which would make a dict a part of the metric.
    object.__setattr__(metric, DECLARED, dict(how) if isinstance(how, Mapping) else how)
    return metric
