#!/usr/bin/env bash
# Library: numpy 2.4.6 with ml_dtypes 0.6.0, whose bfloat16 JAX, Keras and TensorFlow give to numpy.
# Behaviour: `sum`, `mean` and `std` of a bfloat16 array add in bfloat16: from 256 on, adding 1
#   changes nothing. The mean of 1000 ones is 0.256.
# Expected: about the right value, as of float16, whose `mean` numpy computes in float32, and as of
#   `jax.numpy` and torch. A loss that a script averages so falls with the number of samples.
# Seen in: numpy/_core/_methods.py, _mean: only float16 gets float32 as the dtype of its sum.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0

cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys

import ml_dtypes
import numpy as np

for dtype, expected in ((np.float16, [1.0, 1.0]), (ml_dtypes.bfloat16, [0.256, 0.026])):
    seen = [round(float(np.mean(np.ones(count, dtype))), 3) for count in (1000, 10000)]
    print(f"mean of 1000 and 10000 ones, {np.dtype(dtype).name}: {seen}")
    if seen != expected:
        sys.exit(f"The behaviour has changed; seen before: {expected}")
wide = float(np.mean(np.ones(1000, ml_dtypes.bfloat16), dtype=np.float32))
print(f"the same with dtype=np.float32: {wide}")
EOF
