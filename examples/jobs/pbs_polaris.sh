#!/bin/bash -l
# PBS in the style of Polaris at ALCF: whole nodes with 4 GPUs and 32 cores, ranks by the system's
# mpiexec. Its node file names each node once.
#PBS -N keras_dist
#PBS -A PROJECT
#PBS -q debug
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:eagle
#PBS -j oe

cd "$PBS_O_WORKDIR" || exit 1
module load cray-mpich-abi # the MPICH that mpi4py's wheel finds
source "$HOME/keras_dist/bin/activate"

RANKS_PER_NODE=4
NODES=$(sort -u "$PBS_NODEFILE" | wc -l)

exec mpiexec -n $((NODES * RANKS_PER_NODE)) --ppn "$RANKS_PER_NODE" --depth 8 --cpu-bind depth \
    python train.py
