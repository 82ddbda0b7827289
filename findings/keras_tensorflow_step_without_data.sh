#!/usr/bin/env bash
# Library: Keras 3.15.1 on TensorFlow 2.21.0.
# Behaviour: `fit` ends each epoch of a `tf.data.Dataset` of unknown length, such as one of records
#   or with `filter`, by a step without data. If batches have a fixed size (`drop_remainder=True`),
#   what needs no data in this step is done all the same: its rows count in the loss and in metrics,
#   weights decay, and the optimizer counts a step.
# Expected: the numbers and weights of the same data of known length, as on JAX and torch.
# Seen in: keras/src/trainers/epoch_iterator.py, _enumerate_iterator: it yields steps until the
#   iterator raises an error, which it does within the graph of
#   keras/src/backend/tensorflow/trainer.py, one_step_on_iterator.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'EOF'
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

warnings.simplefilter("ignore")  # that the input ran out of data


def trained(is_known):
    """Returns loss, weight and steps after an epoch of three batches of inputs 0 and targets 4."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=1.0), "mae")
    data = tf.data.Dataset.from_tensor_slices((np.zeros((12, 1)), np.full((12, 1), 4.0)))
    if not is_known:
        data = data.filter(lambda x, y: True)
    [loss] = model.fit(data.batch(4, drop_remainder=True), verbose=0).history["loss"]
    weight = float(model.get_weights()[0][0, 0])
    return round(loss, 3), round(weight, 3), int(model.optimizer.iterations)


known, unknown = trained(True), trained(False)
print(f"loss, weight and steps: of known length {known}, of unknown length {unknown}")
if (known, unknown) != ((4.0, 0.729, 3), (3.0, 0.656, 4)):
    sys.exit("The behaviour has changed; seen before: (4.0, 0.729, 3), (3.0, 0.656, 4)")
EOF
