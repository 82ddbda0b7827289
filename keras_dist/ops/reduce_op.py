"""The public names of reductions: `Average`, `Sum`, `Min`, `Max`, `Product`, `Adasum`."""

from keras_dist import _engine

ReduceOp = _engine.ReduceOp

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
