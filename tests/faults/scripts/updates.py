"""Updates that would be wrong without an error."""

from typing import Any

import keras
import numpy as np
from faults import expect, fault

import keras_dist
from keras_dist._compat.keras.optimizers import ClippingHook
from keras_dist.errors import BackendError


def train(quantized: bool) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    if quantized:
        model.quantize("float8")
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.full((8, 6), 1.0 + keras_dist.rank(), "float32")
    callbacks = keras_dist.callbacks()  # type: ignore[operator]
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=callbacks)


class Unused(keras.layers.Dense):
    def build(self, shape: Any) -> None:
        super().build(shape)
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")


def train_unused() -> None:
    keras.utils.set_random_seed(1)
    layer = Unused(1)
    model = keras.Sequential([keras.Input((6,)), layer])
    before = keras.ops.convert_to_numpy(layer.kernel)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
    model.compile(keras_dist.DistributedOptimizer(sgd), "mse")
    callbacks = keras_dist.callbacks()  # type: ignore[operator]
    model.fit(np.ones((16, 6)), np.ones(16), epochs=2, verbose=0, callbacks=callbacks)
    assert (keras.ops.convert_to_numpy(layer.unused) == 1.0).all(), layer.unused
    assert (keras.ops.convert_to_numpy(layer.kernel) != before).all()


fault()
lowest = np.full(3, -(2**62), np.int64)
assert (keras_dist.allreduce(lowest) == lowest).all()
assert keras_dist.allreduce(np.array([2**63 - 1 - keras_dist.rank()])).tolist() == [2**63 - 2]
assert keras_dist.allreduce(np.array([-3 * keras_dist.rank()])).tolist() == [-1]
train_unused()
train(quantized=True)
del ClippingHook._clip_gradients
text = expect(BackendError, train, False)
assert "the gradients of this rank alone, with Keras" in text, text
