"""The arguments of a reduction, which framework packages use in forward and backward passes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, errors, ops, runtime
from keras_dist.ops.reduce_op import Average, ReduceOp, Sum
from keras_dist.runtime.process_sets import ProcessSet


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
        return ops.grouped_allreduce(
            arrays,
            op=self.op,
            name=self.name,
            prescale_factor=self.prescale_factor,
            postscale_factor=self.postscale_factor,
            process_set=self.process_set,
            compression=self.compression,
        )

    def allreduce_one(self, array: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Reduces an array, into `out` if given. Collective: see `keras_dist.allreduce`."""
        return ops.allreduce(
            array,
            self.op,
            self.name,
            self.prescale_factor,
            self.postscale_factor,
            self.process_set,
            self.compression,
            out=out,
        )

    def allreduce_into(self, arrays: Sequence[Any], outs: Sequence[np.ndarray]) -> None:
        """Reduces a single array of a list into that of another. Collective: as `allreduce`."""
        [array], [out] = arrays, outs
        self.allreduce_one(array, out)

    def reducescatter(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Reduces and scatters arrays. Collective: see `keras_dist.grouped_reducescatter`."""
        return ops.grouped_reducescatter(
            arrays,
            op=self.op,
            name=self.name,
            prescale_factor=self.prescale_factor,
            postscale_factor=self.postscale_factor,
            process_set=self.process_set,
        )

    @property
    def is_differentiable(self) -> bool:
        """Whether the reduction is linear: `Average` or `Sum`."""
        return _engine.parse_op(self.op, runtime.where()) in (Average, Sum)

    def check_differentiable(self) -> None:
        """Checks that the reduction has a gradient."""
        if not self.is_differentiable:
            raise errors.ArgumentError(
                runtime.where(),
                "op to be Average or Sum in an allreduce that is differentiated",
                str(self.op),
                "Detach the tensor (tf.stop_gradient in TensorFlow) if it needs no gradient.",
            )

    @property
    def scatter_gradient_factor(self) -> float:
        """The factor of the gradient of a `reducescatter`, as in Horovod."""
        sums = _engine.parse_op(self.op, runtime.where()) is Sum
        size = runtime.communicator(self.process_set).size if sums else 1
        return self.prescale_factor * self.postscale_factor * size
