"""Embeddings on JAX and torch, whose gradients are whole tables: between nodes, rows travel."""

import keras
import numpy as np
import pytest
from small_training import BATCH, STEPS, assert_close, fit_rows, rows_of_rank, weights_of

import keras_dist

pytestmark = pytest.mark.jobs("nodes-2x2", "nodes-2+1", "nodes-4x1", "nodes-torch-2")

WORDS = 20_000


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)  # small gradients make small updates


def make(optimizer, ties=False):
    """Returns a model with a table of more than 1 MiB; it may score all words with it as well."""
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(WORDS, 16)
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(embedding(inputs))
    if ties:
        x = keras.layers.Lambda(lambda x: x @ keras.ops.transpose(embedding.embeddings))(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile(optimizer, loss="mse")
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
    # All words are scored: every row has a gradient.
    assert rows_travelled == [not ties] * STEPS
