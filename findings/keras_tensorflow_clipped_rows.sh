#!/usr/bin/env bash
# Library: Keras 3.15.1 on TensorFlow 2.21.0.
# Behaviour: `global_clipnorm` of an optimizer measures the gradient of an embedding, which is
#   `tf.IndexedSlices`, before rows of the same index are summed. A batch that looks up a row
#   twice is clipped to a norm of 1.41 instead of 1, and the update depends on whether the
#   gradient is sparse.
# Expected: the norm of the gradient that is applied, as with the same gradient made dense, and on
#   JAX and torch. With rows of opposite sign the norm is too large instead, and the update too
#   small.
# Seen in: keras/src/optimizers/base_optimizer.py, global_norm: squares of the slices are summed.
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


def step(indices, signs, dense):
    """Returns the norm of an update of at most 1."""
    embedding = keras.layers.Embedding(3, 1, embeddings_initializer="zeros")
    embedding.build()
    weights = embedding.trainable_weights
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding(tf.constant(indices))[:, 0] * signs)
    [gradient] = tape.gradient(loss, weights)
    optimizer.apply([tf.convert_to_tensor(gradient) if dense else gradient], weights)
    return round(float(tf.norm(weights[0].value)), 2)


cases = {
    "each row once": ([0, 1], [1.0, 1.0], 1.0, 1.0),
    "a row twice": ([1, 1], [1.0, 1.0], 1.41, 1.0),
    "a row thrice, signs differ": ([1, 1, 1], [1.0, 1.0, -1.0], 0.58, 1.0),
}
for name, (indices, signs, sparse, dense) in cases.items():
    seen = step(indices, signs, dense=False), step(indices, signs, dense=True)
    print(f"{name}: norm of the update {seen[0]}, of the dense gradient {seen[1]}")
    if seen != (sparse, dense):
        sys.exit(f"The behaviour has changed; seen before: {sparse} and {dense}")
EOF
