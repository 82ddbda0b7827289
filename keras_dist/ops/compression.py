"""Wire formats of numbers between nodes: `Compression.fp16`, or a custom `Compressor`."""

from keras_dist import _engine

Compression = _engine.Compression
Compressor = _engine.Compressor
