"""DistributedOptimizer: the user's own optimizer, with its gradients averaged over ranks."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat import contract
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER, innermost_optimizer
from keras_dist.ops.arguments import resolve_groups
from keras_dist.ops.reduction_options import parse_layers, parse_reduction_options
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.distributed import attach, check_local, is_distributed
from keras_dist.training.gradient_reduction import GradientReduction
from keras_dist.training.loss_scales import watch_loss_scales
from keras_dist.training.model_state import optimizers_inside
from keras_dist.training.trainer import watch_models

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    op: _engine.ReduceOp | str = _engine.ReduceOp.AVERAGE,
    process_set: ProcessSet | None = None,
    compression: _engine.Compressor | str | None = None,
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
) -> keras.optimizers.Optimizer:
    """Makes an optimizer average its gradients over the ranks before it applies them.

    The optimizer itself is changed and returned; its class, state and configuration stay
    as they are. With one rank its steps are those of plain Keras; but rows of an embedding's
    gradient that occur several times are added up before the optimizer sees them, on any
    number of ranks, as in the dense gradient.

    An optimizer with an `apply`, `apply_gradients` or `stateless_apply` of its own, as for gradient
    surgery, is given the gradients of all ranks there; gradients that it computes itself are its
    own to reduce. An update that has not been reduced is a `BackendError` in the same step. Scales
    and magnitudes of layers in float8 are the largest of all ranks.

    Collective: not this call, but every step that the optimizer makes: every rank must make
    the same steps, with the same variables and the same arguments here.

    The method `register_local_var(variable)` of what is returned leaves a variable out: each
    rank keeps its own gradient of it.

    Args:
        optimizer: an instance of a Keras optimizer, built or not; under a
            `LossScaleOptimizer` all ranks skip the same steps. A `MultiOptimizer` is wrapped
            as a whole, not the optimizers in it.
        op: `Average`, `Sum` or `Adasum`, or its name; `Adasum` combines the dense gradient of
            each variable by itself, on 1, 2, 4, 8, ... ranks. Defaults to `Average`.
        process_set: the ranks that average among themselves, a `ProcessSet`; each of the others
            steps by its own gradients. Then models differ between the set and the rest, while
            the callbacks go on to speak for all ranks. Defaults to all ranks.
        compression: what gradients of float32 and float64 look like between nodes, as for
            `allreduce`; rows of an embedding's gradient travel as they are. Defaults to
            `KERAS_DIST_COMPRESSION`, that is `none`.
        name: accepted for scripts written for Horovod; has no effect.
        backward_passes_per_step: gradients of so many batches are added up on each rank; then
            the ranks reduce and the optimizer makes one step. It becomes the optimizer's
            `gradient_accumulation_steps`. Defaults to 1.
        average_aggregated_gradients: whether those are averaged, not added up, as Keras does
            without keras_dist. Defaults to `False`.
        gradient_predivide_factor: an average divides by it before the sum over the ranks, and
            by `size / gradient_predivide_factor` after it; for narrow floats that overflow or
            underflow. Rows of an embedding's gradient need no such care: they are averaged as
            ever. Defaults to 1.0.
        sparse_as_dense: whether an embedding's gradient is reduced, and applied, as a whole in
            place of its rows. Defaults to `False`.
        groups: which gradients travel together: a number of groups of about equal length, or
            lists of variables, those of no list going as ever. It changes no bit. Defaults to
            `None`: by size, see `KERAS_DIST_BUCKET_NBYTES`.
        scale_local_gradients: whether gradients of local variables are divided by the number
            of ranks, as averaged ones are. Defaults to `True`.
        num_groups: deprecated: `groups` as a number.
        device_dense: accepted for scripts written for Horovod; has no effect, gradients travel
            through the host.
        device_sparse: as `device_dense`.

    Returns:
        `optimizer`.

    Raises:
        ArgumentTypeError: `optimizer` is not a Keras optimizer, `process_set` no
            `ProcessSet`, or another argument of a kind that it cannot be.
        ArgumentError: it is distributed already, `op` is another one, `process_set` has no id,
            there is no such `compression`, a number is out of range, the optimizer accumulates
            another number of batches, the number of ranks is not a power of two for `Adasum`,
            or `op` goes neither with `gradient_predivide_factor` nor
            `average_aggregated_gradients`.

    Example:
    ```python
    optimizer = keras.optimizers.SGD(0.01 * keras_dist.size())
    model.compile(optimizer=keras_dist.DistributedOptimizer(optimizer), loss="mse")
    ```
    """
    for framework in ("python", "keras", keras.backend.backend()):
        contract.check(framework)
    where = runtime.where()
    _check_optimizer(optimizer, where)
    terms = parse_reduction_options(
        op,
        process_set,
        compression,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=resolve_groups(groups, num_groups),
        scale_local_gradients=scale_local_gradients,
    )
    _accumulate(optimizer, terms.passes, where)
    attach(optimizer, GradientReduction(terms))
    watch_models()
    watch_loss_scales()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    local_layers: keras.Layer | Iterable[keras.Layer] | None = None,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Makes a `DistributedOptimizer` that leaves some layers to each rank.

    Args:
        optimizer: as for `DistributedOptimizer`.
        local_layers: a layer or a list of layers, built or not, the gradients of whose
            trainable variables are not reduced. Pass the variables to
            `BroadcastGlobalVariablesCallback(local_variables=...)` as well. Defaults to none.
        **options: the other arguments of `DistributedOptimizer`, by name.

    Returns:
        `optimizer`.

    Raises:
        ArgumentTypeError: `local_layers` holds something else, or as `DistributedOptimizer`.
        ArgumentError: the optimizer has a `global_clipnorm` or a loss scale, by which variables
            of a rank would act on those of all; or as `DistributedOptimizer`.
    """
    layers = parse_layers(local_layers)
    if layers and isinstance(optimizer, keras.optimizers.Optimizer):
        check_local(optimizer)
    distributed = DistributedOptimizer(optimizer, **options)
    distributed._keras_dist.local_layers = layers
    return distributed


