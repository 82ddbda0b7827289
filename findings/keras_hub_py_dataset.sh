#!/usr/bin/env bash
# Library: KerasHub 0.32.0 with Keras 3.15.1 on JAX 0.10.2.
# Behaviour: the task models of KerasHub preprocess in `fit`, and take arrays, `tf.data` and grain data
#   sets only. A `keras.utils.PyDataset` is taken for an array: the error names a conversion to a tensor,
#   of whatever the data set returns.
# Expected: training, as `fit` of the same layers in a `keras.Model` does, or an error that names
#   the kinds of data.
# Seen in: keras_hub/src/utils/pipeline_model.py, _convert_inputs_to_dataset.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras-hub==0.32.0 keras==3.15.1 jax==0.10.2 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=jax TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'EOF'
import sys

import keras
import keras_hub
import numpy as np

backbone = keras_hub.models.BertBackbone(
    vocabulary_size=10, num_layers=1, num_heads=1, hidden_dim=4, intermediate_dim=4
)
task = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
plain = keras.Model(task.input, task.output)
inputs = {name: np.ones((4, 3), "int32") for name in ("token_ids", "segment_ids", "padding_mask")}
labels = np.zeros(4, "int32")


class Batches(keras.utils.PyDataset):
    """One batch."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return inputs, labels


def fitted(model, *data):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    try:
        model.fit(*data, verbose=0)
    except Exception as error:
        return type(error).__name__
    return "trained"


seen = fitted(task, inputs, labels), fitted(plain, Batches()), fitted(task, Batches())
print("arrays, PyDataset in keras.Model, PyDataset in a task of KerasHub:", ", ".join(seen))
if seen != ("trained", "trained", "ValueError"):
    sys.exit("The behaviour has changed; seen before: trained, trained, ValueError")
EOF
