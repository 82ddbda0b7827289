#!/bin/bash
# PBS with Open MPI, MPICH or Intel MPI: mpiprocs says how many ranks each node gets.
#PBS -N keras_dist
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe

cd "$PBS_O_WORKDIR" || exit 1
module load python openmpi # the cluster's MPI; keras_dist is installed without an MPI extra
source "$HOME/keras_dist/bin/activate"

exec keras-dist run --max-restarts 2 --log-dir "logs/$PBS_JOBID" python train.py