def _check_optimizer(optimizer: Any, where: str) -> None:
    """Checks that `optimizer` is a Keras optimizer that is not distributed yet."""
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
    if any(map(is_distributed, [optimizer, *optimizers_inside(optimizer)])):
        raise errors.ArgumentError(
            errors.explain(
                where,
                "an optimizer that is not distributed yet",
                f"a {type(optimizer).__name__} that is",
                "Wrap it once; wrapped twice it would average twice.",
            )
        )


def _accumulate(optimizer: Any, passes: int, where: str) -> None:
    """Sets `gradient_accumulation_steps` of the optimizer that applies gradients.

    Raises:
        ArgumentError: the optimizer accumulates another number of batches, is built without
            accumulation, or is a `MultiOptimizer`.
    """
    applying = innermost_optimizer(optimizer)
    given = applying.gradient_accumulation_steps
    # A loaded optimizer accumulates already, as when it was saved.
    if passes == 1 or given == passes:
        return
    if isinstance(applying, MULTI_OPTIMIZER):
        expected = "a single optimizer, for backward_passes_per_step"
        received = f"a {type(applying).__name__}"
        remedy = "Set gradient_accumulation_steps on the optimizers in it, which averages."
    elif given:
        expected = "either backward_passes_per_step or gradient_accumulation_steps"
        received = f"{passes} and {given}"
        remedy = "Leave out one: gradient_accumulation_steps averages the batches."
    elif applying.built:
        expected = "an optimizer that is not built yet, for backward_passes_per_step"
        received = f"a {type(applying).__name__} with {len(applying.variables)} variables"
        remedy = "Wrap it before it makes its first step."
    else:
        applying.gradient_accumulation_steps = passes
        return
    raise errors.ArgumentError(errors.explain(where, expected, received, remedy))
