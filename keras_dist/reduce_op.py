"""The reductions by the names that users know: `Average`, `Sum`, `Min`, `Max`, `Product`."""

from keras_dist import _engine

__all__ = ["Average", "Max", "Min", "Product", "ReduceOp", "Sum"]

ReduceOp = _engine.ReduceOp

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
