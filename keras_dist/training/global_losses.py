"""Losses over the batches of all ranks, in steps of distributed optimizers and `evaluate`.

The ranks average their gradients, so each rank would count alike, whatever its loss was divided by.
So the gradient of a loss is scaled by the share of the rank in what all ranks divide by.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.losses import Measured, own_losses, replaced_losses
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.batch_trials import as_tried
from keras_dist.training.gradient_reduction import GradientReduction
from keras_dist.training.rank_exchanges import allreduce, reduce_over_ranks

LOSSES = "the losses of a step"


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
    """What the losses in a train or test step must know."""

    reduction: GradientReduction
    #: whether the batches of all ranks have equal shapes in each step
    equal_batches: bool = False
    #: in a test step: returns the ranks that evaluate the model together; `None`: this one alone
    evaluates: Callable[[], _engine.Communicator | None] | None = None
    rows: tuple[Any, Any, Any] | None = None


class _StepsOfThread(threading.local):
    """The steps that run in this thread, the innermost one last."""

    def __init__(self) -> None:
        self.steps: list[Step] = []


_thread = _StepsOfThread()


@contextlib.contextmanager
def within(step: Step, model: keras.Model) -> Iterator[None]:
    """Returns a context in which the losses of a model are those of all ranks."""
    reduction = step.reduction
    ranks = reduction.communicator() if step.evaluates is None else reduction.replicas()
    if ranks is None:
        with own_losses():
            yield
        return
    with _added(step), replaced_losses(model, _over_ranks):
        yield


@contextlib.contextmanager
def _added(step: Step) -> Iterator[None]:
    _thread.steps.append(step)
    try:
        yield
    finally:
        _thread.steps.pop()


@contextlib.contextmanager
def with_rows(rows: Any) -> Iterator[None]:
    """Exchanges the rows of a batch, for losses in a part of the step that cannot call the host."""
    step = _thread.steps[-1] if _thread.steps else None
    if step is None or step.equal_batches or step.reduction.options.op is _engine.ReduceOp.ADASUM:
        yield
        return
    options = step.reduction.options
    mine = ops.stack([ops.cast(rows, "float32"), ops.ones(())])
    name, op = "the rows of a batch", _engine.ReduceOp.SUM
    total, count = ops.unstack(reduce_over_ranks(options.each_step, mine, op, name), 2)
    with _added(dataclasses.replace(step, rows=(mine[0], total, count))):
        yield


def _over_ranks(own: Sequence[Measured]) -> list[Any]:
    """Returns losses of all ranks, with the gradients of this rank that the ranks reduce."""
    step, uncompiled = _thread.steps[-1], _backends.active().call_uncompiled
    own = uncompiled(functools.partial(list, map(as_tried, own)))
    for loss in own:
        if loss.of_whole_batch:
            _warn_of_whole_batch(loss.of_whole_batch)
    if step.evaluates is None and step.reduction.options.op is _engine.ReduceOp.ADASUM:
        means = [
            loss.denominator
            for loss in own
            if loss.reduction == "mean" and not (loss.is_count and step.equal_batches)
        ]
        if means:
            uncompiled(functools.partial(_check_equal, means, step))
        return [loss.value for loss in own]
    results = [_without_exchange(loss, step) for loss in own]
    asked = [loss for loss, result in zip(own, results, strict=True) if result is None]
    found = iter(uncompiled(functools.partial(_exchanged, asked, step)) if asked else ())
    return _beside_vectors(
        own, [next(found) if result is None else result for result in results], step
    )


def _beside_vectors(own: Sequence[Measured], values: list[Any], step: Step) -> list[Any]:
    """Returns losses of which Keras adds single numbers to each element of others.

    TensorFlow sums the gradients of the elements: a number counts as often as all ranks have them.
    """
    vectors = [loss.value for loss in own if len(loss.value.shape)]
    if step.evaluates is not None or len(vectors) in (0, len(own)):
        return values
    if step.equal_batches:
        factor: Any = step.reduction.options.ranks().size
    else:
        mine = ops.cast(ops.size(vectors[0]), "float32")
        name, op = "the elements of a loss", _engine.ReduceOp.SUM
        exchange = functools.partial(
            reduce_over_ranks, step.reduction.options.each_step, ops.stack([mine]), op, name
        )
        factor = ops.divide_no_nan(_backends.active().call_uncompiled(exchange)[0], mine)
    return [
        value if len(value.shape) else _with_gradient(value, factor, ops.stop_gradient(value))
        for value in values
    ]


@functools.cache
def _warn_of_whole_batch(name: str) -> None:
    """Warns once that a loss is not that of one process. Not a collective operation."""
    runtime.notify(
        "a loss that is a mean or a sum over the samples of a batch",
        f"the loss {name!r}, which compares the samples of the batch of a rank with each other, is "
        "a function of their mean, such as a root, a mean without targets that are missing, or one "
        "number, which Keras multiplies by the mean of the weights",
        "Return one number for each sample, by axis= of Dice and Tversky; for those that are "
        "missing, pass a sample_weight of 0 and reduction='mean_with_sample_weight'. Ignore this "
        "warning if batches of the size of a rank are what you want, or if no target is missing; "
        "the ranks are averaged.",
    )


def _without_exchange(own: Measured, step: Step) -> Any:
    """Returns a loss of all ranks; `None` if its denominators must be exchanged."""
    if step.evaluates is not None:
        # Keras weighs the value by the rows of this rank, where it knows their number.
        is_weighed = own.is_of_rows and own.reduction != "sum" and not own.counts_once
        return own.value if is_weighed else None
    if not own.is_count:
        return None
    if step.equal_batches:
        if own.reduction == "mean":
            return own.value
        ranks = step.reduction.options.ranks().size
        rows, of_all, count = 1, ranks, ranks
    elif step.rows is not None and own.is_of_rows:
        rows, of_all, count = step.rows
    else:
        return None
    value = ops.stop_gradient(own.value)
    if step.rows is not None:  # numbers of float32, which TensorFlow multiplies by such alone
        value = ops.cast(value, keras.backend.result_type(value.dtype, "float32"))
        rows, of_all, count = (ops.cast(number, value.dtype) for number in step.rows)
    if own.reduction == "mean":
        return _with_gradient(own.value, count * rows / of_all, value)
    return _with_gradient(
        own.value,
        1.0 if step.reduction.options.op is _engine.ReduceOp.SUM else count,
        value * of_all / rows if own.reduction == "sum" else value,
    )


def _exchanged(own: Sequence[Measured], step: Step) -> list[Any]:
    """Returns losses of all ranks, after an exchange of values and denominators."""
    count, call = len(own), _backends.active().call_host
    adds = step.reduction.options.op is _engine.ReduceOp.SUM
    # TensorFlow keeps functions of the host until the process ends: they must not hold the model.
    options = step.reduction.options
    ranks = step.evaluates or functools.partial(runtime.communicator, options.each_step)
    summed = functools.partial(_summed, ranks)
    is_mean = np.array([loss.reduction == "mean" for loss in own])
    given = [
        ops.zeros(()) if loss.reduction == "none" else ops.stop_gradient(loss.value) for loss in own
    ]
    numbers = [loss.denominator for loss in own]
    tensors = [number for number in numbers if not isinstance(number, float)]
    known = [number if isinstance(number, float) else None for number in numbers]

    def denominators(host: np.ndarray) -> np.ndarray:
        rest = iter(host)
        return np.array([next(rest) if number is None else number for number in known], "float64")

    def factors(mine: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the factors of gradients and of values, from the sums over the ranks."""
        parts = np.divide(1.0, sums[:count], out=np.zeros_like(mine), where=sums[:count] != 0)
        # The ranks are to add the gradients of sums.
        of_sum = 1.0 if adds else sums[-1]
        return np.where(is_mean, sums[-1] * parts * mine, of_sum), np.where(is_mean, parts, 1.0)

    def exchange(host: np.ndarray) -> list[np.ndarray]:
        values, mine = host[:count].astype("float64"), denominators(host[count:])
        sums = summed(np.concatenate([mine, values * mine, [1.0]]))
        of_gradients, of_values = factors(mine, sums)
        return [np.concatenate([of_gradients, of_values * sums[count:-1]]).astype(host.dtype)]

    def exchange_early(host: np.ndarray) -> list[np.ndarray]:
        mine = denominators(host)
        of_gradients, of_values = factors(mine, summed(np.concatenate([mine, [1.0]])))
        return [np.concatenate([of_gradients, of_values * mine]).astype(host.dtype)]

    def add(host: np.ndarray) -> list[np.ndarray]:
        return [summed(host.astype("float64")).astype(host.dtype)]

    wide = keras.backend.result_type(*(value.dtype for value in given), "float32")
    packed = [ops.cast(tensor, wide) for tensor in tensors]
    values = [ops.cast(value, wide) for value in given]
    if step.evaluates is None and keras.config.backend() == "jax":
        # The host is called between two programs: the first has the denominators alone, so that
        # the loss and its gradient stay in one.
        [found] = call(exchange_early, [ops.stack(packed or [ops.zeros((), wide)])], [(2 * count,)])
        [shared] = call(add, [ops.stack(values) * found[count:]], [(count,)])
    else:
        [found] = call(exchange, [ops.stack([*values, *packed])], [(2 * count,)])
        shared = found[count:]
    return [
        _with_gradient(
            loss.value,
            found[number],
            ops.stop_gradient(loss.value) if loss.reduction == "none" else shared[number],
        )
        for number, loss in enumerate(own)
    ]


