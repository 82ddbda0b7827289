"""Losses whose denominators differ between ranks: weights and logs are those of one process."""

import contextlib
import dataclasses
import functools
import threading

import keras
import numpy as np
import pytest
from comparison import MeanPenalty, mean_of_squares
from small_training import EAGER, agreed, assert_close, weights_of

import keras_dist
from keras_dist import errors
from keras_dist._compat.keras.losses import called_anew
from keras_dist.training import global_losses

# What a backend does for losses runs on each; in GPU memory, what docs/backends.md shows.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")
on_tensorflow = pytest.mark.jobs("tensorflow-2")
in_gpu_memory = pytest.mark.jobs("training-double-torch-2")

backend = keras.backend.backend()
BATCH, TOKENS, WORDS, STEPS = 4, 5, 10, 2


def text(lengths, seed=0):
    """Token sequences of these lengths, padded with 0, and numbers for each token and sequence."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, WORDS, (len(lengths), TOKENS))
    tokens[np.arange(TOKENS) >= np.array(lengths)[:, None]] = 0
    shape = (*tokens.shape, 1)
    return tokens, rng.standard_normal(shape).astype("float32")


def of_tokens():
    layers = [keras.Input((TOKENS,), dtype="int32")]
    layers += [keras.layers.Embedding(WORDS, 4, mask_zero=True), keras.layers.Dense(1)]
    return keras.Sequential(layers), {"loss": "mse"}


def of_rows(loss="mse"):
    layers = [keras.Input((TOKENS,)), keras.layers.Dense(1, kernel_regularizer="l2")]
    return keras.Sequential(layers), {"loss": loss}


def of_penalties():
    regularized = {"kernel_regularizer": "l2", "activity_regularizer": "l1"}
    layers = [keras.Input((TOKENS,)), keras.layers.Dense(3, **regularized), MeanPenalty()]
    model = keras.Sequential([keras.Input((TOKENS,)), keras.Sequential(layers)])
    model.add(keras.layers.Dense(1, **regularized))
    return model, {"loss": "mse"}


class OwnLoss(keras.Model):
    """A model that computes its loss itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return 2 * sum(self.losses) + super().compute_loss(x, y, y_pred)


def of_own_loss():
    model, _ = of_penalties()
    return OwnLoss(model.inputs, model.outputs), {"loss": None}


