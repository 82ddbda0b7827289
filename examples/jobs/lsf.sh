#!/bin/bash
# LSF: 8 ranks, 4 on each node. Submit it with: bsub < lsf.sh
#BSUB -J keras_dist
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -gpu "num=4"
#BSUB -W 1:00
#BSUB -o keras_dist.%J.log
#BSUB -wa USR1 -wt 2

module load python openmpi # the cluster's MPI; keras_dist is installed without an MPI extra
source "$HOME/keras_dist/bin/activate"

# Two minutes before the end LSF sends SIGUSR1, which keras-dist passes on.
exec keras-dist run --log-dir "logs/$LSB_JOBID" python train.py
