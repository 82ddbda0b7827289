"""Embeddings on JAX and torch, whose gradients are whole tables: rows travel between nodes.

JAX knows the rows, which travel on one node as well.
"""

import keras
import numpy as np
import pytest
from small_training import BATCH, STEPS, assert_close, fit_rows, rows_of_rank, weights_of

import keras_dist

pytestmark = pytest.mark.jobs(
    "jax-2", "jax-3", "nodes-2x2", "nodes-2+1", "nodes-4x1", "nodes-torch-2"
)

WORDS = 20_000


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
    # All words are scored: every row has a gradient.
    assert rows_travelled == [not ties] * STEPS


@pytest.mark.parametrize("split", [True, False])
def test_accumulated_gradients_of_embeddings_and_a_step_that_is_not_split(rows_travelled, split):
    n, rng = keras_dist.size(), np.random.default_rng(0)
    x = rng.integers(0, WORDS, (STEPS * BATCH * n, 3))
    y = rng.standard_normal((len(x), 2)).astype(np.float32)
    is_jax = keras.backend.backend() == "jax"
    options = {"steps_per_execution": 2} if is_jax and not split else {}
    accumulates = {"gradient_accumulation_steps": 2} if split else {}
    plain = make(keras.optimizers.SGD(0.1, **accumulates), **options)
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    ours = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1, **accumulates))
    model = make(ours, **options)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    assert_close(weights_of(model), weights_of(plain))
