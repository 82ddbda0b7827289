#!/usr/bin/env bash
# Library: orbax-checkpoint 0.12.8 on JAX 0.10.2.
# Behaviour: a tree with the key `a.b` and, under `a`, a key `b`, is saved and restored without an
#   error, but both leaves then have one value; the other is lost. `a/b` and `a`, `b` stay apart.
# Expected: both values, or an error. Keys with dots are those of a `state_dict` of torch.
# Seen in: orbax/checkpoint/_src/tree/utils.py, param_name_from_keypath: the keys of a path are
#   joined by a dot, and an array is stored under this name.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6

cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - 2>"$folder/log" <<'EOF' || { cat "$folder/log"; exit 1; }
import os
import sys

import numpy as np
import orbax.checkpoint

for number, separator in enumerate(("/", ".")):
    path = os.path.abspath(f"checkpoint{number}")
    checkpointer = orbax.checkpoint.PyTreeCheckpointer()
    key = f"a{separator}b"
    checkpointer.save(path, {key: np.array([1.0]), "a": {"b": np.array([2.0])}})
    tree = checkpointer.restore(path)
    seen = float(tree[key][0]), float(tree["a"]["b"][0])
    print(f"saved {key!r}: 1.0 and 'a', 'b': 2.0; restored {seen}")
    if (seen == (1.0, 2.0)) != (separator == "/"):
        sys.exit("The behaviour has changed; seen before: a value lost with a dot alone")
EOF
