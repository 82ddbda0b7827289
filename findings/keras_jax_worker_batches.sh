#!/usr/bin/env bash
# Library: Keras 3.15.1 on JAX 0.10.2.
# Behaviour: the first epoch of the first `fit` of a model with a `PyDataset` of several workers trains
#   some batches twice, and as many of the last ones not at all; each later epoch begins with the last
#   batches of the one before.
# Expected: each batch once in an epoch, in the order of the data set with `shuffle=False`, as without
#   workers, and as on TensorFlow.
# Seen in: keras/src/trainers/data_adapters/py_dataset_adapter.py, PyDatasetEnqueuer.stop: it keeps
#   what workers have read for the next run, which reads the data from the start all the same. The
#   first run is that in which `fit` takes a batch for its shapes.
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


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return np.full((1, 1), index, "float32"), np.ones((1, 1), "float32")


class Seeing(keras.Sequential):
    def train_step(self, state, data):
        seen.append(int(data[0][0, 0]))
        return super().train_step(state, data)


def epoch(workers):
    """Returns the batches of an epoch."""
    seen.clear()
    model = Seeing([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(Numbered(workers=workers, max_queue_size=10), shuffle=False, verbose=0)
    return list(seen)


seen = []
alone, together = epoch(1), epoch(2)
print(f"with a worker: batches {alone[0]} to {alone[-1]}, each once: {alone == list(range(30))}")
print(f"with two: {together}")
if sorted(together) == list(range(30)):
    sys.exit("The behaviour has changed: each batch is trained once in the first epoch.")
if alone != list(range(30)) or together[0] != 1 or 29 in together:
    sys.exit("The behaviour has changed; seen before: from 1 to 11, then from 0 to 18")
EOF
