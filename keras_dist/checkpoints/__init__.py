"""Checkpoints that all ranks write and any number of ranks reads.

`keras_dist.callbacks.ShardedCheckpoint` writes them during `fit`. The functions of this package
read them: `load` into a model, on all ranks, and `export` as one `.keras` file, in one process.
"""

from keras_dist.checkpoints.exporting import export
from keras_dist.checkpoints.loading import load

__all__ = ["export", "load"]
