#!/usr/bin/env bash
# Library: Keras 3.15.1, here on JAX 0.10.2; the same on torch 2.13.0.
# Behaviour: `fit` calls `PyDataset.on_epoch_end` before its first epoch. In the first fit of a
#   model whose loss is not built it also calls `on_epoch_begin` and reads a batch before that;
#   in later fits the `on_epoch_end` has no `on_epoch_begin`. On TensorFlow every fit reads two
#   batches, then calls `on_epoch_end`.
# Expected: one `on_epoch_begin` and one `on_epoch_end` an epoch, as their documentation says. A
#   data set that shuffles in `on_epoch_end` never uses its first order, and one that counts
#   epochs is one ahead.
# Seen in: keras/src/trainers/epoch_iterator.py, EpochIterator.reset;
#   keras/src/trainers/trainer.py, Trainer._symbolic_build.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=jax "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.seen.append(f"read {index}")
        return np.ones((4, 1), "float32"), np.ones((4, 1), "float32")

    def on_epoch_begin(self):
        self.seen.append("begin")

    def on_epoch_end(self):
        self.seen.append("end")


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
epoch = ["begin", "read 0", "read 1", "end"]
expected = {"first fit": ["begin", "read 0", "end", *epoch], "second fit": ["end", *epoch]}
for fit, calls in expected.items():
    data = Data()
    model.fit(data, epochs=1, shuffle=False, verbose=0)
    print(f"{fit}, one epoch: {', '.join(data.seen)}")
    if data.seen != calls:
        sys.exit(f"The behaviour has changed; seen before: {', '.join(calls)}")
EOF
