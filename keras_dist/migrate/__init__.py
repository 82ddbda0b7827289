"""Scripts for Horovod, made scripts for keras_dist: what is proposed, and what is left to say."""

from keras_dist.migrate.rewriting import Note, rewrite

__all__ = ["Note", "rewrite"]
