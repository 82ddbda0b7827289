"""Compression of TensorFlow tensors."""

from typing import Any

import tensorflow as tf

from keras_dist.ops.compression import Compression as Wires
from keras_dist.ops.tensor_compression import Compressor, NoCompression

__all__ = ["Compression", "Compressor"]


class _Cast(Compressor):
    """Casts floating-point tensors to a narrower dtype; integers stay as they are.

    keras_dist uses `wire` instead: it rounds only between nodes, and sums in full precision.
    """

    narrow: tf.DType

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        given = tensor if tf.is_tensor(tensor) else tf.convert_to_tensor(tensor)
        return (tf.cast(given, cls.narrow) if given.dtype.is_floating else given), given.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx)


class _Float16(_Cast):
    wire = Wires.fp16
    narrow = tf.float16


class _BFloat16(_Cast):
    wire = Wires.bf16
    narrow = tf.bfloat16


class Compression:
    """The available compressions: `none`, `fp16` and `bf16`."""

    none = NoCompression
    fp16 = _Float16
    bf16 = _BFloat16
