"""Notebooks on many ranks: each rank runs the cells in its own process."""

from keras_dist.launch.notebook.execution import run_notebook

__all__ = ["run_notebook"]
