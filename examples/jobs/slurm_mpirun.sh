#!/bin/bash
# The MPI library's own launcher starts the ranks on the nodes that Slurm gives, which keras-dist run
# finds by itself, as many as there are tasks. Where srun was built for another MPI, take this.
#SBATCH --job-name=keras_dist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

module load python openmpi # the cluster's MPI; keras_dist is installed without an MPI extra
source "$HOME/keras_dist/bin/activate"

# No --signal: to requeue after it, a shell must wait in place of exec, as in docs/reliability.md.
# exec: signals of Slurm reach keras-dist, which passes them on.
exec keras-dist run --max-restarts 2 --log-dir "logs/$SLURM_JOB_ID" python train.py
