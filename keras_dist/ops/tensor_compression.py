"""Horovod's interface of compressors, which convert tensors of any framework.

`keras_dist.Compressor` is another interface: it converts numpy arrays, only between nodes.
"""

from collections.abc import Sequence
from typing import Any

from keras_dist.ops.compression import Compression as Wires
from keras_dist.ops.compression import Compressor as Wire


class Compressor:
    """Base class of custom compressions, as in Horovod: tensors to other tensors and back.

    It converts the tensors of a rank before the reduction and the results after it. Pass the class
    itself, not an instance.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to reduce, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor that a result represents.

        Args:
            tensor: the result, of the dtype of the compressed tensor.
            ctx: the context from `compress`.
        """
        raise NotImplementedError


class NoCompression(Compressor):
    """No compression."""

    wire = Wires.none

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor."""
        return tensor


def wire_of(compression: Any) -> Any:
    """Returns the wire format for the engine; `none` if a custom class converts tensors."""
    return Wires.none if is_custom(compression) else getattr(compression, "wire", compression)


def compressed(compression: Any, tensors: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
    """Returns the tensors to reduce, and the context of each."""
    if not is_custom(compression):
        return tensors, []
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]


def decompressed(compression: Any, tensors: Sequence[Any], contexts: list[Any]) -> list[Any]:
    """Returns the tensors that results represent."""
    if not is_custom(compression):
        return list(tensors)
    pairs = zip(tensors, contexts, strict=True)
    return [compression.decompress(tensor, ctx) for tensor, ctx in pairs]


def is_custom(compression: Any) -> bool:
    """Returns whether a compression is a custom class, unknown to the engine."""
    known = compression is None or isinstance(compression, str | Wire)
    return not known and not hasattr(compression, "wire") and hasattr(compression, "compress")
