"""The reductions by the names that users know: `Average`, `Sum`, `Min` and so on."""

from keras_dist import _engine

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"]

ReduceOp = _engine.ReduceOp

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
