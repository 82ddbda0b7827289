#!/usr/bin/env bash
# Library: datasets 5.2.0 of Hugging Face with TensorFlow 2.21.0.
# Behaviour: if the global seed of TensorFlow is set, as by `keras.utils.set_random_seed`, the pipeline
#   of `to_tf_dataset(shuffle=True)` has the same order in each epoch. Without a seed it has another
#   one in each epoch.
# Expected: another order in each epoch, the same in each run, as of `tf.data.Dataset.shuffle` with
#   this seed. As it is, a seed for repeatable runs turns off the reshuffling, without a message.
# Seen in: datasets/utils/tf_utils.py, dataset_to_tf: `tf.random.uniform` in a function of `scan` draws
#   "a new random seed once per epoch", but each iterator starts a seeded operation anew.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 tensorflow-cpu==2.21.0 numpy==2.4.6

cd "$folder"
HF_HOME="$folder/home" TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" -W ignore - <<'EOF'
import sys

import datasets
import tensorflow as tf

COUNT = 20


def epochs(data):
    return [[int(number) for number in data] for _ in range(3)]


def of_datasets():
    rows = datasets.Dataset.from_dict({"x": list(range(COUNT))})
    return rows.to_tf_dataset(batch_size=None, columns="x", shuffle=True)


def of_tensorflow():
    return tf.data.Dataset.range(COUNT).shuffle(COUNT)


seen = {}
for seed in (None, 1):
    for make in (of_datasets, of_tensorflow):
        tf.random.set_seed(seed)
        orders = epochs(make())
        assert all(sorted(order) == list(range(COUNT)) for order in orders)
        seen[seed, make] = len({tuple(order) for order in orders})
        print(f"{make.__name__}, seed {seed}: {seen[seed, make]} orders in 3 epochs")
if list(seen.values()) != [3, 3, 1, 3]:
    sys.exit("The behaviour has changed; seen before: one order of datasets with a seed")
EOF
