"""Checks that the state of an optimizer can be sharded, before its first step."""

from typing import Any

import keras

from keras_dist import _engine, config, errors
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


def check_gradients_shardable(optimizer: Any, options: ReductionOptions, where: str) -> None:
    """Checks that an optimizer, options and the backend permit `shard_gradients`."""
    backend = keras.backend.backend()
    reasons = {
        "no shard_state": not options.shard_state,
        f"{backend}, whose compiled steps return all gradients at once": backend != "torch",
        "a clipnorm or global_clipnorm, which need whole gradients": optimizer.clipnorm is not None
        or optimizer.global_clipnorm is not None,
        "accumulation, which keeps whole gradients": options.passes > 1
        or optimizer.gradient_accumulation_steps,
        "a loss_scale_factor": optimizer.loss_scale_factor is not None,
        "op=Adasum, which needs whole gradients": options.op is _engine.ReduceOp.ADASUM,
        "groups": options.groups != (),
        "a compression": options.compression.name != "none",
    }
    for received, is_so in reasons.items():
        if is_so:
            expected = "shard_state=True on torch, and an update that needs no whole gradients"
            remedy = "Omit shard_gradients, which is off by default."
            explained = errors.explain(
                where, f"{expected}, with shard_gradients=True", received, remedy
            )
            raise errors.ArgumentError(explained)


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
