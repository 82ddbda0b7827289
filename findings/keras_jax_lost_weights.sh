#!/usr/bin/env bash
# Library: Keras 3.15.1 on JAX 0.10.2.
# Behaviour: if an exception ends `evaluate` or `predict`, for example one of the data or of a
#   callback, or Ctrl-C in a notebook, the variables of the model have no values: reading weights
#   raises a TypeError.
# Expected: the exception reaches the caller and the weights stay, as on the other backends, and
#   as in `fit`, which restores them in a `finally`.
# Seen in: keras/src/backend/jax/trainer.py, JAXTrainer.evaluate and JAXTrainer.predict: variables
#   are emptied by _purge_model_variables, and jax_state_sync is called only after the last batch.
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


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


rows = np.ones((4, 1), "float32")
arguments = {"fit": (rows, rows), "evaluate": (rows, rows), "predict": (rows,)}
expected = {"fit": "kept", "evaluate": "lost", "predict": "lost"}
for task, data in arguments.items():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        getattr(model, task)(*data, callbacks=[Stop()], verbose=0)
    except KeyboardInterrupt:
        pass
    try:
        model.get_weights()
        seen = "kept"
    except TypeError as error:
        seen = "lost"
        print(f"{task}: TypeError: {error}")
    print(f"{task} that is interrupted: weights are {seen}")
    if seen != expected[task]:
        sys.exit(f"The behaviour has changed; seen before: {expected[task]}")
EOF