class CalledTwice(keras.Model):
    """A model that computes its loss for two passes."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        first = super().compute_loss(x, y, y_pred)
        return first + super().compute_loss(x, y, self(2 * x))


def of_two_passes():
    model, compiled = of_penalties()
    return CalledTwice(model.inputs, model.outputs), compiled


def of_two_outputs():
    tokens = keras.Input((TOKENS,), dtype="int32")
    found = keras.layers.Embedding(WORDS, 4, mask_zero=True)(tokens)
    outputs = {
        "each": keras.layers.Dense(1, name="each")(found),
        "all": keras.layers.Dense(1, name="all")(keras.layers.LSTM(2)(found)),
    }
    losses = {"each": "mse", "all": keras.losses.MeanAbsoluteError(reduction="sum")}
    return keras.Model(tokens, outputs), {"loss": losses, "loss_weights": {"each": 1, "all": 0.1}}


def trained(make, optimizer, batches, callbacks=None):
    """Trains on batches of `(x, y)`; returns the model and all its logs."""
    keras.utils.set_random_seed(1)
    model, compiled = make()
    model.compile(optimizer, **compiled)
    if backend == "jax" and not callbacks:  # findings/keras_jax_lost_losses.sh
        model.stateless_call = functools.partial(called_anew, model, model.stateless_call)

    def generate():
        yield from batches

    def validate():  # a callback list belongs to one call
        return {"callbacks": keras_dist.callbacks()} if callbacks else {}

    logs = model.fit(generate(), verbose=0, validation_data=generate(), **validate()).history
    tested = model.evaluate(generate(), verbose=0, return_dict=True, **validate())
    tested = {f"test_{name}": value for name, value in tested.items()}
    return model, {**{name: values[0] for name, values in logs.items()}, **tested}


def distributed(made, rate=0.1, **options):
    """Returns a model that all ranks train, of what the functions above return."""
    model, compiled = made
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(rate))
    model.compile(optimizer, **compiled, **options)
    return model


def joined(parts):
    """Returns the batches of one process: those of all ranks that have one, in rank order."""
    batches = []
    for step in range(max(map(len, parts))):
        here = [part[step] for part in parts if step < len(part)]
        batches.append(keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *here))
    return batches


def assert_as_in_one_process(make, parts):
    """Trains on `parts[rank]`, the batches of each rank, and in one process on all of them."""
    one, expected = trained(make, keras.optimizers.SGD(0.1), joined(parts))
    mine = parts[keras_dist.rank()]
    wrapped = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model, logs = trained(make, wrapped, mine, callbacks=True)
    assert agreed([weight.tobytes() for weight in weights_of(model)])
    assert_close(weights_of(model), weights_of(one), 1e-5)
    assert logs.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-5, err_msg=name)


def lengths_of(rank):
    """Long sequences on rank 0, short ones on the others; only padding in the first of rank 1."""
    first = [0] * BATCH if rank == 1 else [5, 4, 5, 3]
    return [first, [1 + (rank == 0), 1, 2, 1]]


def unequal(parts):
    """Takes as many rows off the last batch of a rank as its number says."""
    for rank, part in enumerate(parts):
        part[-1] = keras.tree.map_structure(lambda rows, less=rank: rows[: BATCH - less], part[-1])
    return parts


def parts_of_text(targets=lambda tokens, numbers: numbers):
    parts = []
    for rank in range(keras_dist.size()):
        batches = [text(lengths, 2 * rank + n) for n, lengths in enumerate(lengths_of(rank))]
        parts.append([(tokens, targets(tokens, numbers)) for tokens, numbers in batches])
    return parts


def parts_of_rows():
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(keras_dist.size()):
        x = [rng.standard_normal((BATCH, TOKENS)).astype("float32") for _ in range(STEPS)]
        parts.append([(each, each[:, :1] + 1) for each in x])
    return parts


def both(tokens, numbers):
    return {"each": numbers, "all": numbers[:, 0]}


# test_exactness has several outputs, penalties, masks, weights, classes that are ignored, unequal
# lengths, functions, and ranks with fewer batches.
CASES = {"a loss of the model's own": of_own_loss, "a second pass in the loss": of_two_passes}


@on_each_backend
@in_gpu_memory
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parity("losses count as in one process: {case}")
def test_losses_are_those_of_one_process(case):
    assert_as_in_one_process(CASES[case], unequal(parts_of_rows()))


@on_each_backend
def test_as_many_rows_as_outputs_are_those_of_the_output_that_has_a_loss():
    def make():
        x = keras.Input((TOKENS,))
        outputs = [keras.layers.Dense(1)(x) for _ in range(2)]
        return keras.Model(x, outputs), {"loss": ["mse", None]}

    two = [[(x[:2], y[:2]) for x, y in part] for part in parts_of_rows()]
    assert_as_in_one_process(make, two)


@on_tensorflow
@pytest.mark.skipif(backend != "tensorflow", reason="others know the rows of a batch in advance")
def test_losses_of_outputs_in_validation_are_those_of_one_process_where_rows_are_not_known():
    def make():
        x = keras.Input((TOKENS,))
        outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("each", "all")}
        return keras.Model(x, outputs), {"loss": {"each": "mse", "all": "mae"}}

    parts = unequal(parts_of_rows())
    parts = [[(x, {"each": y, "all": -y}) for x, y in part] for part in parts]
    assert_as_in_one_process(make, parts)


class Own(keras.losses.Loss):
    """A loss that does not call the reduction of Keras."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))


@dataclasses.dataclass
class Scaled:
    """A loss without a hash, as dataclasses are."""

    scale: float

    def __call__(self, y_true, y_pred):
        return self.scale * keras.ops.mean(keras.ops.square(y_true - y_pred), -1)


def sum_of_squares(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_true - y_pred))


