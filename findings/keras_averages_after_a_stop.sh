#!/usr/bin/env bash
# Library: Keras 3.15.1 on JAX 0.10.2.
# Behaviour: `fit` with `SwapEMAWeights(swap_on_epoch=True)` ends with the weights of the last step
#   instead of their moving average if training stops early, as by EarlyStopping.
# Expected: the average, as at the end of all epochs, and without the callback in both cases.
# Seen in: keras/src/callbacks/swap_ema_weights.py, on_epoch_end: only in the last of all planned
#   epochs it prepares for the end of `fit`, which assigns the averages of the optimizer to the model
#   once more: they have changed places with the weights.
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
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.model.stop_training = True


def trained(epochs, *callbacks):
    """Returns the weight after two epochs of one step, which halves the distance from 1."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(keras.optimizers.SGD(0.25, use_ema=True, ema_momentum=0.5), "mse")
    ones = np.ones((4, 1), "float32")
    model.fit(ones, ones, epochs=epochs, callbacks=[*callbacks, Stop()], verbose=0)
    return float(model.get_weights()[0][0, 0])


def swap():
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


plain = trained(2), trained(5)
swapped = trained(2, swap()), trained(5, swap())
print(f"without the callback: {plain[0]} after 2 of 2 epochs, {plain[1]} after 2 of 5")
print(f"with it: {swapped[0]} after 2 of 2 epochs, {swapped[1]} after 2 of 5")
if plain + swapped == (0.625,) * 4:
    sys.exit("The behaviour has changed: training that stops early ends with the averages.")
if plain + swapped != (0.625, 0.625, 0.625, 0.75):
    sys.exit("The behaviour has changed; weights seen before: 0.625, 0.625, 0.625, 0.75")
EOF
