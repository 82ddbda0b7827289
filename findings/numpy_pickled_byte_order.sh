#!/usr/bin/env bash
# Library: numpy 2.4.6, on a little-endian machine.
# Behaviour: an array of the other byte order, such as `>i4`, is native after a round trip by
#   `pickle` with protocols 2 to 4, and keeps its dtype with protocol 5. In a structured array
#   fields keep their order.
# Expected: the same dtype from all protocols. Processes that exchange arrays as pickles see a
#   dtype that depends on the protocol, and differ from the sender, which still has its own array.
# Seen in: numpy/_core/src/multiarray/methods.c, array_setstate, which swaps bytes, and
#   array_reduce_ex_picklebuffer, whose result does not come there.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6

cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import pickle
import sys

import numpy as np

if sys.byteorder != "little":
    sys.exit("This script needs a little-endian machine.")
arrays = {
    "array": (np.arange(3, dtype=">i4"), {2: "<i4", 3: "<i4", 4: "<i4", 5: ">i4"}),
    "array with a field": (
        np.zeros(3, dtype=[("x", ">i4")]),
        dict.fromkeys((2, 3, 4, 5), ">i4"),
    ),
}
for name, (array, expected) in arrays.items():
    for protocol, dtype in expected.items():
        copy = pickle.loads(pickle.dumps(array, protocol))
        np.testing.assert_array_equal(copy, array)
        seen = (copy["x"] if copy.dtype.names else copy).dtype.str
        print(f"{name} of >i4, protocol {protocol}: {seen}")
        if seen != dtype:
            sys.exit(f"The behaviour has changed; seen before: {dtype}")
EOF
