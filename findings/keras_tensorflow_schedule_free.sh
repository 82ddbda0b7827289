#!/usr/bin/env bash
# Library: Keras 3.15.1 on TensorFlow 2.21.0.
# Behaviour: `fit` with `ScheduleFreeAdamW` leaves the weights that the model has: its first step
#   begins with 0 in their place. The same fit is right if `optimizer.build` is called before it.
# Expected: the first step moves each weight by the learning rate, as on JAX and torch, and as the
#   optimizer's docstring says: momentum begins with the values of the weights.
# Seen in: keras/src/optimizers/schedule_free_adamw.py, build: it assigns the weights to the
#   momentum. `fit` calls it while TensorFlow traces the step, and TensorFlow traces a step that
#   has made variables once more, without that assignment.
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


def weights(is_built):
    """Returns the weight of a model, 1 before training, after each of three steps."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    model.compile(keras.optimizers.ScheduleFreeAdamW(0.1), "mse")
    if is_built:
        model.optimizer.build(model.trainable_variables)
    found = []
    for _ in range(3):
        model.fit(np.ones((4, 1)), np.zeros((4, 1)), verbose=0)
        found.append(round(float(model.get_weights()[0][0, 0]), 2))
    return found


built, unbuilt = weights(True), weights(False)
print(f"weights after each step: built before fit {built}, built by fit {unbuilt}")
if (built, unbuilt) != ([0.9, 0.85, 0.81], [-0.1, -0.09, -0.09]):
    sys.exit("The behaviour has changed; seen before: [0.9, 0.85, 0.81], [-0.1, -0.09, -0.09]")
EOF
