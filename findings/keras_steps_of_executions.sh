#!/usr/bin/env bash
# Library: Keras 3.15.1 on JAX 0.10.2, and on TensorFlow 2.21.0.
# Behaviour: an epoch with `steps_per_epoch=3` and `steps_per_execution=2` trains four steps if there
#   is data for them.
# Expected: three steps, as with `steps_per_execution=1`: the last execution has one.
# Seen in: keras/src/trainers/epoch_iterator.py, _enumerate_iterator: every execution takes
#   `steps_per_execution` batches, also the last one of an epoch.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 jax==0.10.2 numpy==2.4.6

cat >"$folder/steps.py" <<'EOF'
import keras
import numpy as np


def batches():
    while True:
        yield np.ones((4, 1), "float32"), np.ones((4, 1), "float32")


def steps(size):
    """Returns the number of updates in two epochs of three steps."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=size)
    model.fit(batches(), steps_per_epoch=3, epochs=2, shuffle=False, verbose=0)
    return int(model.optimizer.iterations)


print(*map(steps, (1, 2)))
EOF

of() {
    KERAS_HOME="$folder" KERAS_BACKEND=$1 TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" \
        "$folder/venv/bin/python" "$folder/steps.py" 2>"$folder/errors" ||
        { cat "$folder/errors" >&2 && return 1; }
}

tensorflow=$(of tensorflow)
jax=$(of jax)
echo "Updates with steps_per_execution of 1 and 2: TensorFlow $tensorflow, JAX $jax"
if [ "$tensorflow" != "6 8" ] || [ "$jax" != "6 8" ]; then
    echo "The behaviour has changed; seen before: 6 and 8 updates" >&2
    exit 1
fi
