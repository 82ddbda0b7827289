"""Rewriting scripts for Horovod: proposed changes, and notes for the user."""

from keras_dist.migrate.rewriting import Note, rewrite

__all__ = ["Note", "rewrite"]
