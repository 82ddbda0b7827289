"""`Pipeline`: stages on several ranks train like the whole model in one process."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from keras_dist import errors

pytestmark = pytest.mark.jobs("training", "torch-4")

RANK, SIZE = keras_dist.rank(), keras_dist.size()
LAYERS = 3


def layers():
    """Returns the built layers of the model, with the same weights on every rank."""
    keras.utils.set_random_seed(7)
    made = [
        keras.layers.Dense(5, "tanh", kernel_regularizer="l2"),
        keras.layers.Dense(4, "tanh"),
        keras.layers.Dense(2, kernel_regularizer="l2"),
    ]
    keras.Sequential([keras.Input((3,)), *made])
    return made


def model_of(members, width=3):
    return keras.Sequential([keras.Input((width,)), *members])


def stage_of(number, stages):
    """Returns a stage of the model, split as evenly as possible."""
    every, places = layers(), np.array_split(range(LAYERS), stages)[number]
    return model_of([every[place] for place in places], every[places[0]].kernel.shape[0])


def batch(samples=10):
    random = np.random.default_rng(3)
    return random.normal(size=(samples, 3)).astype("f4"), random.normal(size=(samples, 2)).astype(
        "f4"
    )


def train_whole(steps, x, y):
    """Returns the losses and weights of the whole model after some steps in one process."""
    model = model_of(layers())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    losses = [model.train_on_batch(x, y) for _ in range(steps)]
    return losses, [ops.convert_to_numpy(v) for v in model.trainable_variables]


def assert_equals_stage(stage, stages, model, whole):
    """Checks the weights of a stage against those of the whole model: two for each layer."""
    places = np.array_split(range(LAYERS), stages)[stage]
    expected = whole[2 * places[0] : 2 * places[-1] + 2]
    for variable, value in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(variable), value, rtol=1e-6, atol=1e-6)


@pytest.mark.jobs("jax-2")
@pytest.mark.skipif(SIZE > LAYERS, reason="more stages than layers")
@pytest.mark.parametrize("micro_batches", [1, 4])  # 4 does not divide the batch
def test_a_pipeline_trains_like_the_whole_model(micro_batches):
    model = stage_of(RANK, SIZE)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    pipeline = keras_dist.Pipeline(model, optimizer, "mse", micro_batches)
    x, y = batch()
    seen = [pipeline.train_on_batch(x, y) for _ in range(3)]
    losses, whole = train_whole(3, x, y)
    assert_equals_stage(RANK, SIZE, model, whole)
    assert seen == keras_dist.broadcast_object(seen)
    assert seen[-1] < seen[0] < losses[0]  # includes the regularization losses
    outputs = pipeline.predict_on_batch(x)
    assert (outputs is None) == (RANK < SIZE - 1)


def test_activations_may_be_bfloat16():
    options = {"kernel_initializer": "identity", "dtype": "bfloat16", "use_bias": False}
    model = model_of([keras.layers.Dense(3, **options)])
    pipeline = keras_dist.Pipeline(model, keras.optimizers.SGD(0.5), "mse", 2)
    x = np.ones((4, 3), "f4")
    assert pipeline.train_on_batch(x, x + 1) == 1
    # Each kernel is the identity, so all stages have the gradient of the last stage.
    expected = np.eye(3) + 1 / 3
    found = ops.convert_to_numpy(model.trainable_variables[0]).astype("f4")
    np.testing.assert_allclose(found, expected, rtol=2**-7)  # one ulp of bfloat16


def test_stages_without_trainable_weights():
    def step(model):
        pipeline = keras_dist.Pipeline(model, keras.optimizers.SGD(0.5), "mse", 2)
        return pipeline.train_on_batch(x, x + 1)

    x = np.ones((4, 3), "f4")
    assert step(model_of([keras.layers.Rescaling(1)])) == 1
    frozen = keras.layers.Dense(3, kernel_initializer="identity")
    model = model_of([frozen])
    frozen.trainable = RANK > 0
    assert step(model) == 1
    assert (ops.convert_to_numpy(frozen.kernel)[0, 0] != 1) == (RANK > 0)


def test_a_sum_loss_is_summed_over_micro_batches():
    model = model_of([keras.layers.Dense(3, kernel_initializer="identity", use_bias=False)])
    loss = keras.losses.MeanSquaredError(reduction="sum")
    pipeline = keras_dist.Pipeline(model, keras.optimizers.SGD(0.5), loss, 2)
    x = np.ones((3, 3), "f4")  # micro-batches of 2 and 1
    assert pipeline.train_on_batch(x, x + 1) == 3
    np.testing.assert_allclose(ops.convert_to_numpy(model.weights[0]), np.eye(3) + 1, rtol=1e-6)


@pytest.mark.skipif(SIZE != 4, reason="two replicas of two stages")
def test_replicas_of_a_pipeline_train_like_one_process():
    replica, stage = divmod(RANK, 2)
    sets = [keras_dist.add_process_set(ranks) for ranks in ([0, 2], [1, 3])]
    model = stage_of(stage, 2)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    pipeline = keras_dist.Pipeline(
        model,
        keras_dist.DistributedOptimizer(optimizer, process_set=sets[stage]),
        "mse",
        micro_batches=2,
        ranks=[2 * replica, 2 * replica + 1],
    )
    x, y = batch(12)
    for _ in range(3):
        pipeline.train_on_batch(x[replica::2], y[replica::2])
    assert_equals_stage(stage, 2, model, train_whole(3, x, y)[1])
    for process_set in sets:
        keras_dist.remove_process_set(process_set)


class Breakable(keras.layers.Layer):
    broken = False

    def call(self, inputs):
        if self.broken:
            raise ValueError("broken")
        return inputs


class Interrupts:
    def __len__(self):
        raise KeyboardInterrupt


def distance(targets, outputs):
    return ops.max(ops.abs(targets - outputs), axis=-1)


def identity_pipeline(micro_batches=2):
    """Returns a pipeline whose outputs are its inputs, and its layer."""
    layer = Breakable()
    model = keras.Sequential([keras.Input((3,)), layer])
    return keras_dist.Pipeline(model, "sgd", distance, micro_batches), layer


def full(value):
    return np.full((4, 3), value, "f4")


def test_an_error_on_one_stage_ends_the_batch_on_all():
    pipeline, layer = identity_pipeline()
    for bad in range(SIZE):
        layer.broken = bad == RANK
        expected = ValueError if bad == RANK else errors.MismatchError
        said = "broken" if bad == RANK else rf"rank {bad} of {SIZE}.*batch {2 * bad} .*broken"
        with pytest.raises(expected, match=said):
            pipeline.train_on_batch(full(-1), full(-1))
        layer.broken = False
        assert pipeline.train_on_batch(full(bad), full(bad)) == 0


@pytest.mark.skipif(SIZE < 2, reason="needs two stages")
def test_stages_in_different_batches_get_an_error():
    pipeline, _ = identity_pipeline()
    call = pipeline.predict_on_batch if RANK == 0 else pipeline.train_on_batch
    with pytest.raises(errors.MismatchError, match="batch 0, inputs"):
        call(*[full(0)] * (1 if RANK == 0 else 2))
    assert pipeline.train_on_batch(full(1), full(1)) == 0
    if RANK == 0:  # an interrupt is not sent to other stages
        with pytest.raises(KeyboardInterrupt):
            pipeline.train_on_batch(Interrupts())
    with pytest.raises(errors.MismatchError, match=r"'batch 3, micro-batch 0'.*='batch 2, micro-"):
        pipeline.train_on_batch(full(2), full(2))


def test_invalid_arguments_are_rejected():
    model = stage_of(0, 1)
    for wrong in (0, 1.5, None):
        with pytest.raises(errors.ArgumentError, match="micro_batches to be an integer"):
            keras_dist.Pipeline(model, "sgd", "mse", micro_batches=wrong)
    for ranks in ([RANK + 1], [RANK, RANK], [RANK, SIZE], [RANK - SIZE, RANK], [f"{RANK}"], RANK):
        with pytest.raises(errors.ArgumentError, match="each once, with this one among them"):
            keras_dist.Pipeline(model, "sgd", "mse", ranks=ranks)
    with pytest.raises(errors.ArgumentError, match="a loss on the last stage"):
        keras_dist.Pipeline(model, "sgd", None, ranks=[RANK])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    for optimizer in (scaled, keras.optimizers.SGD(global_clipnorm=1.0)):
        with pytest.raises(errors.ArgumentError, match="independently, for a pipeline stage"):
            keras_dist.Pipeline(model, optimizer, "mse")
    masked = model_of([keras.layers.Embedding(9, 3, mask_zero=True)])
    with pytest.raises(errors.ArgumentError, match="whose outputs have no mask"):
        keras_dist.Pipeline(masked, "sgd", "mse", micro_batches=2)
    alone = keras_dist.Pipeline(model, "sgd", "mse", np.int64(4), ranks=np.array([RANK]))
    with pytest.raises(errors.ArgumentError, match="an array as x on this stage"):
        alone.predict_on_batch()
    with pytest.raises(errors.ArgumentError, match="an array as y on this stage"):
        alone.train_on_batch(batch(4)[0])
    with pytest.raises(errors.ArgumentError, match="at least 4 samples"):
        alone.train_on_batch(*batch(3))


# y = w0 * x0 + w1 * x1 + ..., of which each rank has a weight and its input.


def loss_of(weight, x):
    y = weight * x
    if RANK > 0:
        y = keras_dist.recv(RANK - 1, like=y, name="sum so far") + y
    if RANK < SIZE - 1:
        return keras_dist.send(y, RANK + 1, name="sum so far")
    return ops.mean(y**2)


def gradient_on_tensorflow(weight, x):
    import tensorflow as tf

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = loss_of(variable.value, x)
        return tape.gradient(loss, variable.value)

    variable = keras.Variable(weight)
    return gradient()


def gradient_on_torch(weight, x):
    variable = keras.Variable(weight)
    loss_of(variable.value, ops.convert_to_tensor(x)).backward()
    return variable.value.grad


def gradient_on_jax(weight, x):
    import jax

    return jax.jit(jax.grad(loss_of))(weight, x)


@pytest.mark.jobs("jax-2")
def test_gradients_go_through_send_and_recv():
    weights, inputs = np.float32([1.5, -2, 0.5, 3]), np.float32(range(4)) + np.arange(4)[:, None]
    gradient = globals()[f"gradient_on_{keras.backend.backend()}"]
    found = gradient(weights[RANK], inputs[RANK].astype("f4"))
    y = weights[:SIZE] @ inputs[:SIZE]
    expected = (2 * y * inputs[RANK]).mean()
    np.testing.assert_allclose(ops.convert_to_numpy(found), expected, rtol=1e-5)


def gradient_of_variable(variable, loss):
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, variable.value)
    if keras.backend.backend() == "torch":
        loss().backward()
        return variable.value.grad
    import jax

    def loss_at(value):
        with keras.StatelessScope([(variable, value)]):
            return loss()

    return jax.grad(loss_at)(variable.value)


@pytest.mark.skipif(SIZE < 2, reason="needs two stages")
def test_gradients_go_through_variables_that_are_sent():
    variable = keras.Variable([1.0 + RANK, 2.0])

    def loss():
        if RANK == 0:
            return keras_dist.send(variable, 1)
        return ops.sum(3 * keras_dist.recv(0, like=variable)) + ops.sum(variable)

    if RANK < 2:
        found = ops.convert_to_numpy(gradient_of_variable(variable, loss))
        assert found.tolist() == [[3, 3], [1, 1]][RANK]
