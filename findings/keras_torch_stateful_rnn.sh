#!/usr/bin/env bash
# Library: Keras 3.15.1 on torch 2.13.0. The default build of torch for Linux is several GB with
#   CUDA.
# Behaviour: fit of a model with LSTM(stateful=True) or GRU(stateful=True) raises a RuntimeError in
#   the backward pass of its first step: a variable has been modified by an inplace operation.
#   SimpleRNN(stateful=True) trains.
# Expected: all three train, as on JAX and TensorFlow.
# Seen in: keras/src/layers/rnn/rnn.py, call: the states are assigned before the backward pass, and
#   assign of the torch backend copies into the tensor that the graph of LSTM and GRU has kept.
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

inputs, targets = np.ones((4, 3, 2), "float32"), np.ones((4, 1), "float32")
found = {}
for layer in (keras.layers.SimpleRNN, keras.layers.GRU, keras.layers.LSTM):
    for stateful in (False, True):
        model = keras.Sequential(
            [keras.Input((3, 2), batch_size=4), layer(2, stateful=stateful), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        try:
            model.fit(inputs, targets, batch_size=4, verbose=0)
            found[layer.__name__, stateful] = "trains"
        except RuntimeError as error:
            is_known = "modified by an inplace operation" in str(error)
            found[layer.__name__, stateful] = "RuntimeError" if is_known else str(error)
for (name, stateful), outcome in found.items():
    print(f"{name}(stateful={stateful}): {outcome}")
failed = [name for (name, stateful), outcome in found.items() if outcome != "trains" and stateful]
if failed != ["GRU", "LSTM"] or set(found.values()) != {"trains", "RuntimeError"}:
    sys.exit("The behaviour has changed; GRU and LSTM failed before, with stateful=True alone.")
EOF
