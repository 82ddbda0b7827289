#!/usr/bin/env bash
# Library: Keras 3.15.1 on torch 2.13.0. The default build of torch for Linux is several GB with
#   CUDA.
# Behaviour: with validation data, the history of fit has the validation's count of FalsePositives
#   as that of the training, too; TruePositives, TrueNegatives and FalseNegatives alike.
# Expected: the count of the training, as on JAX and TensorFlow.
# Seen in: keras/src/metrics/confusion_metrics.py, result: it returns an element of the state, on
#   torch a view, which the logs of the epoch hold while validation resets and counts anew.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=torch CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import numpy as np

inputs = np.array([[-1], [1], [2], [3]], "float32")
targets = np.zeros((4, 1), "float32")
model = keras.Sequential(
    [keras.Input((1,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
)
model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[keras.metrics.FalsePositives()])
alone = model.fit(inputs, targets, verbose=0).history["false_positives"]
validation = inputs[:2], targets[:2]
found = model.fit(inputs, targets, validation_data=validation, verbose=0).history
training, held_back = found["false_positives"], found["val_false_positives"]
print(f"without validation {alone}, with it {training}, count of the validation {held_back}")
if training == alone:
    sys.exit("The behaviour has changed: validation keeps the count of the training.")
if (alone, training, held_back) != ([3.0], [1.0], [1.0]):
    sys.exit("The behaviour has changed; counts seen before: 3, 1, 1")
EOF
