#!/usr/bin/env bash
# Library: Keras 3.15.1 on TensorFlow 2.21.0.
# Behaviour: an `evaluate` with SwapEMAWeights, as a validation in `fit`, changes the weights that are
#   trained: small ones are lost beside large averages.
# Expected: the weights that were there before, as on JAX and torch.
# Seen in: keras/src/callbacks/swap_ema_weights.py, _tf_swap_variables: it swaps weights and averages
#   by sums and differences, which are rounded.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 jax==0.10.2 numpy==2.4.6

cat >"$folder/weights.py" <<'EOF'
import keras
import numpy as np

dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(1e8))
model = keras.Sequential([keras.Input((1,)), dense])
model.compile(keras.optimizers.SGD(0.0, use_ema=True), "mse")
ones = np.ones((1, 1), "float32")
model.train_on_batch(ones, ones)  # the average is 1e8
dense.kernel.assign([[1.0]])
model.evaluate(ones, ones, callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)
print(float(dense.kernel[0, 0]))
EOF

of() {
    KERAS_HOME="$folder" KERAS_BACKEND=$1 TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" \
        "$folder/venv/bin/python" "$folder/weights.py" 2>"$folder/errors" ||
        { cat "$folder/errors" >&2 && return 1; }
}

tensorflow=$(of tensorflow)
jax=$(of jax)
echo "A weight of 1.0 after evaluate: TensorFlow $tensorflow, JAX $jax"
if [ "$tensorflow" != "0.0" ] || [ "$jax" != "1.0" ]; then
    echo "The behaviour has changed; seen before: 0.0 on TensorFlow, 1.0 on JAX" >&2
    exit 1
fi
