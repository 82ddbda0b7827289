"""A function on many ranks, called from one process: Python, a notebook, a console."""

from keras_dist.launch.interactive.start import run

__all__ = ["run"]
