"""Compression of torch tensors."""

from typing import Any

import torch

from keras_dist.ops.compression import Compression as Wires
from keras_dist.ops.tensor_compression import Compressor, NoCompression

__all__ = ["Compression", "Compressor"]


class _Cast(Compressor):
    """Casts floating-point tensors to a narrower dtype; integers stay as they are.

    keras_dist uses `wire` instead: it rounds only between nodes, and sums in full precision.
    """

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.narrow) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class _Float16(_Cast):
    wire = Wires.fp16
    narrow = torch.float16


class _BFloat16(_Cast):
    wire = Wires.bf16
    narrow = torch.bfloat16


class Compression:
    """The available compressions: `none`, `fp16` and `bf16`."""

    none = NoCompression
    fp16 = _Float16
    bf16 = _BFloat16
