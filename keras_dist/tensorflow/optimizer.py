"""DistributedOptimizer with the arguments that Horovod's has, in their order."""

from typing import Any

import keras

from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.training import optimizer as own

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer average its gradients. See `keras_dist.DistributedOptimizer`.

    Use it or `DistributedGradientTape`, not both: gradients that the tape has reduced are an
    error.

    Args:
        optimizer: an instance of a Keras optimizer; those of TensorFlow 1 are not wrapped.
        name: accepted; has no effect.
        use_locking: accepted; has no effect.
        device_dense: accepted; has no effect.
        device_sparse: accepted; has no effect.
        compression: as for `keras_dist.DistributedOptimizer`, as are the others.
        sparse_as_dense: whether rows of an embedding's gradient become dense first.
        backward_passes_per_step: the number of passes for each step.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: by what an average divides before the sum.
        average_aggregated_gradients: whether the passes are averaged.
        num_groups: deprecated: `groups` as a number.
        groups: which gradients travel together.
        process_set: the ranks that average among themselves. Defaults to all.
        scale_local_gradients: whether gradients of local variables are divided by the number
            of ranks.

    Returns:
        `optimizer`.
    """
    return own.DistributedOptimizer(
        optimizer,
        op,
        process_set,
        compression,
        name=name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        scale_local_gradients=scale_local_gradients,
        num_groups=num_groups,
    )
