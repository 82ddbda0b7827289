"""Metrics on ranks with unequal shares equal those of one process on all the data."""

import collections
import inspect
import warnings
from typing import ClassVar

import keras
import numpy as np
import pytest
from keras import ops
from small_training import agreed

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import MetricAverageCallback
from keras_dist.training import metric_trials

pytestmark = pytest.mark.jobs("torch-2")
on_all_backends = pytest.mark.jobs("tensorflow-2", "jax-2")

BACKEND = keras.backend.backend()
SAMPLES, CLASSES = 30, 3


def share(*arrays):
    """The rows of this rank: twice as many on the second rank as on the first, and so on."""
    size = keras_dist.size()
    edges = np.cumsum(np.arange(size + 1)) * SAMPLES // (size * (size + 1) // 2)
    return tuple(array[edges[keras_dist.rank()] : edges[keras_dist.rank() + 1]] for array in arrays)


def compiled(metrics, **options):
    """A model whose predictions are its inputs, of `CLASSES` features."""
    model = keras.Sequential([keras.Input((CLASSES,)), keras.layers.Activation("linear")])
    # TensorFlow would trace each metric.
    options = {"loss": "mse", "run_eagerly": BACKEND == "tensorflow", **options}
    model.compile(keras.optimizers.SGD(0.0), metrics=metrics, **options)
    return model


def values_of(result):
    return {name: np.asarray(value) for name, value in result.items()}


def assert_exact(found, expected):
    assert agreed({name: value.tolist() for name, value in found.items()})
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


# --- Metrics of Keras


def without_options(*names):
    return {name: [{}] for name in names}


BINARY = {
    "AUC": [{}, {"curve": "PR"}, {"thresholds": [0.3, 0.6]}, {"from_logits": True}],
    "FalsePositives": [{"thresholds": [0.2, 0.7]}],
    "PrecisionAtRecall": [{"recall": 0.5}],
    "Recall": [{"thresholds": 0.4}],
    "RecallAtPrecision": [{"precision": 0.5}],
    "SensitivityAtSpecificity": [{"specificity": 0.5}],
    "SpecificityAtSensitivity": [{"sensitivity": 0.5}],
    **without_options("Accuracy", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "Hinge"),
    **without_options("FalseNegatives", "Precision", "SquaredHinge", "TrueNegatives"),
    **without_options("TruePositives"),
}
CATEGORICAL = {
    "AUC": [{"multi_label": True, "num_labels": CLASSES}],
    "F1Score": [{}, {"average": "weighted"}],
    "FBetaScore": [{"beta": 2.0, "average": "micro"}],
    "OneHotIoU": [{"num_classes": CLASSES, "target_class_ids": [0, 2]}],
    "OneHotMeanIoU": [{"num_classes": CLASSES}],
    "Precision": [{"class_id": 1, "top_k": 2}],
    "TopKCategoricalAccuracy": [{"k": 2}],
    **without_options("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge"),
    **without_options("KLDivergence", "Poisson"),
}
SPARSE = {
    "IoU": [{"num_classes": CLASSES, "target_class_ids": [1], "sparse_y_pred": False}],
    "MeanIoU": [{"num_classes": CLASSES, "sparse_y_pred": False}],
    "SparseTopKCategoricalAccuracy": [{"k": 2}],
    **without_options("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"),
}
REGRESSION = {
    "MeanMetricWrapper": [{"fn": lambda y_true, y_pred: ops.max(y_true - y_pred, axis=-1)}],
    "R2Score": [{}, {"class_aggregation": None}, {"num_regressors": 2}],
    **without_options("ConcordanceCorrelation", "CosineSimilarity", "LogCoshError"),
    **without_options("MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError"),
    **without_options("MeanSquaredLogarithmicError", "PearsonCorrelation", "RootMeanSquaredError"),
}
if BACKEND == "jax":  # Keras cannot trace it
    del REGRESSION["R2Score"][-1]
# Classes to derive from, and those of one argument, which are in other tests below.
OTHERS = {"Mean", "Metric", "Sum"}


