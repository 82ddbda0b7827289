#!/usr/bin/env bash
# Library: Keras 3.15.1 on JAX 0.10.2.
# Behaviour: a model whose optimizer averages weights (`use_ema=True`) can be fitted once: a second
#   call of `fit` raises an error, and the model has lost its optimizer's variables.
# Expected: training goes on, as on TensorFlow and torch.
# Seen in: keras/src/optimizers/base_optimizer.py, finalize_variable_values, which copies averages to
#   weights by `assign`: on JAX both are then the same array, and the step of the next `fit` donates
#   it twice.
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


def second_fit(use_ema):
    """Returns what a second `fit` raises, or "trained"."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=use_ema), "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    try:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    except Exception as error:
        return type(error).__name__
    return "trained"


seen = second_fit(False), second_fit(True)
print(f"second fit without an average: {seen[0]}, with use_ema: {seen[1]}")
if seen != ("trained", "TypeError"):
    sys.exit("The behaviour has changed; seen before: trained and TypeError")
EOF
