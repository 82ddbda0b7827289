#!/usr/bin/env bash
# Library: tfrecord 1.14.6, a reader of TFRecord files for torch.
# Behaviour: `tfrecord_loader` with an index begins at a random record, by the global generator of
#   numpy, and goes on from the begin of the file; without an index it reads in order. With
#   `shard` but no index each shard is the whole file.
# Expected: the order of the file from both, since nothing asks for shuffling, and shards that are
#   parts of the file. As it is, predictions do not belong to the records by position.
# Seen in: tfrecord/reader.py, tfrecord_iterator.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tfrecord==1.14.6 numpy==2.4.6

cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys

import numpy as np
import tfrecord
import tfrecord.tools.tfrecord2idx

writer = tfrecord.TFRecordWriter("data.tfrecord")
for number in range(6):
    writer.write({"number": (number, "int")})
writer.close()
tfrecord.tools.tfrecord2idx.create_index("data.tfrecord", "data.index")


def read(index, shard=None):
    """Returns the numbers of the records in the order in which they are read."""
    records = tfrecord.tfrecord_loader("data.tfrecord", index, {"number": "int"}, shard)
    return [int(record["number"].item()) for record in records]


def begin(seed):
    np.random.seed(seed)
    return read("data.index")


order = list(range(6))
seen = [read(None), begin(0), begin(1), begin(2), read(None, (0, 2)), read(None, (1, 2))]
names = "without an index", *("index, seed %d" % seed for seed in range(3)), "shard 0", "shard 1"
for name, numbers in zip(names, seen, strict=True):
    print(f"{name}: {numbers}")
if seen != [order, [4, 5, 0, 1, 2, 3], [5, 0, 1, 2, 3, 4], order, order, order]:
    sys.exit("The behaviour has changed; seen before: begins at 4, 5 and 0, and whole files")
EOF
