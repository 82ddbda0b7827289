#!/bin/bash
# Slurm starts the ranks: 4 on each of 2 nodes, a GPU for each.
#SBATCH --job-name=keras_dist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

module load python openmpi # the cluster's MPI; keras_dist is installed without an MPI extra
source "$HOME/keras_dist/bin/activate"

# Since Slurm 22.05 a step does not inherit this.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

srun --mpi=pmix --kill-on-bad-exit=1 python train.py
code=$?

# 120 s before the end Slurm sends SIGUSR1: the ranks write a backup and end with 75.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
