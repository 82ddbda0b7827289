"""Notebooks on many ranks: each rank runs the cells in its own process."""

from keras_dist.launch.notebook.document import executed_path
from keras_dist.launch.notebook.execution import run_notebook

__all__ = ["executed_path", "run_notebook"]
