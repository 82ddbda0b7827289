"""`send` and `recv` in models whose parts are on several ranks."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from keras_dist import errors

pytestmark = pytest.mark.jobs("training", "torch-4")

BACKEND, RANK, SIZE = keras.backend.backend(), keras_dist.rank(), keras_dist.size()


def gradients_of(variables, loss, compiled=False):
    """Returns the gradients of a function by variables, of a compiled step if there is one."""
    values = [variable.value for variable in variables]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        def gradients():
            with tf.GradientTape() as tape:
                value = loss()
            return tape.gradient(value, values)

        return (tf.function(gradients) if compiled else gradients)()
    if BACKEND == "torch":
        import torch

        return torch.autograd.grad(loss(), values)
    import jax

    def loss_at(values):
        with keras.StatelessScope(zip(variables, values, strict=True)):
            return loss()

    gradients = jax.grad(loss_at)
    return (jax.jit(gradients) if compiled else gradients)(values)


@pytest.mark.skipif(SIZE < 2, reason="needs two stages")
def test_gradients_go_through_variables_that_are_sent():
    variable = keras.Variable([1.0 + RANK, 2.0])

    def loss():
        if RANK == 0:
            return keras_dist.send(variable, 1)
        return ops.sum(3 * keras_dist.recv(0, like=variable)) + ops.sum(variable)

    if RANK < 2:
        (found,) = gradients_of([variable], loss)
        assert ops.convert_to_numpy(found).tolist() == [[3, 3], [1, 1]][RANK]


@pytest.mark.jobs("jax-2")
@pytest.mark.parametrize("compiled", [False] if BACKEND == "torch" else [False, True])
def test_a_pipeline_has_the_gradients_of_the_whole_model(compiled):
    random = np.random.default_rng(3)
    x, y = random.normal(size=(2, 10, 3)).astype("f4")
    kernels = random.normal(size=(SIZE, 3, 3)).astype("f4")  # of a layer on each rank
    stage = keras.Variable(kernels[RANK])

    def loss():
        total = 0.0
        parts = [np.array_split(array, 4) for array in (x, y)]  # of several sizes
        for number, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            name = f"activations of part {number}" if compiled else None
            if RANK > 0:
                like = ops.zeros((len(inputs), 1)) + stage[0]
                inputs = keras_dist.recv(RANK - 1, like=like, name=name)
            outputs = ops.tanh(ops.matmul(inputs, stage.value))
            if RANK < SIZE - 1:
                total += keras_dist.send(outputs, RANK + 1, name=name)
            else:
                total += ops.sum(ops.square(ops.subtract(outputs, targets))) / len(x)
        return total

    def whole_loss():
        outputs = x
        for variable in whole:
            outputs = ops.tanh(ops.matmul(outputs, variable.value))
        return ops.sum(ops.square(ops.subtract(outputs, y))) / len(x)

    (found,) = gradients_of([stage], loss, compiled)
    whole = [keras.Variable(kernel) for kernel in kernels]
    expected = gradients_of(whole, whole_loss)[RANK]
    found, expected = (ops.convert_to_numpy(gradient) for gradient in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(BACKEND != "torch", reason="needs no graph")
def test_a_gradient_of_a_gradient_through_recv_is_refused():
    import torch

    x = torch.ones(4, requires_grad=True)
    if RANK == 0:
        torch.autograd.grad(keras_dist.send(x, 1), x)
    elif RANK == 1:
        y = keras_dist.recv(0, like=x)
        [gradient] = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        with pytest.raises(errors.UsageError, match="one gradient through send and recv"):
            (gradient**2).sum().backward()
