"""Losses over the batches of all ranks.

The ranks average their gradients, so each rank would count alike, whatever its loss was divided by:
the samples of its batch, the tokens that are not masked, or the sum of its sample weights. In the
steps of models with a distributed optimizer, the gradient of each loss of `compile` is therefore
scaled by the share of the rank in what all ranks divide by, and its value is that of all ranks.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.losses import Measured, measured, replace_losses
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.gradient_reduction import GradientReduction
from keras_dist.training.step_reductions import reduce_over_ranks

__all__ = [
    "Step",
    "loss_scale",
    "make_losses_global",
    "with_rows",
    "within",
]


def loss_scale(denominator: Any, process_set: ProcessSet | None = None) -> Any:
    """Returns the factor by which a rank multiplies a mean loss before gradients are averaged.

    For training loops written by hand. The average over the ranks counts each rank alike. With this
    factor it is the gradient of the mean over the batches of all ranks, whatever their numbers of
    samples, of tokens that are not masked, or sums of sample weights. `fit`, `train_on_batch` and
    `compute_loss` in a custom `train_step` do this for the losses of `compile`.

    The factor is `denominator` divided by its average over the ranks, and 0 if that is 0. Leave
    penalties of the weights out of the loss that is multiplied. If several batches are accumulated,
    pass the sum of their denominators, and divide the sum of their losses by that sum.

    Collective: every rank of the set, in each step, in the same order relative to other reductions;
    blocks. Works eagerly, in a `tf.function`, in `jax.jit` and in `jax.grad`.

    Args:
        denominator: what the loss of this rank is divided by: a number, or a tensor of any shape
            with a number for each loss.
        process_set: the ranks whose gradients are averaged. Defaults to all ranks.

    Returns:
        Tensor of float32, of the shape of `denominator`, without a gradient.

    Raises:
        MismatchError: the ranks differ in the shape, or call another operation.

    Example:
    ```python
    weights = keras.ops.cast(y > 0, "float32")
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    scale = keras_dist.loss_scale(keras.ops.sum(weights))
    value = scale * loss(y, model(x), sample_weight=weights)
    ```
    """
    given = ops.stop_gradient(ops.cast(ops.convert_to_tensor(denominator), "float32"))
    flat, op = ops.reshape(given, (-1,)), _engine.ReduceOp.AVERAGE
    average = reduce_over_ranks(process_set, flat, op, "the argument of loss_scale")
    return ops.reshape(ops.divide_no_nan(flat, average), ops.shape(given))


@dataclasses.dataclass(frozen=True)
class Step:
    """What the losses in a train or test step must know.

    Args:
        reduction: the reduction of the gradients.
        equal_batches: whether the batches of all ranks have equal shapes in each step.
        evaluates: in a test step, returns on the host whether the ranks evaluate together. Defaults
            to `None`: a train step.
        rows: the rows of the batch of this rank and of all ranks, and the number of ranks, where
            they are exchanged before the step. Defaults to `None`: each loss exchanges.
    """

    reduction: GradientReduction
    equal_batches: bool = False
    evaluates: Callable[[], bool] | None = None
    rows: tuple[Any, Any, Any] | None = None


_steps: list[Step] = []


@contextlib.contextmanager
def within(step: Step) -> Iterator[None]:
    """Returns a context in which the losses of `make_losses_global` are those of all ranks."""
    if step.reduction.communicator() is None:
        yield
        return
    _steps.append(step)
    try:
        yield
    finally:
        _steps.pop()


@contextlib.contextmanager
def with_rows(rows: Any) -> Iterator[None]:
    """Exchanges the rows of a batch, for losses in a part of the step that cannot call the host."""
    step = _steps[-1] if _steps else None
    if step is None or step.equal_batches or step.reduction.options.op is _engine.ReduceOp.ADASUM:
        yield
        return
    options = step.reduction.options
    mine = ops.stack([ops.cast(rows, "float32"), ops.ones(())])
    name, op = "the rows of a batch", _engine.ReduceOp.SUM
    total, count = ops.unstack(reduce_over_ranks(options.process_set, mine, op, name), 2)
    with within(dataclasses.replace(step, rows=(mine[0], total, count))):
        yield


def make_losses_global(model: keras.Model) -> None:
    """Makes the losses that a model is compiled with those of all ranks, in the context `within`.

    Losses of `add_loss` and penalties of layers are averaged over the ranks with their gradients.
    """
    replace_losses(model, lambda loss: loss if isinstance(loss, _GlobalLoss) else _GlobalLoss(loss))


class _GlobalLoss:
    """A loss over the batches of all ranks within a step, otherwise over that of this rank."""

    def __init__(self, loss: Any):
        self._loss = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not _steps:
            return self._loss(y_true, y_pred, sample_weight)
        own, step = measured(self._loss, y_true, y_pred, sample_weight), _steps[-1]
        if _needs_no_others(own, step):
            return own.value
        name = f"the loss {getattr(self._loss, 'name', type(self._loss).__name__)!r}"
        return _backends.active().call_uncompiled(functools.partial(_over_ranks, own, step, name))


def _needs_no_others(own: Measured, step: Step) -> bool:
    """Returns whether a loss is as in one process: Keras weighs what it records by the rows."""
    trains = step.evaluates is None
    if own.reduction == "mean":
        return own.is_count and (step.equal_batches or not trains)
    return own.reduction == "none" and not trains


def _over_ranks(own: Measured, step: Step, name: str) -> Any:
    """Returns the loss of all ranks, with the gradient of this rank that the ranks reduce."""
    options, is_mean = step.reduction.options, own.reduction == "mean"
    if options.op is _engine.ReduceOp.ADASUM and step.evaluates is None:
        if is_mean:
            _check_equal(own.denominator, step, name)
        return own.value
    value = ops.stop_gradient(own.value)
    mine, of_all, count, shared = _exchanged(own, value, step, name)
    if is_mean:
        factor = ops.divide_no_nan(count * mine, of_all)
    else:  # the ranks are to add their gradients
        factor = 1.0 if options.op is _engine.ReduceOp.SUM else count
    return shared + factor * (own.value - value)


def _exchanged(own: Measured, value: Any, step: Step, name: str) -> tuple[Any, Any, Any, Any]:
    """Returns the denominators of this rank and of all, the number of ranks, and the shared value.

    Args:
        own: the loss of this rank.
        value: its value, without a gradient.
        step: the step.
        name: name of the loss, for messages.
    """
    options, mine = step.reduction.options, own.denominator
    if own.is_count and step.equal_batches:
        ranks = options.ranks().size
        return mine, ranks * mine, ranks, value if own.reduction == "none" else ranks * value
    if own.is_count and step.rows is not None:
        # Keras weighs the value that it records by the rows of this rank.
        rows, of_all, count = step.rows
        return rows, of_all, count, value * of_all / rows if own.reduction == "sum" else value
    weighted = 0.0 if own.reduction == "none" else value * mine
    wide = "float64" if keras.backend.standardize_dtype(value.dtype) == "float64" else "float32"
    given = ops.stack([ops.cast(each, wide) for each in (mine, weighted, 1.0)])
    op = _engine.ReduceOp.SUM
    summed = reduce_over_ranks(options.process_set, given, op, name, step.evaluates)
    of_all, total, count = ops.unstack(ops.cast(summed, value.dtype), 3)
    if own.reduction == "mean":
        total = ops.divide_no_nan(total, of_all)
    return mine, of_all, count, value if own.reduction == "none" else total


def _check_equal(denominator: Any, step: Step, name: str) -> None:
    """Checks in the step that all ranks divide a loss by the same number.

    Raises:
        ArgumentError: they do not; raised on every rank.
    """

    def check(bounds: np.ndarray) -> np.ndarray:
        comm, options = step.reduction.options.ranks(), _engine.OpOptions(_engine.ReduceOp.MAX)
        [found] = _engine.collectives.allreduce(
            comm, [bounds], [name], options, bucket_nbytes(comm)
        )
        if found[0] == -found[1]:
            return found
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                f"as many samples or weights in {name} on every rank, with Adasum",
                f"from {-found[1]:g} to {found[0]:g}",
                "Use op=Average, which weighs the ranks by them, or equal batches without masks.",
            )
        )

    bounds = ops.stack([ops.cast(bound, "float32") for bound in (denominator, -denominator)])
    _backends.active().differentiable_host_callback(ops.stop_gradient(bounds), check, check)
