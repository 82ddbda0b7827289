#!/usr/bin/env bash
# Library: grain 0.2.18.
# Behaviour: a `DataLoader` whose `IndexSampler` has `ShardOptions(..., drop_remainder=False)` reads
#   too few samples on the first shards and too many on the last: of five samples on two shards in
#   one epoch, the third is never read; in two epochs one shard has its samples once and two thirds,
#   the other two and a half times.
# Expected: each sample once in an epoch. "If False will distribute the remainder N over the first N
#   shards", says the docstring of ShardOptions, and drop_remainder=True is there to drop samples.
# Seen in: grain/_src/python/samplers.py, IndexSampler, and data_loader.py: each shard takes every
#   n-th index of `num_epochs * num_records`, and counts on through its own samples, whatever their
#   number is.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6

cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys

import grain


def read(shard, epochs):
    """Returns the samples of one of two shards."""
    sampler = grain.samplers.IndexSampler(
        5,
        shuffle=False,
        num_epochs=epochs,
        shard_options=grain.sharding.ShardOptions(shard, 2, drop_remainder=False),
    )
    return list(grain.DataLoader(data_source=range(5), sampler=sampler, worker_count=0))


seen = {epochs: [read(shard, epochs) for shard in range(2)] for epochs in (1, 2)}
for epochs, shards in seen.items():
    print(f"{epochs} epochs: {shards[0]} and {shards[1]}")
if seen != {1: [[0, 1], [3, 4]], 2: [[0, 1, 2, 0, 1], [3, 4, 3, 4, 3]]}:
    sys.exit("The behaviour has changed; seen before: sample 2 is missing")
EOF
