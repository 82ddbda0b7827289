"""The version of keras_dist, in the one place that holds it."""

__version__ = "0.1.0"
