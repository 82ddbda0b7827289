#!/usr/bin/env bash
# Library: Keras 3.15.1 on TensorFlow 2.21.0.
# Behaviour: once `SGD` has updated rows of an embedding, each read of its table, such as the lookup
#   of the next step, copies the whole table: a step of a few rows takes time for all of them. It
#   stays so until `tf.raw_ops.DisableCopyOnRead` is called, for which Keras has no place.
# Expected: a read without a copy, as before the update.
# Seen in: tensorflow/core/kernels/training_op_helpers.h, EnsureSparseVariableAccess, which sets the
#   mode; Keras updates rows by `scatter_sub` in keras/src/backend/tensorflow/optimizer.py.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import numpy as np
import tensorflow as tf


def shares():
    """Returns whether two reads of the table have the same memory."""
    first, second = (np.asarray(memoryview(table.value.read_value())) for _ in range(2))
    return np.shares_memory(first, second)


model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(1000, 64)])
model.compile(keras.optimizers.SGD(0.1), "mse")
[table] = model.weights
seen = [shares()]
model.train_on_batch(np.ones((1, 1), "int32"), np.zeros((1, 1, 64), "float32"))
seen.append(shares())
tf.raw_ops.DisableCopyOnRead(resource=table.handle)
seen.append(shares())
words = "before a step", "after a step", "after DisableCopyOnRead"
for when, without_copy in zip(words, seen, strict=True):
    print(f"{when}: reads of the table {'share memory' if without_copy else 'copy it'}")
if seen != [True, False, True]:
    sys.exit("The behaviour has changed; seen before: shared, copied, shared")
EOF
