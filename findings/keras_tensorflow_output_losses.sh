#!/usr/bin/env bash
# Library: Keras 3.15.1 on TensorFlow 2.21.0.
# Behaviour: of a model with several outputs, the loss of an output in the logs of `fit` and `evaluate`
#   is the mean over batches, however few samples the last one has, while `loss` is that over
#   samples: the losses of the outputs do not add up to `loss`.
# Expected: means over samples, as on JAX and torch.
# Seen in: keras/src/trainers/compile_utils.py, CompileLoss.call: the metric of an output is given
#   `shape[0]` of the output as the weight, which TensorFlow does not know in advance.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 jax==0.10.2 numpy==2.4.6

cat >"$folder/losses.py" <<'EOF'
import keras
import numpy as np

x = keras.Input((1,))
outputs = {name: keras.layers.Identity(name=name)(x) for name in ("a", "b")}
model = keras.Model(x, outputs)
model.compile("sgd", loss="mae")
# Two batches: eight samples with a loss of 1 in each output, and one with a loss of 10.
data = np.array([[1.0]] * 8 + [[10.0]], "float32")
targets = np.zeros_like(data)
logs = model.evaluate(
    data, {"a": targets, "b": targets}, batch_size=8, verbose=0, return_dict=True
)
print(*(f"{name} {logs[name]:.2f}" for name in sorted(logs)))
EOF

of() {
    KERAS_HOME="$folder" KERAS_BACKEND=$1 TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" \
        "$folder/venv/bin/python" "$folder/losses.py" 2>"$folder/errors" ||
        { cat "$folder/errors" >&2 && return 1; }
}

tensorflow=$(of tensorflow)
jax=$(of jax)
echo "TensorFlow: $tensorflow"
echo "JAX:        $jax"
if [ "$tensorflow" != "a_loss 5.50 b_loss 5.50 loss 4.00" ] ||
    [ "$jax" != "a_loss 2.00 b_loss 2.00 loss 4.00" ]; then
    echo "The behaviour has changed; seen before: 5.50 of each output on TensorFlow, 2.00 on JAX" >&2
    exit 1
fi
