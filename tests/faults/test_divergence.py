"""Divergent replicas are detected at the end of a fit and before a checkpoint is written."""

import pytest


@pytest.mark.fault(
    "the weights of one rank differ, at the end of a fit or before a checkpoint",
    "an error on every rank that names variables and ranks; nothing is written",
    within=60,
)
def test_divergent_replicas_are_found(job, tmp_path):
    text = """
import keras, numpy as np
import keras_dist
from keras_dist import errors

folder = os.environ["FOLDER"]
rank = keras_dist.rank()

class Disturb(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and rank == 1:
            weight = self.model.layers[0].bias
            weight.assign(weight + 1.0)

def fit(*callbacks, epochs):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones((16, 6), "float32")
    callbacks = keras_dist.callbacks(*callbacks)
    model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=callbacks)

backup = keras_dist.callbacks.BackupAndRestore(folder + "/backup", delete_checkpoint=False)
checkpoint = keras_dist.callbacks.ModelCheckpoint(folder + "/{epoch}.keras")
fault()
for others, epochs in ([Disturb()], 2), ([Disturb(), checkpoint], 3), ([Disturb(), backup], 3):
    try:
        fit(*others, epochs=epochs)
        raise SystemExit("not found")
    except errors.MismatchError as error:
        assert "Received: differences from rank 0 in" in str(error), error
        assert "first/bias (ranks 1). " in str(error), error
if rank == 0:
    names = sorted(os.listdir(folder)), len(os.listdir(folder + "/backup"))
    assert names == (["1.keras", "backup"], 1), names
"""
    ended = job(2, text, FOLDER=str(tmp_path / "out"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "Keras applies updates without the method that reduces gradients, as after a renaming in Keras",
    "a `BackendError` on every rank, in that step; replicas do not diverge",
    within=60,
)
@pytest.mark.fault(
    "float8 layers have inputs of different magnitudes on each rank",
    "scales and histories are those of all ranks; replicas stay equal",
    within=60,
)
def test_updates_outside_of_the_reduction(job):
    text = """
import keras, numpy as np
import keras_dist
from keras_dist._compat.keras.optimizers import ClippingHook
from keras_dist import errors

def trained(optimizer, quantized=False):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    if quantized:
        model.quantize("float8")
    eagerly = not quantized  # on TensorFlow, Keras supports float8 in graphs only
    model.compile(keras_dist.DistributedOptimizer(optimizer), "mse", run_eagerly=eagerly)
    x = np.full((8, 6), 1.0 + keras_dist.rank(), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=keras_dist.callbacks())

fault()
trained(keras.optimizers.SGD(0.01), quantized=True)
del ClippingHook._clip_gradients
try:
    trained(keras.optimizers.SGD(0.01))
    raise SystemExit("not found")
except errors.BackendError as error:
    assert "the gradients of this rank alone, with Keras" in str(error), error
"""
    ended = job(2, text)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "an average of integers whose sum does not fit their dtype",
    "the exact average, rounded towards zero",
    within=60,
)
@pytest.mark.fault(
    "on torch no rank has a gradient of a weight, with weight decay and momentum",
    "the weight stays as it is",
    within=60,
)
def test_what_was_wrong_without_an_error(job):
    text = """
import keras, numpy as np
import keras_dist

fault()
lowest = np.full(3, -(2**62), np.int64)
assert (keras_dist.allreduce(lowest) == lowest).all()
assert keras_dist.allreduce(np.array([2**63 - 1 - keras_dist.rank()])).tolist() == [2**63 - 2]
assert keras_dist.allreduce(np.array([-3 * keras_dist.rank()])).tolist() == [-1]

class Layer(keras.layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

keras.utils.set_random_seed(1)
layer = Layer(1)
model = keras.Sequential([keras.Input((6,)), layer])
before = keras.ops.convert_to_numpy(layer.kernel)
sgd = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
model.compile(keras_dist.DistributedOptimizer(sgd), "mse")
model.fit(np.ones((16, 6)), np.ones(16), epochs=2, verbose=0, callbacks=keras_dist.callbacks())
assert (keras.ops.convert_to_numpy(layer.unused) == 1.0).all(), layer.unused
assert (keras.ops.convert_to_numpy(layer.kernel) != before).all()
"""
    ended = job(2, text, KERAS_BACKEND="torch")
    assert ended.returncode == 0, ended.stdout
