#!/usr/bin/env bash
# Library: Keras 3.15.1 on torch 2.13.0. The default build of torch for Linux is several GB with
#   CUDA.
# Behaviour: a loss of masked predictions changes the tensor of sample weights that the caller
#   passed: it is multiplied in place by the mask. A second call with the same tensor gives
#   another loss.
# Expected: arguments stay as they are, as on the other backends and with numpy arrays on torch.
# Seen in: keras/src/losses/loss.py, apply_mask: an augmented assignment to the weights after a
#   cast, which is the caller's tensor if the dtype agrees.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=torch CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import torch

targets = torch.tensor([[[1.0], [2.0], [3.0]]])
predictions = torch.zeros(1, 3, 1)
predictions._keras_mask = torch.tensor([[True, True, False]])  # as layers that mask set it
weights = torch.ones(1, 3)
loss = keras.losses.MeanSquaredError()

seen = []
for _ in range(3):
    value = float(loss(targets, predictions, sample_weight=weights))
    seen.append((value, weights.tolist()))
    print(f"loss {value}, then the caller's weights are {weights.tolist()}")
if weights.tolist() == [[1, 1, 1]]:
    sys.exit("The behaviour has changed: the weights of the caller stay as they were.")
if seen != [(2.5, [[1.5, 1.5, 0]]), (3.75, [[2.25, 2.25, 0]]), (5.625, [[3.375, 3.375, 0]])]:
    sys.exit("The behaviour has changed; losses seen before: 2.5, 3.75, 5.625")
EOF
