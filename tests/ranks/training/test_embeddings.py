"""Embeddings on JAX and torch, whose gradients are whole tables in plain Keras: rows travel."""

import keras
import numpy as np
import pytest
from small_training import BATCH, STEPS, assert_close, fit_rows, rows_of_rank, weights_of

import keras_dist
from keras_dist import runtime

pytestmark = pytest.mark.jobs("jax-2", "torch-2", "nodes-2x2", "nodes-torch-2")

WORDS = 20_000


def is_torch():
    return keras.backend.backend() == "torch"


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)  # small gradients make small updates


def make(optimizer, ties=False, **options):
    """Returns a model with a table of more than 1 MiB; it may score all words with it as well."""
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(WORDS, 16)
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(embedding(inputs))
    if ties:
        x = keras.layers.Lambda(lambda x: x @ keras.ops.transpose(embedding.embeddings))(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile(optimizer, loss="mse", **options)
    return model


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("optimizer", [adam, keras.optimizers.SGD])
def test_rows_of_embeddings_train_as_the_whole_table(rows_travelled, optimizer, ties):
    n, rng = keras_dist.size(), np.random.default_rng(0)
    x = rng.integers(0, WORDS, (STEPS * BATCH * n, 3))
    y = rng.standard_normal((len(x), 2)).astype(np.float32)
    plain = make(optimizer(), ties=ties)
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    model = make(keras_dist.DistributedOptimizer(optimizer()), ties=ties)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    assert_close(weights_of(model), weights_of(plain))
    assert not (is_torch() and model.layers[1].embeddings.value.grad.is_sparse)
    # All words are scored: every row has a gradient. On one node torch looks for rows no further.
    looks = not is_torch() or not runtime.communicator().is_one_node
    assert rows_travelled == ([False] * looks if ties else [True]) * STEPS


@pytest.mark.parametrize("how", ["accumulated", "several steps in an execution"])
def test_embeddings_whose_rows_are_not_known_train_as_the_whole_table(how):
    n, rng = keras_dist.size(), np.random.default_rng(0)
    x = rng.integers(0, WORDS, (STEPS * BATCH * n, 3))
    y = rng.standard_normal((len(x), 2)).astype(np.float32)
    is_jax = keras.backend.backend() == "jax"
    options = {"steps_per_execution": 2} if is_jax and how != "accumulated" else {}
    accumulates = {"gradient_accumulation_steps": 2} if how == "accumulated" else {}
    plain = make(keras.optimizers.SGD(0.1, **accumulates), **options)
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    ours = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1, **accumulates))
    model = make(ours, **options)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.skipif(not is_torch(), reason="the rows of JAX are those of its traced step")
@pytest.mark.parametrize(
    "how", ["one rank gives rows", "many rows", "own step", "own optimizer", "hook"]
)
def test_what_is_no_plain_lookup_trains_as_in_one_process(rows_travelled, monkeypatch, how):
    from keras_dist._backends import torch_rows

    n, rng = keras_dist.size(), np.random.default_rng(0)
    x = rng.integers(0, WORDS, (STEPS * BATCH * n, 3))
    y = rng.standard_normal((len(x), 2)).astype(np.float32)
    plain, model, sparse = make(adam()), make(keras_dist.DistributedOptimizer(adam())), []

    class Own(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            sparse.append(self.trainable_variables[0].value.grad.is_sparse)
            return logs

    class OwnAdam(keras.optimizers.Adam):
        pass

    def limit(gradient):
        return gradient.clamp(-1e6, 1e6)  # sparse tensors have no clamp

    if how == "hook":
        for each in (plain, model):
            each.layers[1].embeddings.value.register_hook(limit)
    if how == "own optimizer":
        own = OwnAdam(0.01, epsilon=1e-3)
        model = make(keras_dist.DistributedOptimizer(own))
    if how == "own step":
        model = Own(model.inputs, model.outputs)
        model.compile(keras_dist.DistributedOptimizer(adam()), loss="mse")
    has_many = how == "many rows" or (how == "one rank gives rows" and keras_dist.rank() != 1)
    monkeypatch.setattr(torch_rows, "FEW", WORDS if has_many else torch_rows.FEW)
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    assert_close(weights_of(model), weights_of(plain))
    assert sparse == [False] * STEPS * (how == "own step")
    if runtime.communicator().is_one_node and how != "one rank gives rows":
        assert not rows_travelled


@pytest.mark.skipif(not is_torch(), reason="of torch's tables")
def test_a_table_that_is_held_or_written_to_stays_out_of_the_next():
    from keras_dist._backends.torch_rows import TableMemory

    def whole(indices):
        table = np.zeros((9, 2), np.float32)
        table[indices] = 1
        return table

    table, held = TableMemory((9, 2)), []
    for step, (indices, act) in enumerate(
        [([1, 2], None), ([3], "hold"), ([4, 5], "write"), ([1], None)]
    ):
        found = table.filled(np.ones((len(indices), 2), np.float32), np.array(indices))
        np.testing.assert_array_equal(found.numpy(), whole(indices))
        if act == "hold":
            held.append(found[1:])
        elif act == "write":
            found += 1
        del found
        assert step == 0 or held[0][2, 0] == 1
    np.testing.assert_array_equal(held[0].numpy(), whole([3])[1:])
