#!/usr/bin/env bash
# Library: Keras 3.15.1 on TensorFlow 2.21.0.
# Behaviour: `Adam` divides the gradient of an embedding, which is `tf.IndexedSlices`, by the root of
#   the sum of squares of each occurrence of a row, instead of the square of their sum. The first
#   step moves a row that a batch looks up twice 1.41 times as far as with the same gradient made
#   dense, and four times 2 times as far. The step depends on how often a batch has a row, and
#   on whether the gradient is sparse.
# Expected: the step of the dense gradient, which is the one on JAX and torch.
# Seen in: keras/src/optimizers/adam.py, update_step: `ops.square(gradient)`, which
#   keras/src/backend/tensorflow/sparse.py, elementwise_unary, applies to each slice.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import tensorflow as tf


def step(indices, dense):
    """Returns how far the first step of Adam moves row 1."""
    embedding = keras.layers.Embedding(3, 1, embeddings_initializer="zeros")
    embedding.build()
    weights = embedding.trainable_weights
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding(tf.constant(indices)))
    [gradient] = tape.gradient(loss, weights)
    assert isinstance(gradient, tf.IndexedSlices)
    optimizer = keras.optimizers.Adam(1.0)
    optimizer.apply([tf.convert_to_tensor(gradient) if dense else gradient], weights)
    return round(abs(float(weights[0].value[1, 0])), 2)


for indices, sparse in (([1], 1.0), ([1, 1], 1.41), ([1, 1, 1, 1], 2.0)):
    seen = step(indices, dense=False), step(indices, dense=True)
    print(f"row 1 {len(indices)} times: moved by {seen[0]}, with the dense gradient by {seen[1]}")
    if seen != (sparse, 1.0):
        sys.exit(f"The behaviour has changed; seen before: {sparse} and 1.0")
EOF
