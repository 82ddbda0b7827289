"""Public names of reductions, and of wire formats of numbers between nodes (`Compression.fp16`)."""

from keras_dist import _engine

Compression = _engine.Compression
Compressor = _engine.Compressor
ReduceOp = _engine.ReduceOp

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
