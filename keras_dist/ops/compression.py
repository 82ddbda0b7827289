"""What numbers look like between nodes: `Compression.fp16`, or a `Compressor` of one's own."""

from keras_dist import _engine

__all__ = ["Compression", "Compressor"]

Compression = _engine.Compression
Compressor = _engine.Compressor
