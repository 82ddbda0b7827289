"""Names of Keras: the losses that a model is compiled with, and how they are reduced."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_dist._compat.contract import Name

__all__ = ["CONTRACT", "Measured", "measured", "replace_losses"]


class Measured(NamedTuple):
    """A loss and what it was divided by.

    Args:
        value: the loss, with its gradient.
        reduction: `"mean"`, `"sum"` or `"none"`.
        denominator: of a mean: the number of elements that are not masked, or the sum of weights.
        is_count: whether shapes alone determine the denominator.
    """

    value: Any
    reduction: str
    denominator: Any
    is_count: bool


def replace_losses(model: Any, wrap: Callable[[Any], Any]) -> None:
    """Replaces each loss of a compiled model by an image, now or as soon as Keras builds them.

    Args:
        model: a compiled model.
        wrap: a function of a loss; must return its images unchanged.
    """
    compiled = model._compile_loss
    if compiled is None:
        return
    _watch()

    def replace() -> None:
        compiled._flat_losses = [
            found._replace(loss=wrap(found.loss)) for found in compiled._flat_losses
        ]

    def build(*given: Any) -> None:
        del compiled.__dict__["build"]
        compiled.build(*given)
        replace()

    if compiled.built:
        replace()
    else:
        compiled.__dict__["build"] = build


def measured(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Measured:
    """Calls a loss and returns its value with what it was divided by.

    A loss of the user that is a single number, or that does not call Keras' reduction, counts as a
    mean over the samples, or as a sum if that is its `reduction`.
    """
    with _recorded() as calls:
        value = loss(y_true, y_pred, sample_weight)
    reduction = getattr(loss, "reduction", "mean")
    # The last call is the one of the loss itself, if it uses others.
    values, weights, mask, reduction = calls[-1] if calls else (None, None, None, reduction)
    if reduction in (None, "none", "sum"):
        return Measured(value, reduction or "none", 1.0, True)
    return Measured(value, "mean", *_denominator(values, weights, mask, reduction, y_pred))


def _denominator(
    values: Any, sample_weight: Any, mask: Any, reduction: str, y_pred: Any
) -> tuple[Any, bool]:
    is_weighted = reduction == "mean_with_sample_weight"
    if is_weighted and not (sample_weight is None and mask is None):
        if sample_weight is not None:  # on torch, Keras multiplies it in place
            sample_weight = ops.copy(ops.cast(sample_weight, "float32"))
        weights = _module().apply_mask(sample_weight, mask, dtype="float32", reduction=reduction)
        return ops.sum(ops.cast(weights, "float32")), False
    shape = () if values is None else ops.shape(values)
    count = _product(shape) if shape else _product(ops.shape(keras.tree.flatten(y_pred)[0])[:1])
    if mask is None:
        return count, True
    # Keras multiplies the mean over all elements by the number of all over that of valid ones.
    valid = ops.sum(ops.cast(mask, "float32"))
    return count * valid / _product(ops.shape(mask)), False


def _product(shape: Sequence[Any]) -> Any:
    """Returns the number of elements, as a number if it is known before the step runs."""
    sizes = [size if isinstance(size, int) else ops.cast(size, "float32") for size in shape]
    return functools.reduce(lambda one, other: one * other, sizes, 1.0)


_recording: list[list[Any]] = []


@contextmanager
def _recorded() -> Iterator[list[Any]]:
    """Returns a context that lists the arguments of Keras' reductions of losses."""
    calls: list[Any] = []
    _recording.append(calls)
    try:
        yield calls
    finally:
        _recording.pop()


@functools.cache
def _watch() -> None:
    module = _module()
    original = module.reduce_weighted_values

    @functools.wraps(original)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if _recording:
            _recording[-1].append((values, sample_weight, mask, reduction))
        return original(values, sample_weight, mask, reduction, dtype)

    module.reduce_weighted_values = reduce_weighted_values


def _module() -> Any:
    return importlib.import_module(LOSSES)


LOSSES = "keras.src.losses.loss"
COMPILED = "keras.src.trainers.compile_utils:CompileLoss"
INEXACT = "a loss would count each rank alike, however many elements it has"
WEIGHING = "to weigh the losses of ranks by what they are divided by"

CONTRACT = (
    Name(
        LOSSES,
        "reduce_weighted_values",
        WEIGHING,
        INEXACT,
        ("values", "sample_weight", "mask", "reduction", "dtype"),
    ),
    Name(LOSSES, "apply_mask", WEIGHING, INEXACT, ("sample_weight", "mask", "dtype", "reduction")),
    Name("keras:Model", "_compile_loss", WEIGHING, INEXACT, instance=True),
    Name(COMPILED, "build", WEIGHING, INEXACT, ("y_true", "y_pred")),
    Name(COMPILED, "_flat_losses", WEIGHING, INEXACT, instance=True),
)
