"""Notebooks on many ranks: each rank runs the cells in its own process."""