class SumOfSquares(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return sum_of_squares(y_true, y_pred)


def root_of_mean(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def of_a_model_within_another():
    class Outer(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return self.inner.compute_loss(x=x, y=y, y_pred=y_pred)

    made, compiled = of_rows()
    inner = keras.Model(made.inputs, made.outputs)
    inner.compile("sgd", **compiled)
    model = Outer(made.inputs, inner.outputs)
    model.inner = inner
    return model, {"loss": None}


OTHERS = {
    "a class without the reduction of Keras": lambda: of_rows(Own()),
    "a dataclass": lambda: of_rows(Scaled(2.0)),
    "a function that adds up": lambda: of_rows(sum_of_squares),
    "a class that adds up": lambda: of_rows(SumOfSquares()),
    "a model within another": of_a_model_within_another,
}


@on_each_backend
@pytest.mark.parametrize("case", OTHERS)
def test_losses_that_keras_does_not_compute_are_those_of_one_process(case):
    assert_as_in_one_process(OTHERS[case], unequal(parts_of_rows()))


def of_positive_targets(y_true, y_pred):
    """The squared errors of rows with a positive target, as many as there are."""
    errors, is_positive = keras.ops.square(y_true - y_pred)[:, 0], y_true[:, 0] > 0
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.boolean_mask(errors, is_positive)
    return errors[is_positive]


class OfPositiveTargets(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return of_positive_targets(y_true, y_pred)


@on_tensorflow
@pytest.mark.parametrize("eager", [False, True])
def test_a_step_calls_each_loss_once(eager):
    count = keras.Variable(0.0, trainable=False)

    def counting(y_true, y_pred):
        count.assign_add(1.0)
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    model = distributed(of_rows(counting), run_eagerly=eager)
    x = np.ones((BATCH, TOKENS), "float32")
    for _ in range(STEPS):
        model.train_on_batch(x, x[:, :1])
    assert float(keras.ops.convert_to_numpy(count)) == STEPS


@on_tensorflow
@pytest.mark.parametrize("loss", [of_positive_targets, OfPositiveTargets()])
@pytest.mark.parametrize("eager", [False, True])
def test_elements_that_a_loss_leaves_out_do_not_count(loss, eager):
    rank, size, rows = keras_dist.rank(), keras_dist.size(), BATCH * STEPS
    x = np.random.default_rng(0).standard_normal((size * rows, TOKENS)).astype("float32")
    y = np.where(np.arange(len(x)) % size <= np.arange(len(x)) % 3, 1.0, -1.0)
    y[: size * BATCH : size] = -1.0  # rank 0 of several has nothing that counts in the first step
    y[size - 1] = 1.0
    results = []
    for number, share, callbacks in (
        (size * BATCH, slice(None), []),
        (BATCH, slice(rank, None, size), keras_dist.callbacks()),
    ):
        keras.utils.set_random_seed(1)
        model, compiled = of_rows(loss)
        sgd = keras.optimizers.SGD(0.1)
        optimizer = keras_dist.DistributedOptimizer(sgd) if callbacks else sgd
        # Tracing takes longer than the steps of one process.
        model.compile(optimizer, **compiled, run_eagerly=eager or not callbacks)
        options = {"batch_size": number, "verbose": 0, "callbacks": callbacks}
        history = model.fit(x[share], y[share, None], shuffle=False, **options).history
        results.append((weights_of(model), history["loss"]))
    (expected, expected_loss), (weights, found_loss) = results
    assert_close(weights, expected, 1e-5)
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-5)


@on_each_backend
def test_the_root_names_losses_that_compare_samples(caplog):
    global_losses._warn_of_whole_batch.cache_clear()
    x = np.ones((BATCH, TOKENS), "float32")
    each, whole = keras.losses.Dice(axis=-1, name="each"), keras.losses.Dice(name="whole")
    for loss in (each, whole, sum_of_squares, root_of_mean):
        distributed(of_rows(loss), **EAGER).train_on_batch(x, x[:, :1])
    # Keras multiplies it by the mean of the weights.
    distributed(of_rows(mean_of_squares), **EAGER).train_on_batch(x, x[:, :1], x[:, 0])
    warns = keras_dist.rank() == 0 and keras_dist.size() > 1
    for name in ("whole", "root_of_mean", "mean_of_squares"):
        assert (f"the loss '{name}'" in caplog.text) == warns
    for name in ("each", "sum_of_squares"):
        assert f"the loss '{name}'" not in caplog.text


def test_an_infinite_loss_is_infinite_on_all_ranks():
    made = of_rows(lambda y_true, y_pred: keras.ops.mean(y_true - y_pred))
    model = distributed(made, 0.0, **EAGER)
    x = np.ones((BATCH + keras_dist.rank(), TOKENS), "float32")
    y = np.full((len(x), 1), np.inf if keras_dist.rank() == 0 else 1.0, "float32")
    assert model.train_on_batch(x, y) == np.inf
    assert np.all(np.isfinite(weights_of(model)[0]))


class Asks(keras.layers.Layer):
    """Notes what another layer remembers of the losses of earlier steps."""

    def call(self, inputs):
        self.found.append(set(self.other[0]._loss_ids))
        return inputs


@pytest.mark.jobs("jax-2")
def test_a_step_forgets_the_losses_of_earlier_steps():
    # findings/keras_jax_lost_losses.sh
    asks, penalty = Asks(), MeanPenalty()
    asks.found, asks.other = [], (penalty,)
    model = keras.Sequential([keras.Input((TOKENS,)), asks, penalty, keras.layers.Dense(1)])
    distributed((model, {"loss": "mse"}), **EAGER)
    for rows in (2, 3, 4):
        x = np.ones((rows, TOKENS), "float32")
        model.train_on_batch(x, x[:, :1])
        assert asks.found and not any(asks.found)


class Unreduced(keras.losses.Loss):
    """A loss with a value for each sample, which it does not reduce."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.square(keras.ops.subtract(y_true, y_pred))[:, 0]


@on_each_backend
def test_a_loss_that_nothing_reduces_is_that_of_one_process():
    parts, found = parts_of_rows(), []
    for batches in (joined(parts), parts[keras_dist.rank()]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(1)])
        plain = keras.optimizers.SGD(0.01)
        optimizer = keras_dist.DistributedOptimizer(plain) if found else plain
        model.compile(optimizer, Unreduced(), **EAGER)
        # Other backends refuse it, as in one process.
        refused = pytest.raises((RuntimeError, TypeError), match="scalar")
        with contextlib.nullcontext() if backend == "tensorflow" else refused:
            model.train_on_batch(*batches[0])
        found.append(weights_of(model))
    assert_close(found[1], found[0], 1e-5)


@on_tensorflow
@pytest.mark.skipif(backend != "tensorflow", reason="others refuse a loss for each sample")
@pytest.mark.parametrize("change", [list, unequal], ids=["equal batches", "unequal batches"])
def test_a_number_beside_a_loss_for_each_sample_counts_as_in_one_process(change):
    parts, found = change(parts_of_rows()), []
    for batches in (joined(parts), parts[keras_dist.rank()]):
        keras.utils.set_random_seed(1)
        x = keras.Input((TOKENS,))
        outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("each", "all")}
        model = keras.Model(x, outputs)
        plain = keras.optimizers.SGD(0.001)
        each = keras.losses.MeanSquaredError(reduction=None)
        optimizer = keras_dist.DistributedOptimizer(plain) if found else plain
        model.compile(optimizer, {"each": each, "all": "mae"})
        x, y = (np.concatenate(rows) for rows in zip(*batches, strict=True))
        for callbacks in (keras_dist.callbacks(), None) if found else (None, None):
            data = x, {"each": y, "all": -y}
            model.fit(*data, batch_size=len(x), verbose=0, shuffle=False, callbacks=callbacks)
        found.append(weights_of(model))
    assert_close(found[1], found[0], 1e-5)


@on_tensorflow
@pytest.mark.skipif(backend != "tensorflow", reason="elsewhere test_exactness draws it")
def test_xla_leaves_out_a_step_with_rows_of_unknown_lengths():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((None, TOKENS)), keras.layers.Conv1D(1, 1)]
    model = distributed((keras.Sequential(layers), {"loss": "mse"}), 0.0, jit_compile=True)
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((2, 3 + 5 * n, TOKENS)).astype("float32") for n in range(4)]
    x = [each * (1 + n) for n, each in enumerate(x)][: keras_dist.size()]
    differences = [np.square(model.predict(each, verbose=0) - each[..., :1]).ravel() for each in x]
    mine = x[keras_dist.rank()]
    # A compiled step would return the loss of this rank.
    found = model.train_on_batch(mine, mine[..., :1])
    np.testing.assert_allclose(found, np.mean(np.concatenate(differences)), rtol=1e-5)


@on_tensorflow
@pytest.mark.skipif(backend != "tensorflow", reason="elsewhere test_exactness draws XLA")
def test_xla_weighs_a_sum_of_float64_by_rows():
    def made():
        layers = [keras.Input((TOKENS,)), keras.layers.Dense(1, dtype="float64")]
        loss = keras.losses.MeanSquaredError(reduction="sum", dtype="float64")
        return keras.Sequential(layers), {"loss": loss, "jit_compile": True}

    assert_as_in_one_process(made, unequal(parts_of_rows()))


@on_tensorflow
def test_evaluation_without_callbacks_is_local():
    model = distributed(of_tokens(), **EAGER)
    [x, y], *_ = parts_of_text()[0]
    expected = model.evaluate(x, y, verbose=0, callbacks=keras_dist.callbacks())
    if keras_dist.rank() == 0:
        np.testing.assert_allclose(model.evaluate(x, y, verbose=0), expected, rtol=1e-6)
        model.test_on_batch(x, y)


@on_tensorflow
def test_the_evaluation_of_a_model_that_is_not_distributed_is_that_of_one_process():
    keras.utils.set_random_seed(1)
    model, compiled = of_two_outputs()
    model.compile(**compiled)
    parts = unequal(parts_of_text(both))
    found = []
    for batches, callbacks in (
        (joined(parts), None),
        (parts[keras_dist.rank()], keras_dist.callbacks()),
    ):
        options = {"verbose": 0, "return_dict": True, "callbacks": callbacks}
        found.append(model.evaluate((batch for batch in batches), **options))
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, err_msg=name)


@on_each_backend
def test_the_losses_of_a_step_are_exchanged_at_once(monkeypatch):
    calls, original = [], global_losses._summed
    monkeypatch.setattr(
        global_losses, "_summed", lambda *given: calls.append(1) or original(*given)
    )
    made = of_two_outputs()
    made[0].get_layer("each").activity_regularizer = keras.regularizers.L2()
    model = distributed(made, **EAGER)
    x, y = parts_of_text(both)[keras_dist.rank()][0]
    model.train_on_batch(x, y)
    # On JAX the denominators come first, so that XLA compiles the step as a whole.
    assert len(calls) == (2 if backend == "jax" else 1) * (keras_dist.size() > 1)


@on_tensorflow
def test_equal_batches_exchange_nothing(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("the ranks have exchanged denominators")

    monkeypatch.setattr(global_losses, "_exchanged", refuse)
    x = np.ones((3 * BATCH * keras_dist.size(), TOKENS), "float32")
    y = x[:, :1]
    model = distributed(of_rows(), **EAGER)
    options = {"verbose": 0, "callbacks": keras_dist.callbacks()}
    sharded = keras_dist.data.shard((x, y), batch_size=BATCH)
    model.fit(sharded, validation_data=(x, y), **options)
    model.fit(x, y, batch_size=BATCH, sample_weight=x[:, 0], **options)
    if keras_dist.size() > 1:
        uneven = keras_dist.data.shard((x[1:], y[1:]), batch_size=BATCH)
        with pytest.raises(AssertionError, match="exchanged"):
            model.fit(uneven, **options)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
def test_other_models_keep_their_losses_during_a_step(in_thread, is_part):
    x = np.random.default_rng(keras_dist.rank()).standard_normal((8, TOKENS)).astype("float32")
    other, compiled = of_rows(keras.losses.MeanSquaredError(reduction="sum"))
    other.compile("sgd", **compiled)
    expected, seen = other.test_on_batch(x, x[:, :1]), []

    def evaluate():
        other.reset_metrics()
        seen.append(other.test_on_batch(x, x[:, :1]))

    class Evaluates(keras.Model):
        def train_step(self, *given):
            thread = threading.Thread(target=evaluate)
            if keras_dist.rank() == 0 and in_thread:
                thread.start()
                thread.join()
            elif keras_dist.rank() == 0:
                evaluate()
            return super().train_step(*given)

    made, compiled = of_rows()
    model = Evaluates(made.inputs, made.outputs)
    if is_part:
        model.other = other
    distributed((model, compiled)).train_on_batch(x, x[:, :1])
    assert len(seen) == (keras_dist.rank() == 0)
    np.testing.assert_allclose(seen, [expected] * len(seen), rtol=1e-5)


@on_tensorflow
@pytest.mark.skipif(keras_dist.size() not in (2, 4), reason="Adasum needs a power of two of ranks")
def test_adasum_refuses_denominators_that_differ():
    model, compiled = of_tokens()
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1), op="adasum")
    model.compile(optimizer, run_eagerly=True, **compiled)
    x, y = parts_of_text()[keras_dist.rank()][0]
    with pytest.raises(Exception, match="every rank, with Adasum") as raised:
        model.train_on_batch(x, y)
    assert backend == "tensorflow" or isinstance(raised.value, errors.ArgumentError)


@on_each_backend
@in_gpu_memory
@pytest.mark.parity("`loss_scale` in loops written by hand")
def test_loss_scale_weighs_ranks():
    counts = [0.0, 6.0, 2.0, 4.0][: keras_dist.size()]
    mine = counts[keras_dist.rank()]
    expected = mine / (np.mean(counts) or 1)
    scale = keras.ops.convert_to_numpy(keras_dist.loss_scale(mine))
    np.testing.assert_allclose(scale, expected, rtol=1e-6)
    several = keras.ops.convert_to_numpy(keras_dist.loss_scale([[mine, 0.0]]))
    np.testing.assert_allclose(several, [[expected, 0.0]], rtol=1e-6)
