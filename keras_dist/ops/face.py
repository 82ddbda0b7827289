"""What the packages of TensorFlow, torch and JAX share: they add conversion and gradients.

Each operation is described and checked once, by its function in `keras_dist.ops`. A function of the
same name for the tensors of a framework is declared by `face`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from keras_dist import _engine, errors, ops, runtime
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.reduce_op import Average, ReduceOp, Sum
from keras_dist.ops.reduce_op import Compression as Wires
from keras_dist.ops.reduce_op import Compressor as Wire
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet

F = TypeVar("F", bound=Callable[..., Any])


def face(operation: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a framework's form of an operation; see `described_by` and `raises_on_all`."""

    def declare(function: F) -> F:
        declared: Any = raises_on_all(described_by(operation)(function))
        return declared

    return declare


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The arguments of an `allreduce` or a `reducescatter`."""

    op: ReduceOp | str
    name: str | None
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet
    compression: Any = None

    def allreduce(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Reduces arrays. Collective: see `keras_dist.grouped_allreduce`."""
        if len(arrays) == 1:  # which has a short path
            return [self.allreduce_one(arrays[0])]
        return ops.grouped_allreduce(arrays, *self._options, self.compression)

    def allreduce_one(self, array: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Reduces an array, into `out` if given. Collective: see `keras_dist.allreduce`."""
        return ops.allreduce(array, *self._options, self.compression, out=out)

    def allreduce_into(self, arrays: Sequence[Any], outs: Sequence[np.ndarray]) -> None:
        """Reduces a single array of a list into that of another. Collective: as `allreduce`."""
        [array], [out] = arrays, outs
        self.allreduce_one(array, out)

    def reducescatter(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Reduces and scatters arrays. Collective: see `keras_dist.grouped_reducescatter`."""
        return ops.grouped_reducescatter(arrays, *self._options)

    @property
    def _options(self) -> tuple[ReduceOp | str, str | None, float, float, ProcessSet]:
        """The arguments that all reductions of `keras_dist.ops` take behind their values."""
        factors = self.prescale_factor, self.postscale_factor
        return self.op, self.name, *factors, self.process_set

    @property
    def is_differentiable(self) -> bool:
        """Whether the reduction is linear: `Average` or `Sum`."""
        return _engine.parse_op(self.op, runtime.where()) in (Average, Sum)

    def check_differentiable(self) -> None:
        if not self.is_differentiable:
            raise errors.ArgumentError(
                runtime.where(),
                "op to be Average or Sum in an allreduce that is differentiated",
                str(self.op),
                "Detach the tensor (stop_gradient in TensorFlow and JAX) if it needs no gradient.",
            )

    @property
    def scatter_gradient_factor(self) -> float:
        """The factor of the gradient of a `reducescatter`, as in Horovod."""
        sums = _engine.parse_op(self.op, runtime.where()) is Sum
        size = runtime.communicator(self.process_set).size if sums else 1
        return self.prescale_factor * self.postscale_factor * size


def rows_before(
    lengths: Sequence[int], name: str | None, process_set: ProcessSet | None
) -> np.ndarray:
    """Returns how many rows of each gathered array are of the ranks before this one. Collective."""
    before = runtime.communicator(process_set).rank
    counts: np.ndarray = ops.allgather(np.array([lengths]), name, process_set)
    return counts[:before].sum(0)


def own_rows(
    gradients: Sequence[np.ndarray],
    lengths: Sequence[int],
    name: str | None,
    process_set: ProcessSet | None,
) -> list[np.ndarray]:
    """Returns this rank's rows of the averaged gradients of gathered arrays. Collective; blocks."""
    averaged = ops.grouped_allreduce(gradients, name=name, process_set=process_set)
    starts = rows_before(lengths, name, process_set)
    triples = zip(averaged, starts, lengths, strict=True)
    return [rows[start : start + length] for rows, start, length in triples]


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
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
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
