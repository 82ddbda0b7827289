"""`DistributedOptimizer` with the arguments of Horovod's, in their order."""

from typing import Any

import keras

from keras_dist.ops.descriptions import described_by
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.training import optimizer as optimizer_module


@described_by(optimizer_module.DistributedOptimizer)
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
    """Optimizers of TensorFlow 1 are not supported.

    Use either this function or `DistributedGradientTape`: an optimizer refuses gradients that a
    tape has reduced.

    Args:
        name: accepted for scripts of Horovod; has no effect.
        device_dense: accepted for scripts of Horovod; has no effect.
        device_sparse: accepted for scripts of Horovod; has no effect.
        compression: a member of `Compression`, or a value that `keras_dist.DistributedOptimizer`
            takes. Defaults to `KERAS_DIST_COMPRESSION`.
    """
    return optimizer_module.DistributedOptimizer(
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
