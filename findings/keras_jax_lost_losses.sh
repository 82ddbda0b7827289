#!/usr/bin/env bash
# Library: Keras 3.15.1 on JAX 0.10.2.
# Behaviour: where several layers add losses (activity_regularizer, add_loss), a step that JAX traces
#   again, for another number of rows, may lack one of them: fit minimises another function and
#   logs another loss. Which of the shapes, if any, depends on where Python puts objects.
# Expected: each step has the losses of all layers.
# Seen in: keras/src/layers/layer.py, _clear_losses: the losses of a layer are known by their id. A
#   layer that is called drops those whose id it remembers from its last call, by when Python may
#   have given this id to the new loss of a layer before it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import numpy as np


class Penalty(keras.layers.Layer):
    """Adds 1 to the loss."""

    def call(self, inputs):
        self.add_loss(keras.ops.ones(()) + 0 * keras.ops.mean(inputs))
        return inputs


keras.utils.set_random_seed(1)
layers = [keras.Input((5,))]
for _ in range(4):
    layers += [keras.layers.Dense(5), Penalty()]
steps = 0
for attempt in range(20):
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.0), loss=lambda y, prediction: 0 * prediction[:, 0])
    for rows in range(1, 60):
        x = np.ones((rows, 5), "float32")
        loss = model.fit(x, x, batch_size=rows, verbose=0).history["loss"][0]
        steps += 1
        if round(loss) != 4:
            print(f"The loss of 4 layers that add 1 each was {loss} at {rows} rows, step {steps}.")
            sys.exit()
sys.exit(f"The behaviour has changed: the loss was 4 in each of {steps} steps; some lacked 1.")
EOF
