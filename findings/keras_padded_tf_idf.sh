#!/usr/bin/env bash
# Library: Keras 3.15.1 with TensorFlow 2.21.0.
# Behaviour: a saved model with a TextVectorization(output_mode="tf_idf", pad_to_max_tokens=True)
#   whose vocabulary is smaller than max_tokens cannot be loaded: the weights of the file are padded,
#   and must be as many as the tokens of the file.
# Expected: the model, as without pad_to_max_tokens.
# Seen in: keras/src/layers/preprocessing/index_lookup.py, load_assets: it passes the padded weights
#   to set_vocabulary.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=tensorflow CUDA_VISIBLE_DEVICES="" TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/venv/bin/python" - <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

texts = np.array(["the cat", "a dog", "the dog sat"])


def loads(**options):
    layer = keras.layers.TextVectorization(output_mode="tf_idf", max_tokens=20, **options)
    layer.adapt(texts)
    inputs = keras.Input((), dtype="string")
    model = keras.Model(inputs, layer(inputs))
    model.save("model.keras")
    try:
        loaded = keras.models.load_model("model.keras")
    except ValueError as error:
        return next(line for line in str(error).splitlines() if "idf_weights" in line)
    before, after = (each.predict(tf.constant(texts), verbose=0) for each in (model, loaded))
    return "loads" if np.array_equal(before, after) else "other numbers"


plain, padded = loads(), loads(pad_to_max_tokens=True)
print(f"not padded: {plain}; padded: {padded}")
if "must be the same length" not in padded:
    sys.exit("The behaviour has changed: a padded vocabulary is loaded.")
if plain != "loads":
    sys.exit("The behaviour has changed; seen before: loads without padding.")
PYTHON
