"""What functions that return one number for a batch are found to be."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_dist._compat.keras.losses import Measured
from keras_dist.training.batch_trials import as_tried, averages_no_means


def error(y_true, y_pred):
    return ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)


def mean_where(counts, values):
    counts = ops.cast(counts, values.dtype)
    return ops.sum(ops.where(counts > 0, values, 0.0)) / ops.maximum(ops.sum(counts), 1.0)


def cross_entropy(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(ops.maximum(y_true, 0), y_pred)


MEANS = {
    "squares": lambda y, p: ops.mean(error(y, p)),
    "cases": lambda y, p: ops.mean(ops.where(y > p, error(y, p), 2 * error(y, p))),
    "labels of -1 or 0": lambda y, p: ops.mean(keras.losses.hinge(y, p)),
    "logarithms": lambda y, p: ops.mean(keras.losses.binary_crossentropy(y, p)),
}
OTHERS = {
    "a root": lambda y, p: ops.sqrt(ops.mean(error(y, p))),
    "without -1": lambda y, p: mean_where(ops.not_equal(y, -1), error(y, p)),
    "without -100": lambda y, p: mean_where(ops.not_equal(y, -100), error(y, p)),
    "without 255": lambda y, p: mean_where(ops.not_equal(y, 255), error(y, p)),
    "without zeros": lambda y, p: mean_where(ops.not_equal(y, 0), error(y, p)),
    "without NaN": lambda y, p: mean_where(ops.logical_not(ops.isnan(y)), error(y, p)),
}
OF_CLASSES = {
    "classes": (lambda y, p: ops.mean(cross_entropy(y, p)), False),
    "classes without -1": (
        lambda y, p: mean_where(ops.not_equal(y, -1), cross_entropy(y, p)),
        True,
    ),
}


def is_named_as_loss(function, y_true, y_pred):
    own = "name", function, y_true, y_pred
    found = as_tried(Measured(ops.ones(()), "mean", 4.0, True, True, number=own))
    return bool(found.of_whole_batch)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3), (4, 5, 2), (4, 90, 200)])
@pytest.mark.parametrize("name", [*MEANS, *OTHERS])
def test_losses(name, shape):
    values = ops.zeros(shape)
    assert is_named_as_loss((MEANS | OTHERS)[name], values, values) == (name in OTHERS)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 90)])
@pytest.mark.parametrize("name", OF_CLASSES)
def test_losses_of_classes(name, shape):
    function, is_named = OF_CLASSES[name]
    classes, outputs = ops.zeros(shape, "int32"), ops.zeros((*shape, 5))
    assert is_named_as_loss(function, classes, outputs) == is_named


IGNORED = -1


def of_a_global(y_true, y_pred):
    return mean_where(ops.not_equal(y_true, IGNORED), error(y_true, y_pred))


def of_an_argument(y_true, y_pred, ignored):
    return mean_where(ops.not_equal(y_true, ignored), error(y_true, y_pred))


class OfAnAttribute(keras.losses.Loss):
    def __init__(self, ignored):
        super().__init__()
        self.ignored = ignored

    def call(self, y_true, y_pred):
        return of_an_argument(y_true, y_pred, self.ignored)


@pytest.mark.parametrize(
    "function", [of_a_global, functools.partial(of_an_argument, ignored=-1), OfAnAttribute(-1)]
)
def test_missing_targets_that_code_refers_to(function):
    assert is_named_as_loss(function, ops.zeros((4, 1)), ops.zeros((4, 1)))


def test_a_function_gets_no_targets_that_it_does_not_mention():
    seen = []

    def noted(y_true, y_pred):
        seen.append(np.array(y_true))
        return ops.mean(error(y_true, y_pred))

    assert not is_named_as_loss(noted, ops.zeros((4, 1)), ops.zeros((4, 1)))
    assert {0.0, 1.0} == set(np.concatenate(seen).ravel().tolist())


def test_a_sum_over_samples_is_a_sum():
    values, function = ops.zeros((4, 3)), lambda y, p: ops.sum(error(y, p))
    own = "name", function, values, values
    found = as_tried(Measured(ops.ones(()), "mean", 4.0, True, True, number=own))
    assert (found.reduction, found.of_whole_batch) == ("sum", "")


@pytest.mark.parametrize("name", [*MEANS, *OTHERS, *OF_CLASSES])
def test_metrics(name):
    function, expected = OF_CLASSES.get(name) or ((MEANS | OTHERS)[name], name in OTHERS)
    metric = keras.metrics.MeanMetricWrapper(function)
    assert averages_no_means(metric, [(5,)]) == expected
    assert np.isfinite(float(metric.result()))