def data_of(kind):
    rng = np.random.default_rng(1)
    predictions = rng.random((SAMPLES, CLASSES), np.float32) + 0.01
    labels = rng.integers(0, CLASSES, SAMPLES)
    if kind in (CATEGORICAL, SPARSE):
        predictions /= predictions.sum(axis=1, keepdims=True)
    if kind is SPARSE:
        return predictions, labels[:, None]
    if kind is CATEGORICAL:
        return predictions, np.eye(CLASSES, dtype="float32")[labels]
    targets = rng.random((SAMPLES, CLASSES), np.float32)
    return predictions, targets if kind is REGRESSION else (targets > 0.5).astype("float32")


@pytest.mark.long
@on_all_backends
@pytest.mark.parity("every metric of Keras is exact with unequal shares")
@pytest.mark.parametrize("kind", [BINARY, CATEGORICAL, SPARSE, REGRESSION])
def test_every_metric_of_keras_is_exact_with_unequal_shares(kind):
    metrics = [
        getattr(keras.metrics, name)(name=f"{name}_{number}", **options)
        for name, variants in kind.items()
        if hasattr(keras.metrics, name)  # the oldest versions lack some
        for number, options in enumerate(variants)
    ]
    # The mean squared error of a class has no meaning.
    model = compiled(metrics, loss=lambda y_true, y_pred: ops.mean(y_pred, axis=-1))
    x, y = data_of(kind)
    options = {"batch_size": SAMPLES, "verbose": 0, "return_dict": True}
    expected = values_of(model.evaluate(x, y, **options))
    assert len(expected) == len(metrics) + 1
    found = model.evaluate(*share(x, y), callbacks=[MetricAverageCallback()], **options)
    assert_exact(values_of(found), expected)


def test_no_metric_of_keras_is_left_out():
    kinds = [kind for kind in vars(keras.metrics).values() if inspect.isclass(kind)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, keras.metrics.Metric)}
    assert names <= {*BINARY, *CATEGORICAL, *SPARSE, *REGRESSION, *OTHERS}


