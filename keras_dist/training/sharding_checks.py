"""Checks that the state of an optimizer can be sharded, before its first step."""

from typing import Any

import keras

from keras_dist import config, errors
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER
from keras_dist._compat.keras.sliced_updates import ELEMENTWISE, updates_elementwise
from keras_dist.ops.reduction_options import ReductionOptions

WITHOUT = "Omit shard_state, which is off by default."


def check_shardable(optimizer: Any, options: ReductionOptions, where: str) -> None:
    """Checks that an optimizer and options permit `shard_state`."""
    check_unscaled(optimizer, where)
    name = type(optimizer).__name__
    if isinstance(optimizer, MULTI_OPTIMIZER):
        _refuse(where, "a single optimizer", f"a {name}", WITHOUT)
    if not updates_elementwise(optimizer):
        expected = f"one of Keras' optimizers {', '.join(ELEMENTWISE)}"
        _refuse(where, expected, f"{name}, which may update elements by others", WITHOUT)
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        received = f"ema_overwrite_frequency={optimizer.ema_overwrite_frequency}"
        remedy = "Omit it: averaged weights are assigned at the end of fit. Or omit shard_state."
        _refuse(where, "no ema_overwrite_frequency", received, remedy)
    if options.process_set is not None:
        _refuse(where, "all ranks to reduce", "a process_set", WITHOUT)
    settings = config.settings()
    remedy = "Unset it, and use BackupAndRestore with keras-dist run --max-restarts."
    if settings.on_failure != "stop":
        received = f"KERAS_DIST_ON_FAILURE={settings.on_failure}"
        _refuse(where, "that the job ends if a rank dies, with its slice", received, remedy)


def check_unscaled(optimizer: Any, where: str) -> None:
    """Checks that the loss is not scaled."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        remedy = "Use mixed_bfloat16, which needs no loss scale, or omit shard_state."
        _refuse(where, "no dynamic loss scale", "a LossScaleOptimizer", remedy)


def check_no_local_variables(options: ReductionOptions, where: str) -> None:
    """Checks that local variables are not combined with `shard_state`."""
    if options.shard_state:
        received = "local variables, which no other rank could update"
        _refuse(where, "variables that all ranks share", received, WITHOUT)


def _refuse(where: str, expected: str, received: str, remedy: str) -> None:
    raise errors.ArgumentError(where, f"{expected}, with shard_state=True", received, remedy)
