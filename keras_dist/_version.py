"""The version of keras_dist, in the one place that holds it."""

__version__ = "1.0.0rc1"