def test_metrics_of_outputs_of_layers_and_of_the_model_are_exact():
    class Watched(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.total = keras.metrics.Sum("watched_total")
            self.mean = keras.metrics.Mean("watched_mean")

        def call(self, inputs):
            self.total.update_state(inputs)
            self.mean.update_state(inputs)
            return inputs

    class Counting(keras.Model):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.count.update_state(ops.ones_like(y["a"][:, 0]))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    inputs = keras.Input((CLASSES,))
    outputs = {name: keras.layers.Activation("linear", name=name) for name in "ab"}
    model = Counting(inputs, {name: layer(Watched()(inputs)) for name, layer in outputs.items()})
    model.count = keras.metrics.Sum("count")
    model.compile(
        keras.optimizers.SGD(0.0),
        {"a": "mse", "b": "mae"},
        metrics={"a": ["mae", keras.metrics.R2Score(name="r2")], "b": ["mse"]},
        weighted_metrics={"a": ["mse"], "b": [keras.metrics.RootMeanSquaredError(name="rmse")]},
    )
    x, y = data_of(REGRESSION)
    weights = np.linspace(0.0, 2.0, SAMPLES, dtype="float32")
    options = {"batch_size": SAMPLES, "verbose": 0, "return_dict": True}

    def data(x, y, weights):
        return {"x": x, "y": {"a": y, "b": 1 - y}, "sample_weight": {"a": weights, "b": weights}}

    expected = values_of(model.evaluate(**data(x, y, weights), **options))
    assert expected["count"] == SAMPLES
    own = data(*share(x, y, weights))
    callbacks = [MetricAverageCallback()]
    assert_exact(values_of(model.evaluate(**own, callbacks=callbacks, **options)), expected)


# --- Metrics of one's own


class Own(keras.metrics.Metric):
    """A metric that is named after its class; `states` gives dtype and reset value by name."""

    states: ClassVar = {"state": ("float32", 0.0)}

    def __init__(self, **options):
        super().__init__(name=type(self).__name__, **options)
        for name, (dtype, value) in self.states.items():
            start = keras.initializers.Constant(value)
            setattr(self, name, self.add_variable((), start, dtype=dtype, name=name))

    def reset_state(self):
        for name, (_, value) in self.states.items():
            getattr(self, name).assign(value)

    def result(self):
        return self.state + 0.0


class Several(Own):
    """Has a sum of integers, maxima from two sides, a minimum and a boolean."""

    states: ClassVar = {
        "count": ("int32", 0),
        "highest": ("float32", -np.inf),
        "low": ("float32", np.inf),
        "high": ("float32", -np.inf),
        "ever": ("bool", False),
    }

    def update_state(self, y_true, y_pred, sample_weight=None):
        before, now = self.highest + 0.0, ops.max(y_true) - 9.0
        self.count.assign_add(ops.shape(y_true)[0])
        self.highest.assign(ops.where(now > before, now, before))
        self.low.assign(ops.minimum(self.low, ops.min(y_true)))
        self.high.assign(ops.maximum(self.high, ops.max(y_true)))
        self.ever.assign(ops.logical_or(self.ever, ops.any(y_true >= 8.0)))

    def result(self):
        return {name: ops.cast(getattr(self, name), "float32") for name in self.states}


class OfClasses(Own):
    states: ClassVar = {}

    def __init__(self, **options):
        super().__init__(**options)
        self.sums = self.add_variable((CLASSES, CLASSES), "zeros", name="sums")
        self.most = self.add_variable((CLASSES,), "zeros", name="most")

    def reset_state(self):
        self.sums.assign(ops.zeros((CLASSES, CLASSES)))
        self.most.assign(ops.zeros(CLASSES))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sums.assign_add(ops.matmul(ops.transpose(y_true), y_pred + 1.0))
        self.most.assign(ops.maximum(self.most, ops.max(y_true, axis=0)))

    def result(self):
        return {"first": ops.sum(self.sums[0] + 0.0), "last": self.most[-1] + 0.0}


class Smoothed(Own):
    states: ClassVar = {"state": ("float32", 1.0), "count": ("float32", 2.0)}

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(ops.add(self.state, ops.sum(y_true)))
        self.count.assign_add(ops.cast(ops.size(y_true), "float32"))

    def result(self):
        return self.state / self.count


class Largest(Own):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(ops.maximum(self.state, ops.max(ops.abs(y_true - y_pred))))


class Undeclared(Own):
    """Whether all targets were small, which no method declares."""

    states: ClassVar = {"state": ("bool", True)}

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(ops.logical_and(self.state, ops.all(y_true < 5.0)))

    def result(self):
        return ops.cast(self.state, "float32")


class Always(Undeclared):
    def __init__(self, **options):
        super().__init__(**options)
        keras_dist.metrics.merge(self, "all")


class Scaled(Own):
    """Has constants in variables: one that a batch reads, and one that the result reads."""

    states: ClassVar = {"state": ("float32", 0.0), "limit": ("float32", 2.0), "unit": ("int32", 4)}

    def reset_state(self):
        self.state.assign(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        is_large = ops.abs(y_true - y_pred) > self.limit
        self.state.assign_add(ops.sum(ops.cast(is_large, "float32")))

    def result(self):
        return self.state / ops.cast(self.unit, "float32")


class Product(Own):
    states: ClassVar = {"state": ("float32", 1.0), "seen": ("float32", 0.0)}

    def __init__(self, **options):
        super().__init__(**options)
        keras_dist.metrics.merge(self, {"state": "max"})

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(self.state * 2.0)
        self.seen.assign_add(ops.mean(ops.ones_like(y_true)))


class Nested(Own):
    states: ClassVar = {}

    def __init__(self, **options):
        super().__init__(**options)
        self.mean, self.largest = keras.metrics.Mean(), Largest()

    def reset_state(self):
        self.mean.reset_state()
        self.largest.reset_state()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(y_true)
        self.largest.update_state(y_true, y_pred)

    def result(self):
        return {"mean": self.mean.result(), "inner": {"largest": self.largest.result()}}


class Returned(Own):
    """Keras itself refuses it on JAX."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign_add(ops.sum(y_true))

    def result(self):
        return self.state


OWN = [Several, OfClasses, Smoothed, Largest, Always, Undeclared, Scaled, Product, Nested]
OWN += [Returned] if BACKEND != "jax" else []


def logs_of_batches(model, y, batch_size, callbacks):
    options = {"batch_size": batch_size, "verbose": 0, "callbacks": callbacks}
    return model.evaluate(y * 0, y, return_dict=True, **options)


def every_log(model, x, y, callbacks):
    """The logs of an epoch, of its validation, and of `evaluate`, in batches of 5."""
    options = {"batch_size": 5, "verbose": 0, "callbacks": callbacks}
    fitted = model.fit(x, y, epochs=2, validation_data=(x, y), **options).history
    evaluated = model.evaluate(x, y, return_dict=True, **options)
    logs = {**{name: each[-1] for name, each in fitted.items()}, **evaluated}
    return {name: value for name, value in logs.items() if "loss" not in name}


@pytest.mark.long
@on_all_backends
@pytest.mark.parity("metrics of your own: sums, maxima, minima, booleans, nested results")
def test_metrics_of_ones_own_are_exact():
    model = compiled([make() for make in OWN], run_eagerly=False)
    x = np.zeros((SAMPLES, CLASSES), "float32")
    y = np.linspace(-7.0, 8.0, SAMPLES * CLASSES, dtype="float32").reshape(SAMPLES, CLASSES)
    expected = every_log(model, x, y, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = every_log(model, *share(x, y), [MetricAverageCallback()])
    # A rank doubles it at each of its own batches, and the largest of the ranks is logged.
    most = -(-SAMPLES * 2 // (keras_dist.size() + 1) // 5)
    for name in ("Product", "val_Product"):
        assert found.pop(name) == 2.0**most
        del expected[name]
    assert_exact(values_of(found), values_of(expected))


class OfBatches(Own):
    """Counts batches, whose parts the ranks have, and adds up their means."""

    states: ClassVar = {
        "batches": ("int32", 0),
        "ones": ("float32", 0.0),
        "total": ("float32", 0.0),
    }

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.batches.assign_add(1)
        self.ones.assign_add(ops.mean(ops.ones_like(y_true)))
        self.total.assign_add(ops.sum(y_true))

    def result(self):
        return {
            "batches": self.batches + 0,
            "ones": self.ones + 0.0,
            "of a batch": self.total / self.ones,
        }


def test_ranks_have_parts_of_the_batches_that_a_metric_counts():
    size = keras_dist.size()
    y = np.arange(8 * size * CLASSES, dtype="float32").reshape(8 * size, CLASSES)
    expected = logs_of_batches(compiled([OfBatches()]), y, 4 * size, [])
    mine = y[keras_dist.rank() :: size]
    found = logs_of_batches(compiled([OfBatches()]), mine, 4, [MetricAverageCallback()])
    assert expected["batches"] == 2
    assert_exact(values_of(found), values_of(expected))


class Hits(Own):
    """Counts samples of the right class; of targets in columns, each is compared with all."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        classes = ops.cast(ops.argmax(y_pred, axis=-1), "float32")
        self.state.assign_add(ops.sum(ops.cast(ops.equal(y_true, classes), "float32")))


class RootOfBatches(Own):
    states: ClassVar = {"state": ("float32", 0.0), "batches": ("float32", 0.0)}

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign_add(ops.sqrt(ops.mean(ops.square(y_true - y_pred))))
        self.batches.assign_add(1.0)

    def result(self):
        return self.state / self.batches


def test_a_trial_of_halves_tells_of_batches_only_with_a_number_of_batches():
    hits, root = Hits(), RootOfBatches()
    assert metric_trials.behaviours(hits, hits.variables) == ["sum"]
    with pytest.raises(metric_trials.UnmergeableMetric, match="state, which is no sum over"):
        metric_trials.behaviours(root, root.variables)


class Last(Own):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(ops.mean(y_true))


class Drifting(Own):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign_add(0.1 * (ops.mean(y_true) - self.state))


class Pair(Own):
    states: ClassVar = {"state": ("float32", 0.0), "best": ("float32", 0.0)}

    def update_state(self, y_true, y_pred, sample_weight=None):
        best, now = self.best + 0.0, ops.max(y_true)
        self.state.assign(ops.where(now > best, ops.min(y_true), self.state + 0.0))
        self.best.assign(ops.maximum(best, now))


class TopThree(Own):
    """The largest targets, in order: looks like a maximum for each place."""

    states: ClassVar = {}

    def __init__(self, **options):
        super().__init__(**options)
        self.most = self.add_variable((3,), "zeros", name="most")

    def reset_state(self):
        self.most.assign(ops.zeros(3))

    def update_state(self, y_true, y_pred, sample_weight=None):
        every = ops.concatenate([self.most + 0.0, ops.reshape(y_true, (-1,))])
        self.most.assign(ops.top_k(every, 3)[0])

    def result(self):
        return ops.mean(self.most)


class Gain(Own):
    """The difference from the epoch before, which a reset computes from the state."""

    states: ClassVar = {"total": ("float32", 0.0), "before": ("float32", 0.0)}

    def reset_state(self):
        self.before.assign(self.total / 2.0)
        self.total.assign(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(y_true))

    def result(self):
        return self.total - self.before


class Apart(Own):
    def __init__(self, **options):
        super().__init__(**options)
        self.state = keras.Variable(0.0, trainable=False, aggregation="none", name="apart")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(ops.max(y_true))


class Listed(Own):
    """Has state in Python, which a compiled step would not change."""

    states: ClassVar = {}

    def __init__(self, **options):
        super().__init__(**options)
        self.values = []

    def reset_state(self):
        self.values = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.values.append(float(ops.max(y_true)))

    def result(self):
        return max(self.values, default=0.0)


class Held(Listed):
    """Has state in an object that is no list, dict or array."""

    def __init__(self, **options):
        super().__init__(**options)
        self.values = collections.deque()

    def reset_state(self):
        self.values.clear()


class Both(Listed):
    states: ClassVar = {"state": ("float32", 0.0)}

    def update_state(self, y_true, y_pred, sample_weight=None):
        Listed.update_state(self, y_true, y_pred)
        self.state.assign_add(1.0)


@pytest.mark.long
@on_all_backends
@pytest.mark.parity("a metric that cannot be merged is averaged, and named in a warning")
def test_metrics_that_cannot_be_merged_are_averaged_and_named():
    kinds = [Last, Drifting, Pair, TopThree, Gain, Apart] + (
        [Listed, Held, Both] if BACKEND != "jax" else []
    )
    model = compiled([make() for make in kinds], run_eagerly=BACKEND != "jax")
    rank, size = keras_dist.rank(), keras_dist.size()
    x = np.zeros((4, CLASSES), "float32")
    y = np.full((4, CLASSES), 1.0 + rank, "float32")
    alone = every_log(model, x, y, [])
    root = size - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = every_log(model, x, y, [MetricAverageCallback(root_rank=root)])
    everyone = keras_dist.allgather_object(alone)
    for name, value in found.items():
        assert value == pytest.approx(np.mean([logs[name] for logs in everyone])), name
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    # Once per fit and once per evaluate, on the root.
    assert len(texts) == (2 if rank == root > 0 else 0)
    for text in texts:
        assert all(f"{make.__name__} (" in text for make in kinds)
        assert "the average of the ranks' results is logged instead" in text


def test_what_a_metric_holds_and_does_not_change_is_no_state():
    metric = Largest()
    metric.weights, metric.names = ops.ones(2), frozenset("cat dog bird fish cow".split())
    metric.parts = (keras.metrics.Mean(), collections.deque([1]))
    twins = [metric_trials._twin(metric, {}) for _ in range(2)]
    assert metric_trials._same(*twins, set())
    twins[1].parts[1].append(2)
    assert not metric_trials._same(*twins, set())


def root_mean_square(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


def mean_difference(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def largest_difference(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


def test_functions_of_whole_batches_and_with_arguments_are_named_unless_they_are_declared():
    def power_mean(y_true, y_pred, power):
        return ops.mean(ops.abs(y_true - y_pred) ** power) ** (1 / power)

    wrapped = keras.metrics.MeanMetricWrapper(power_mean, "wrapped", power=3)
    declared = keras.metrics.MeanMetricWrapper(power_mean, "declared", power=3)
    declared = keras_dist.metrics.merge(declared, "mean")
    exact = [mean_difference, largest_difference, "mse", declared]
    model = compiled([root_mean_square, wrapped, *exact])
    y = np.full((4, CLASSES), 1.0 + keras_dist.rank(), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.evaluate(y, 0 * y, verbose=0, callbacks=[MetricAverageCallback()])
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(texts) == (keras_dist.size() > 1 and keras_dist.rank() == 0)
    for text in texts:
        assert "root_mean_square (a function that returns one number for a batch" in text
        assert "wrapped (a function" in text
        names = ("mean_difference", "largest_difference", "mse", "declared")
        assert not any(name in text for name in names)


def test_a_function_that_communicates_is_tried_on_all_ranks():
    def everywhere(y_true, y_pred):
        mine = np.mean((ops.convert_to_numpy(y_true) - ops.convert_to_numpy(y_pred)) ** 2)
        return ops.sqrt(keras_dist.allreduce(np.array([mine], "float32"), name="square")[0])

    y = np.full((4, CLASSES), 1.0 + keras_dist.rank(), "float32")
    model = compiled([everywhere], run_eagerly=True)
    found = model.evaluate(
        y, 0 * y, verbose=0, return_dict=True, callbacks=[MetricAverageCallback()]
    )
    squares = [(1.0 + rank) ** 2 for rank in range(keras_dist.size())]
    assert found["everywhere"] == pytest.approx(np.sqrt(np.mean(squares)))


def test_a_loss_that_sums_is_an_exact_metric():
    x = np.random.default_rng(0).random((4 * keras_dist.size(), CLASSES), "float32")
    expected = compiled([keras.losses.MeanSquaredError("sum")]).evaluate(
        x, 0 * x, batch_size=2 * keras_dist.size(), verbose=0, return_dict=True
    )
    steps = x.reshape(2, keras_dist.size(), 2, CLASSES)
    mine = steps[:, keras_dist.rank()].reshape(4, CLASSES)
    found = compiled([keras.losses.MeanSquaredError("sum")]).evaluate(
        mine,
        0 * mine,
        batch_size=2,
        verbose=0,
        return_dict=True,
        callbacks=[MetricAverageCallback()],
    )
    assert_exact(values_of(found), values_of(expected))


@on_all_backends
def test_an_epoch_without_batches_has_the_logs_of_keras():
    x = np.ones((4, CLASSES), "float32")

    def logs(callbacks):
        batches = ((x, x + 1) for _ in range(2))  # no more in the second epoch
        fit = compiled(["mae"]).fit
        return fit(batches, epochs=2, steps_per_epoch=2, verbose=0, callbacks=callbacks).history

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        assert logs([MetricAverageCallback()]) == logs(None)


def test_aggregations_of_keras_say_how_to_merge():
    class Told(Own):
        states: ClassVar = {}

        def __init__(self, **options):
            super().__init__(**options)
            self.first, self.mean = (
                self.add_variable((), "zeros", aggregation=how, name=how)
                for how in ("only_first_replica", "mean")
            )

        def reset_state(self):
            self.first.assign(0.0)
            self.mean.assign(0.0)

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.first.assign(ops.max(y_true))
            self.mean.assign(ops.max(y_true))

        def result(self):
            return {"first": self.first + 0.0, "mean": self.mean + 0.0}

    y = np.full((4, CLASSES), 1.0 + keras_dist.rank(), "float32")
    found = every_log(compiled([Told()]), y * 0, y, [MetricAverageCallback()])
    mean = (1 + keras_dist.size()) / 2
    assert (found["first"], found["val_first"]) == (1.0, 1.0)
    assert (found["mean"], found["val_mean"]) == (pytest.approx(mean), pytest.approx(mean))


# --- Declarations


def test_a_declaration_names_variables_of_its_metric():
    if keras_dist.size() == 1:
        return
    model = compiled([keras_dist.metrics.merge(Largest(), {"largest": "max"})])
    y = np.ones((4, CLASSES), "float32")
    with pytest.raises(errors.ArgumentError, match="variables of metric 'Largest': state"):
        model.evaluate(y, y, verbose=0, callbacks=[MetricAverageCallback()])
