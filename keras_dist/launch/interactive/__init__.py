"""`keras_dist.run`: a function on many ranks, called from a process that is not a rank."""

from keras_dist.launch.interactive.start import run

__all__ = ["run"]