def _with_gradient(value: Any, factor: Any, shared: Any) -> Any:
    """Returns a shared value with the gradient of another one, multiplied by a factor."""
    wide = keras.backend.result_type(value.dtype, "float32")
    value, factor, shared = (ops.cast(each, wide) for each in (value, factor, shared))
    # The difference of infinite numbers is not 0.
    zero = ops.where(ops.isfinite(value), value - ops.stop_gradient(value), value)
    return shared + factor * zero


def _summed(ranks: Callable[[], _engine.Communicator | None], array: np.ndarray) -> np.ndarray:
    """Returns the sum of the arrays of all ranks, or an array itself if this one is alone."""
    comm = ranks()
    if comm is None:
        return array
    [summed] = allreduce(comm, [array], [LOSSES])
    return summed


def _check_equal(denominators: Sequence[Any], step: Step) -> None:
    """Checks in the step that all ranks divide their losses by the same numbers."""
    count, process_set = len(denominators), step.reduction.options.each_step

    def check(bounds: np.ndarray) -> np.ndarray:
        comm = runtime.communicator(process_set)
        [found] = allreduce(comm, [bounds], [LOSSES], _engine.ReduceOp.MAX)
        for least, most in zip(-found[count:], found[:count], strict=True):
            if least != most:
                raise errors.ArgumentError(
                    "as many samples or weights in a loss on every rank, with Adasum",
                    f"from {least:g} to {most:g}",
                    "Use op=Average, which weighs the ranks by them, or equal batches without "
                    "masks.",
                )
        return found

    given = ops.stack([ops.cast(number, "float32") for number in denominators])
    bounds = ops.stop_gradient(ops.concatenate([given, -given]))
    _backends.active().differentiable_host_callback(bounds, check, check)
