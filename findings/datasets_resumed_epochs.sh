#!/usr/bin/env bash
# Library: datasets 5.2.0 of Hugging Face.
# Behaviour: after `load_state_dict`, each iteration over an `IterableDataset` begins where the state
#   was saved, not only the first one, until `set_epoch` is called with another epoch. Iterations
#   themselves do not count epochs.
# Expected: the rest of the epoch in which the state was saved, and then whole epochs. `set_epoch` is
#   documented for another order of shuffled data. Without it, a training that resumes within an
#   epoch never sees the first samples again, without a message.
# Seen in: datasets/iterable_dataset.py: `_starting_state_dict` is set by `load_state_dict`, used by
#   each iteration whose epoch is that of the state, and never removed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6

cd "$folder"
HF_HOME="$folder/home" "$folder/venv/bin/python" -W ignore - <<'EOF'
import itertools
import sys

import datasets


def samples():
    return datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset()


def epoch(data):
    return [row["x"] for row in data]


saved, resumed = samples(), samples()
list(itertools.islice(saved, 4))
resumed.load_state_dict(saved.state_dict())
seen = [epoch(resumed), epoch(resumed)]
resumed.set_epoch(1)
seen.append(epoch(resumed))
print(f"without a break: {epoch(samples())}")
print(f"resumed after four samples: {seen[:2]}, after set_epoch: {seen[2]}")
if seen != [[4, 5], [4, 5], [0, 1, 2, 3, 4, 5]]:
    sys.exit("The behaviour has changed; seen before: [4, 5] twice, and all after set_epoch")
EOF
