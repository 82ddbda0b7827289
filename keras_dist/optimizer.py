"""DistributedOptimizer: the user's own optimizer, with its gradients averaged over ranks."""

import keras

from keras_dist import _engine, errors, runtime
from keras_dist.process_sets import ProcessSet
from keras_dist.reduction import GradientReduction, attach, is_distributed
from keras_dist.trainer import watch_models

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    op: _engine.ReduceOp | str = _engine.ReduceOp.AVERAGE,
    process_set: ProcessSet | None = None,
    compression: _engine.Compressor | str | None = None,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer average its gradients over the ranks before it applies them.

    The optimizer itself is changed and returned; its class, state and configuration stay
    as they are. With one rank its steps are those of plain Keras; but rows of an embedding's
    gradient that occur several times are added up before the optimizer sees them, on any
    number of ranks, as in the dense gradient.

    Collective: not this call, but every step that the optimizer makes: every rank must make
    the same steps, with the same variables.

    Args:
        optimizer: an instance of a Keras optimizer, built or not; a `LossScaleOptimizer`
            reduces the scaled gradients, so that all ranks skip the same steps.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        process_set: the ranks that average among themselves, a `ProcessSet`; the others apply
            their own gradients. Then models differ between the set and the rest, while the
            callbacks go on to speak for all ranks. Defaults to all ranks.
        compression: what gradients of float32 and float64 look like between nodes, as for
            `allreduce`; rows of an embedding's gradient travel as they are. Defaults to
            `KERAS_DIST_COMPRESSION`, that is `none`.

    Returns:
        `optimizer`.

    Raises:
        ArgumentTypeError: `optimizer` is not a Keras optimizer, or `process_set` no
            `ProcessSet`.
        ArgumentError: it is distributed already, `op` is another one, `process_set` has no id,
            or there is no such `compression`.

    Example:
    ```python
    optimizer = keras.optimizers.SGD(0.01 * keras_dist.size())
    model.compile(optimizer=keras_dist.DistributedOptimizer(optimizer), loss="mse")
    ```
    """
    where = runtime.where()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise errors.ArgumentTypeError(
            errors.explain(
                where,
                "an instance of a Keras optimizer",
                f"{optimizer!r} of type {type(optimizer).__name__}",
                "Pass for example keras.optimizers.SGD(0.01); keras.optimizers.get(...) "
                "turns a name or a configuration into one.",
            )
        )
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise errors.ArgumentError(
            errors.explain(
                where,
                "an optimizer that is not distributed yet",
                f"a {type(optimizer).__name__} that is",
                "Wrap it once; wrapped twice it would average twice.",
            )
        )
    parsed = _engine.parse_op(op, where)
    if parsed not in (_engine.ReduceOp.AVERAGE, _engine.ReduceOp.SUM):
        raise errors.ArgumentError(
            errors.explain(
                where, "op to be Average or Sum for gradients", parsed.value, "Use Average."
            )
        )
    runtime.includes_me(process_set)  # raises where there is no such set
    compressor = _engine.parse_compression(compression, where)
    # What Keras' own optimizers do with a gradient is known.
    own = type(optimizer).__module__.startswith("keras.src.")
    attach(optimizer, GradientReduction(parsed, own, process_set, compressor))
    watch_models()
    return optimizer
