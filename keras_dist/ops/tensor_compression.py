"""Horovod's interface of a compressor: tensors of a framework to others and back. Knows none.

`keras_dist.Compressor` is another one: of numpy arrays, in the engine, between nodes alone.
"""

from collections.abc import Sequence
from typing import Any

from keras_dist.ops.compression import Compression as Wires
from keras_dist.ops.compression import Compressor as Wire

__all__ = ["AsItIs", "Compressor", "compressed", "decompressed", "is_done_here", "wire_of"]


class Compressor:
    """The base of a compression of one's own, as in Horovod: tensors to other tensors and back.

    It works on what a rank brings and on the result, which is summed in between as it is. The class
    itself is passed, not an instance.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what is reduced, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns what a result stands for.

        Args:
            tensor: the result, of the dtype that `compress` has given.
            ctx: what `compress` has returned besides.
        """
        raise NotImplementedError


class AsItIs(Compressor):
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
    """Returns what the engine is to do; nothing, where a user's class does it here."""
    return Wires.none if is_done_here(compression) else getattr(compression, "wire", compression)


def compressed(compression: Any, tensors: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
    """Returns what is reduced, and what `decompressed` needs to know of each."""
    if not is_done_here(compression):
        return tensors, []
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]


def decompressed(compression: Any, tensors: Sequence[Any], contexts: list[Any]) -> list[Any]:
    """Returns what results stand for."""
    if not is_done_here(compression):
        return list(tensors)
    pairs = zip(tensors, contexts, strict=True)
    return [compression.decompress(tensor, ctx) for tensor, ctx in pairs]


def is_done_here(compression: Any) -> bool:
    """Tells whether a compression is a user's class, which the engine knows nothing of."""
    known = compression is None or isinstance(compression, str | Wire)
    return not known and not hasattr(compression, "wire") and hasattr(compression, "compress")
