"""`DistributedOptimizer`: makes a Keras optimizer average its gradients over the ranks."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_dist import _engine, errors
from keras_dist._compat import contract
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER, innermost_optimizer
from keras_dist.ops.arguments import resolve_groups
from keras_dist.ops.reduction_options import parse_layers, parse_reduction_options
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.copies import forget, watch_copies, watch_loss_scales
from keras_dist.training.distributed import attach, check_independent, is_distributed
from keras_dist.training.gradient_reduction import GradientReduction
from keras_dist.training.keras_hooks import watch_models
from keras_dist.training.local_steps import LocalSteps, with_local_steps
from keras_dist.training.model_state import optimizers_inside
from keras_dist.training.sharding import check_no_local_variables, check_shardable


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    op: _engine.ReduceOp | str = _engine.ReduceOp.AVERAGE,
    process_set: ProcessSet | None = None,
    compression: _engine.Compressor | _engine.GradientCompression | str | None = None,
    *,
    name: str | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    groups: int | list[list[keras.Variable]] | None = None,
    scale_local_gradients: bool = True,
    num_groups: int = 0,
    device_dense: str = "",
    device_sparse: str = "",
    shard_state: bool = False,
    local_steps: LocalSteps | int | None = None,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer average its gradients over the ranks before it applies them.

    The optimizer is changed in place and returned; its class, state and configuration stay. On one
    rank it makes the steps of plain Keras, except that repeated rows of an embedding's gradient
    are summed first, as on any number of ranks, and that the outer optimizer of `local_steps` acts.

    An optimizer that overrides `apply`, `apply_gradients` or `stateless_apply`, for example for
    gradient surgery, receives the reduced gradients there; it must reduce gradients that it
    computes itself. An update with gradients that were not reduced raises `BackendError` in the
    same step. The amax history and scales of float8 layers are the maximum over the ranks.

    Copies that Keras makes of the optimizer or of its model are distributed alike: deep copies,
    pickles, clones, saved models and `from_config(get_config())`. They may be wrapped anew, with
    other arguments.

    Collective: not this call, but each step of the optimizer. Every rank must make the same steps,
    with the same variables and with equal arguments here.

    The returned optimizer has a method `register_local_var(variable)`, which excludes a variable
    from the reduction: each rank applies its own gradient of it.

    Args:
        optimizer: a Keras optimizer, built or not. Under a `LossScaleOptimizer` all ranks skip
            the same steps. Wrap a `MultiOptimizer` itself, not the optimizers inside.
        op: `Average`, `Sum` or `Adasum`, or its name. `Adasum` combines the dense gradient of
            each variable separately and requires a power of two of ranks. Defaults to `Average`.
        process_set: the `ProcessSet` that reduces; a rank outside of it applies its own gradients.
            Models then differ between the set and the other ranks: pass the set to
            `keras_dist.callbacks` as well. Defaults to all ranks.
        compression: wire format of float32 and float64 gradients between nodes, as for
            `allreduce`; or `Compression.powersgd(...)`, `topk(...)`, `int8` or `int4`, which send a
            part of each gradient and add the rest to the next one; or the name of one. Rows of an
            embedding's gradient are not compressed. Defaults to `KERAS_DIST_COMPRESSION`, which
            defaults to `none`.
        name: accepted for compatibility with Horovod; has no effect.
        backward_passes_per_step: number of batches whose gradients each rank sums before the ranks
            reduce and the optimizer makes a step. Sets the optimizer's
            `gradient_accumulation_steps`. Defaults to 1.
        average_aggregated_gradients: whether the gradients of these batches are averaged instead
            of summed, as in plain Keras. Defaults to `False`.
        gradient_predivide_factor: an average divides by this factor before the sum over the ranks
            and by `size / gradient_predivide_factor` after it, against overflow and underflow of
            narrow floats. Has no effect on rows of an embedding's gradient. Defaults to 1.0.
        sparse_as_dense: whether an embedding's gradient is reduced and applied as a dense tensor
            instead of as rows. Defaults to `False`.
        groups: gradients that share a message: a number of groups of about equal length, or
            lists of variables; variables in no list are grouped by size. Does not change the
            result. Defaults to `None`: by size, see `KERAS_DIST_BUCKET_NBYTES`.
        scale_local_gradients: whether gradients of local variables are divided by the number
            of ranks, like averaged gradients. Defaults to `True`.
        num_groups: deprecated, until 2.0: pass `groups` instead.
        device_dense: accepted for compatibility with Horovod; has no effect, since gradients pass
            through the host.
        device_sparse: as `device_dense`.
        shard_state: whether each rank keeps and updates one slice of the variables (ZeRO-1): of
            the optimizer's state it holds `1 / size`. The weights have the same bits. For
            optimizers of Keras that update each element by itself. Saving the model is then
            collective. Defaults to `False`.
        local_steps: a `LocalSteps`, or its number of steps: each rank takes steps of its own, and
            the ranks average their weights once in that number of steps, for slow links. Requires
            `op=Average`; `compression` is that of the differences of weights. Such an optimizer has
            a method `finish_round()`, for loops of your own. Defaults to `None`: the ranks average
            gradients in each step.

    Returns:
        `optimizer`.

    Raises:
        ArgumentTypeError: `optimizer` is not a Keras optimizer, `process_set` is not a
            `ProcessSet`, or another argument has an invalid type.
        ArgumentError: the optimizer is distributed already or accumulates another number of
            batches; `op` or `compression` is unknown; `process_set` is not registered; a number is
            out of range; the number of ranks is not a power of two for `Adasum`; or `op` does not
            support `gradient_predivide_factor`, `average_aggregated_gradients`, `compression` or
            `local_steps`.

    Example:
    ```python
    optimizer = keras.optimizers.SGD(0.01 * keras_dist.size())
    model.compile(optimizer=keras_dist.DistributedOptimizer(optimizer), loss="mse")
    ```
    """
    for framework in ("python", "keras", keras.backend.backend()):
        contract.check(framework)
    _check_optimizer(optimizer)
    options = parse_reduction_options(
        op,
        process_set,
        compression,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=resolve_groups(groups, num_groups),
        scale_local_gradients=scale_local_gradients,
        shard_state=shard_state,
    )
    options = with_local_steps(options, local_steps)
    forget(optimizer)
    if options.shard_state:
        check_shardable(optimizer, options)
    _accumulate(optimizer, options.passes)
    attach(optimizer, GradientReduction(options))
    watch_copies(optimizer)
    watch_models()
    watch_loss_scales()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    local_layers: keras.Layer | Iterable[keras.Layer] | None = None,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Makes a `DistributedOptimizer` that does not reduce the gradients of some layers.

    Args:
        optimizer: as for `DistributedOptimizer`.
        local_layers: a layer or a list of layers, built or not, whose trainable variables are
            local: each rank applies its own gradients. Pass the variables to
            `BroadcastGlobalVariablesCallback(local_variables=...)` as well. Defaults to none.
        **options: other arguments of `DistributedOptimizer`.

    Returns:
        `optimizer`.

    Raises:
        ArgumentTypeError: `local_layers` holds other objects than layers, or as for
            `DistributedOptimizer`.
        ArgumentError: the optimizer has a `global_clipnorm` or a loss scale, by which local
            gradients would affect shared variables, or as for `DistributedOptimizer`.

    Example:
    ```python
    optimizer = keras_dist.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.01), local_layers=model.layers[-1]
    )
    ```
    """
    layers = parse_layers(local_layers)
    if layers and isinstance(optimizer, keras.optimizers.Optimizer):
        check_independent(optimizer)
    distributed = DistributedOptimizer(optimizer, **options)
    if layers:
        check_no_local_variables(distributed._keras_dist.options)
    distributed._keras_dist.local_layers = layers
    return distributed


def _check_optimizer(optimizer: Any) -> None:
    """Checks that `optimizer` is a Keras optimizer that is not distributed yet."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        remedy = (
            "Pass for example keras.optimizers.SGD(0.01), or keras.optimizers.get(...) of a "
            "name or a configuration."
        )
        if type(optimizer).__module__.startswith("torch."):
            remedy = "Optimizers of torch are wrapped by keras_dist.torch.DistributedOptimizer."
        raise errors.ArgumentTypeError(
            "an instance of a Keras optimizer",
            f"{optimizer!r} of type {type(optimizer).__name__}",
            remedy,
        )
    if any(map(is_distributed, [optimizer, *optimizers_inside(optimizer)])):
        raise errors.ArgumentError(
            "an optimizer that is not distributed yet",
            f"a distributed {type(optimizer).__name__}",
            "Wrap the optimizer once: wrapped twice, it would average twice.",
        )


def _accumulate(optimizer: Any, passes: int) -> None:
    """Sets `gradient_accumulation_steps` of the optimizer that applies gradients."""
    applying = innermost_optimizer(optimizer)
    given = applying.gradient_accumulation_steps
    # A loaded optimizer already accumulates as when it was saved.
    if passes == 1 or given == passes:
        return
    if isinstance(applying, MULTI_OPTIMIZER):
        expected = "a single optimizer, for backward_passes_per_step"
        received = f"a {type(applying).__name__}"
        remedy = "Set gradient_accumulation_steps of the optimizers inside, which averages."
    elif given:
        expected = "either backward_passes_per_step or gradient_accumulation_steps"
        received = f"{passes} and {given}"
        remedy = "Pass one of the two; gradient_accumulation_steps averages the batches."
    elif applying.built:
        expected = "an optimizer that is not built yet, for backward_passes_per_step"
        received = f"a {type(applying).__name__} with {len(applying.variables)} variables"
        remedy = "Wrap the optimizer before its first step."
    else:
        applying.gradient_accumulation_steps = passes
        return
    raise errors.ArgumentError(expected, received, remedy)
