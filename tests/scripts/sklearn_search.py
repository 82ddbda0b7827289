"""Wrappers for scikit-learn, their copies, pipelines and a search train on all ranks."""

from typing import Any

import keras
import numpy as np
from keras.wrappers import SKLearnClassifier, SKLearnRegressor, SKLearnTransformer
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keras_dist

keras_dist.init()
ours: Any = keras_dist.callbacks
n, rank = keras_dist.size(), keras_dist.rank()
x = np.ones((4, 1), "float32")
y = np.full(4, 1 + 2.0 * rank, "float32")  # n on average: the first step is 0.1 * 2 * n


def line(X: Any = None, y: Any = None, rate: float = 0.1) -> Any:
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse")
    return model


def weight(fitted: Any) -> float:
    found = float(fitted.model_.get_weights()[0][0, 0])
    assert keras_dist.allgather_object(found) == [found] * n
    return found


def options() -> dict[str, Any]:
    return {"batch_size": 8, "verbose": 0, "callbacks": ours()}


def judge(X: Any, y: Any) -> Any:
    last = keras.layers.Dense(y.shape[1], activation="softmax", kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), last])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "categorical_crossentropy")
    return model


for made in (
    SKLearnRegressor(line()),
    clone(SKLearnRegressor(line())),
    SKLearnRegressor(line),
    clone(SKLearnRegressor(line, model_kwargs={"rate": 0.1})),
    SKLearnTransformer(line()),
):
    for _ in range(2):  # each fit begins with a clone
        made.fit(x, y, **options())
        np.testing.assert_allclose(weight(made), 0.2 * n, rtol=1e-6)

pipe = make_pipeline(StandardScaler(with_mean=False), SKLearnRegressor(line()))
pipe.fit(x, y, **{f"sklearnregressor__{name}": value for name, value in options().items()})
np.testing.assert_allclose(weight(pipe[-1]), 0.2 * n, rtol=1e-6)

classes = np.array([0, 1, rank % 2, rank % 2])
fitted = SKLearnClassifier(judge).fit(x, classes, **options())
keras_dist.verify_replicas(fitted.model_)

# All ranks score alike on the same data, so that they choose the same.
slope = np.linspace(0.5, 1.5, 8, dtype="float32")[:, None]
rates: Any = {"model_kwargs": [{"rate": 0.001}, {"rate": 0.1}]}
search = GridSearchCV(SKLearnRegressor(line, model_kwargs={}), rates, cv=2)
search.fit(slope, 2 * slope[:, 0], **options())
assert search.best_params_ == {"model_kwargs": {"rate": 0.1}}, search.best_params_
search = GridSearchCV(SKLearnRegressor(line()), {"warm_start": [False]}, cv=2)
search.fit(np.ones((8, 1), "float32"), np.full(8, 1 + 2.0 * rank, "float32"), **options())
np.testing.assert_allclose(weight(search.best_estimator_), 0.2 * n, rtol=1e-6)
print(f"rank {rank} is right")
