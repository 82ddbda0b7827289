#!/usr/bin/env bash
# Library: Keras 3.15.1 (here on JAX 0.10.2) with scikit-learn 1.9.1.
# Behaviour: `warm_start=True` of Keras' wrappers for scikit-learn has no effect: each `fit`
#   trains a new model with new initial weights, and the model that was passed is cloned.
# Expected: as documented, the model is not cloned, and the second `fit` starts from the weights
#   of the first. A loop that trains in parts keeps only its last part.
# Seen in: keras/src/wrappers/sklearn_wrapper.py, SKLBase._get_model and SKLBase.fit, which do not
#   read it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 scikit-learn==1.9.1 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=jax "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import numpy as np
from keras.wrappers import SKLearnRegressor

dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((1,)), dense])
model.compile(keras.optimizers.SGD(0.25), "mse")  # each step halves the distance to the weight 1
rows = np.ones((4, 1), "float32")
regressor = SKLearnRegressor(model, warm_start=True, fit_kwargs={"epochs": 1, "verbose": 0})

seen = []
for _ in range(3):
    regressor.fit(rows, rows[:, 0])
    seen.append(float(regressor.model_.get_weights()[0][0, 0]))
print(f"weight after each fit: {seen}, documented: [0.5, 0.75, 0.875]")
print(f"the model that was passed is used: {regressor.model_ is model}")
if seen != [0.5, 0.5, 0.5] or regressor.model_ is model:
    sys.exit("The behaviour has changed; seen before: [0.5, 0.5, 0.5] and False")
EOF
