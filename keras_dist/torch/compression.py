"""What tensors look like on their way: Horovod's interface of a compressor, and the usual ones."""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import _engine

__all__ = ["Compression", "Compressor", "compressed", "decompressed", "is_done_here", "wire_of"]


class Compressor:
    """The base of a compression of one's own, as in Horovod: tensors to other tensors and back.

    It works on what a rank brings and on the result, which is summed in between as it is.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns what is reduced, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns what a result stands for.

        Args:
            tensor: the result, of the dtype that `compress` has given.
            ctx: what `compress` has returned besides.
        """
        raise NotImplementedError


class _AsItIs(Compressor):
    wire = _engine.Compression.none

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Floats in a narrower dtype, whole numbers as they are.

    keras_dist itself takes `wire`: it rounds between nodes alone, and sums in full.
    """

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.narrow) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class _Float16(_Cast):
    wire = _engine.Compression.fp16
    narrow = torch.float16


class _BFloat16(_Cast):
    wire = _engine.Compression.bf16
    narrow = torch.bfloat16


class Compression:
    """The compressions to choose from: `none`, `fp16` and `bf16`."""

    none = _AsItIs
    fp16 = _Float16
    bf16 = _BFloat16


def wire_of(compression: Any) -> Any:
    """Returns what the engine is to do; nothing, where a user's class does it here."""
    if compression is None or isinstance(compression, str | _engine.Compressor):
        return compression
    return getattr(compression, "wire", _engine.Compression.none)


def compressed(
    compression: Any, tensors: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], list[Any]]:
    """Returns what is reduced, and what `decompressed` needs to know of each."""
    if not is_done_here(compression):
        return tensors, []
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]


def decompressed(
    compression: Any, tensors: Sequence[torch.Tensor], contexts: list[Any]
) -> list[torch.Tensor]:
    """Returns what results stand for."""
    if not is_done_here(compression):
        return list(tensors)
    pairs = zip(tensors, contexts, strict=True)
    return [compression.decompress(tensor, ctx) for tensor, ctx in pairs]


def is_done_here(compression: Any) -> bool:
    """Tells whether a compression is a user's class, which the engine knows nothing of."""
    known = compression is None or isinstance(compression, str | _engine.Compressor)
    return not known and not hasattr(compression, "wire")
