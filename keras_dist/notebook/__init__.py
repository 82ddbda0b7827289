"""Notebooks whose cells each rank runs in its own process."""

from keras_dist.notebook.document import executed_path
from keras_dist.notebook.execution import run_notebook

__all__ = ["executed_path", "run_notebook"]
