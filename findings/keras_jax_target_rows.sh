#!/usr/bin/env bash
# Library: Keras 3.15.1 on JAX 0.10.2.
# Behaviour: a model with two outputs, of which one has no loss (`loss=["mse", None]`), and one array
#   of targets has a wrong loss in batches of two rows: each row is taken for the targets of an
#   output. Batches of other sizes are right.
# Expected: the same loss as in batches of other sizes, or an error.
# Seen in: keras/src/trainers/compile_utils.py, CompileLoss.call, which packs the targets like the
#   outputs wherever their number of elements, here rows, is that of the outputs. On TensorFlow the
#   loss is right.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=jax "$folder/venv/bin/python" - 2>"$folder/log" <<'EOF' || { cat "$folder/log"; exit 1; }
import sys

import keras
import numpy as np

inputs = keras.Input((1,))
first = keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
model = keras.Model(inputs, [first, keras.layers.Dense(1)(inputs)])
model.compile("sgd", ["mse", None])
# The outputs are 0: each loss is the mean of the squares of the targets.
targets = np.array([[1.0], [3.0], [5.0]], "float32")
seen = [
    round(float(model.evaluate(targets[:rows], targets[:rows], verbose=0)), 3) for rows in (1, 2, 3)
]
right = [1.0, 5.0, round(35 / 3, 3)]
print(f"loss of 1, 2 and 3 rows: {seen}; mean of the squares: {right}")
if seen != [1.0, 1.0, right[2]]:
    sys.exit("The behaviour has changed; seen before: 1.0 instead of 5.0 for 2 rows")
EOF
