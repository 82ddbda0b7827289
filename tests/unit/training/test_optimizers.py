"""`LARS` against a numpy implementation, on one rank."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist import errors
from keras_dist.optimizers import LARS

RATE, DECAY = 0.5, 0.01


def values():
    rng = np.random.default_rng(0)
    kernel, bias = rng.standard_normal((4, 3)), rng.standard_normal(3)
    steps = [(rng.standard_normal((4, 3)), rng.standard_normal(3)) for _ in range(4)]
    return kernel, bias, steps


def reference(value, gradients, adapts, momentum=0.9, trust=0.001):
    moved = np.zeros_like(value)
    for gradient in gradients:
        ratio, decay = 1.0, 0.0
        if adapts:
            decay = DECAY
            of_value, of_gradient = np.linalg.norm(value), np.linalg.norm(gradient)
            if of_value > 0 and of_gradient > 0:
                ratio = trust * of_value / (of_gradient + decay * of_value + 1e-9)
        moved = momentum * moved + RATE * ratio * (gradient + decay * value)
        value = value - moved
    return value


def trained(optimizer, kernel, bias, steps):
    variables = [
        keras.Variable(kernel.astype("float32"), name="kernel"),
        keras.Variable(bias.astype("float32"), name="bias"),
    ]
    for gradients in steps:
        gradients = [keras.ops.convert_to_tensor(g.astype("float32")) for g in gradients]
        optimizer.apply(gradients, variables)
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


@pytest.mark.parametrize("excluded", [None, ()])
def test_steps_equal_a_numpy_implementation(excluded):
    kernel, bias, steps = values()
    options = {} if excluded is None else {"exclude_from_layer_adaptation": excluded}
    found = trained(LARS(RATE, weight_decay=DECAY, **options), kernel, bias, steps)
    np.testing.assert_allclose(found[0], reference(kernel, [s[0] for s in steps], True), rtol=1e-6)
    wanted = reference(bias, [s[1] for s in steps], excluded == ())
    np.testing.assert_allclose(found[1], wanted, rtol=1e-5)


def test_a_norm_of_zero_gives_a_plain_sgd_step():
    kernel, bias, steps = values()
    found = trained(LARS(RATE, weight_decay=DECAY), 0 * kernel, bias, steps[:1])
    np.testing.assert_allclose(found[0], -RATE * steps[0][0], rtol=1e-6)
    no_gradient = [(0 * steps[0][0], steps[0][1])]
    found = trained(LARS(RATE, weight_decay=DECAY), kernel, bias, no_gradient)
    np.testing.assert_allclose(found[0], kernel * (1 - RATE * DECAY), rtol=1e-6)


def test_variables_can_be_excluded_from_decay_only():
    kernel, bias, steps = values()
    optimizer = LARS(RATE, weight_decay=DECAY)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    found = trained(optimizer, kernel, bias, steps)
    plain = trained(LARS(RATE), kernel, bias, steps)
    np.testing.assert_array_equal(found[0], plain[0])


def test_an_embedding_trains_like_a_dense_layer_of_one_hot_inputs():
    def fitted(one_hot):
        keras.utils.set_random_seed(0)
        table = keras.layers.Embedding(5, 3)
        table.build((None, 2))
        start = keras.ops.convert_to_numpy(table.embeddings)
        model = keras.Sequential([keras.Input((2,), dtype="int32"), table])
        if one_hot:
            dense = keras.layers.Dense(3, use_bias=False)
            model = keras.Sequential([keras.Input((2, 5)), dense])
            dense.set_weights([start])
        model.compile(LARS(1.0, weight_decay=DECAY, trust_coefficient=0.1), loss="mse")
        x = np.array([[0, 1], [1, 1], [3, 0]], "int32")
        y = np.random.default_rng(0).standard_normal((3, 2, 3)).astype("float32")
        x = np.eye(5, dtype="float32")[x] if one_hot else x
        model.fit(x, y, epochs=3, verbose=0)
        return model.get_weights()[0]

    np.testing.assert_allclose(fitted(False), fitted(True), rtol=1e-5, atol=1e-6)


def test_configuration_and_saved_model_give_the_same_optimizer(tmp_path):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    names = ["bias", "scale"]
    optimizer = LARS(schedule, 0.8, DECAY, 0.01, 1e-6, names, clipnorm=1.0, name="mine")
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(copy, LARS)
    assert copy.get_config() == optimizer.get_config()

    x, y = np.random.default_rng(0).standard_normal((2, 8, 1)).astype("float32")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(x, y, verbose=0, shuffle=False)
    for value, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    for value, expected in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (value, expected)))


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"trust_coefficient": 0.0},
        {"epsilon": -1e-9},
        {"exclude_from_layer_adaptation": "bias"},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_rejected(arguments):
    [name] = arguments
    with pytest.raises(errors.ArgumentError, match=rf"Expected {name} to be"):
        keras_dist.optimizers.LARS(0.1, **arguments)
