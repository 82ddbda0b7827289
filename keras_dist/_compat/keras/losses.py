"""Names of Keras: the losses of a model in a step, and how they are reduced."""

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import keras
from keras import ops

from keras_dist._compat.contract import Owner
from keras_dist._compat.keras.loss_functions import is_of_rows, is_of_whole_batch, shapes_tell
from keras_dist._compat.keras.models import layers_of, outputs_of
from keras_dist._compat.keras.versions import uses
from keras_dist._compat.python import replaced


class Measured(NamedTuple):
    """A loss and what it was divided by."""

    value: Any
    reduction: str
    denominator: Any
    is_count: bool  # shapes alone determine the denominator
    is_of_rows: bool
    # The name of the loss if it compares the samples of a batch with each other, or is one number
    # beside weights, so that it is no mean over the batches of the ranks.
    of_whole_batch: str = ""
    # Of a loss that returns one number: its name, itself and what it was called with.
    number: tuple[str, Any, Any, Any] | None = None
    # Keras records the value without the number of rows, as where TensorFlow does not know it yet.
    counts_once: bool = False


Replace = Callable[[Sequence[Measured]], list[Any]]


class _Losses:
    """The losses of a model in a step."""

    def __init__(self, model: Any, replace: Replace):
        self.model = model
        self.replace = replace
        self._batch: Any = None  # the arguments of `compute_loss`, within it
        self._additional: list[Any] | None = None  # those of `add_loss` and layers, within it
        self._replaced: list[Any] = []  # their other values

    def compute(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls the `compute_loss` of the model."""
        self._batch = (arguments, [named.get(name) for name in ("x", "y", "y_pred")])
        try:
            return function(*arguments, **named)
        finally:
            self._batch = self._additional = None

    def replaced(self, own: Sequence[Measured]) -> list[Any]:
        """Returns other values of losses of `compile`; replaces additional ones with them."""
        if self._batch is None:
            return self.replace(own)
        losses = self._without_penalties(_losses_of(self.model))
        before = self._additional
        # A model that calls itself in `compute_loss` has new ones.
        if before is not None and list(map(id, losses)) == list(map(id, before)):
            return self.replace(own)
        additional = self._measured(losses)
        values = self.replace([*own, *additional])
        self._additional, self._replaced = losses, values[len(own) :] or losses
        return values[: len(own)]

    def additional(self) -> list[Any]:
        """Returns the losses of `add_loss` and of layers."""
        losses: list[Any] = _losses_of(self.model)
        if self._batch is None:
            return losses
        self.replaced(())
        return [*self._replaced, *losses[len(self._replaced) :]]

    def _without_penalties(self, losses: list[Any]) -> list[Any]:
        """Returns the losses without the penalties of weights, which Keras returns last."""
        penalties = sum(v.regularizer is not None for v in self.model.trainable_weights)
        return losses[: len(losses) - penalties]

    def _measured(self, losses: Sequence[Any]) -> list[Measured]:
        """Returns losses with the rows of the batch, if these are known."""
        leaves = keras.tree.flatten(self._batch) if losses else []
        batch = next((leaf for leaf in leaves if len(getattr(leaf, "shape", ()))), None)
        if batch is None:
            return []
        rows = _product(ops.shape(batch)[:1])
        return [Measured(ops.sum(loss), "mean", rows, True, True) for loss in losses]


class _Stacks(threading.local):
    """What the steps of this thread do with losses, the innermost one last."""

    def __init__(self) -> None:
        self.within: list[_Losses | None] = []
        self.recording: list[list[Any]] = []


_stacks = _Stacks()


def _owner(compiled: Any) -> Any:
    """Returns the model in the step, or the one in it, whose losses these are; `None` if none."""
    within = _stacks.within[-1] if _stacks.within else None
    if within is None or getattr(within.model, "_compile_loss", None) is compiled:
        return within and within.model
    layers = layers_of(within.model)
    return next((one for one in layers if getattr(one, "_compile_loss", None) is compiled), None)


@contextmanager
def own_losses() -> Iterator[None]:
    """Returns a context for the step of a model that is not distributed: losses stay the same."""
    # Such a step may run within that of a model whose losses are replaced.
    _stacks.within.append(None)
    try:
        yield
    finally:
        _stacks.within.pop()


@contextmanager
def replaced_losses(model: Any, replace: Replace) -> Iterator[None]:
    """Returns a context in which the losses of a model have other values."""
    # These are the losses of `compile`, of the model and of models among its layers, and in
    # `compute_loss` also those of `add_loss` and activity regularizers, which count as means over
    # the rows of the batch.
    _watch()
    losses = _Losses(model, replace)
    methods = {"compute_loss": functools.partial(losses.compute, model.compute_loss)}
    if uses("jax"):
        methods["stateless_call"] = functools.partial(called_anew, model, model.stateless_call)
    _stacks.within.append(losses)
    try:
        with replaced(model, **methods):
            yield
    finally:
        _stacks.within.pop()


def called_anew(model: Any, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a model on JAX after its layers have forgotten the losses of earlier calls."""
    # Keras 3.15 knows losses by their `id`. A layer that is called drops those of its last call,
    # and so the new loss of another layer to which Python has given such an `id`.
    for layer in layers_of(model):
        layer._loss_ids.clear()
    return call(*arguments, **named)


def _combined(original: Callable[..., Any], model: Any, compiled: Any, *given: Any) -> Any:
    """Returns the total of the losses of `compile`, after their values have been replaced."""
    within, own = cast(_Losses, _stacks.within[-1]), list[Measured]()
    outputs = outputs_of(model)

    def measure(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        measured = _measured(loss, outputs, y_true, y_pred, sample_weight)
        is_unknown = is_recorded and keras.tree.flatten(y_pred)[0].shape[0] is None
        own.append(measured._replace(counts_once=is_unknown))
        return own[-1].value

    if not compiled.built:
        _build(original, compiled, *given)
    losses, is_recorded = compiled._flat_losses, bool(compiled._metrics)
    # Keras pairs metrics with losses; a loss without one is not recorded.
    with replaced(compiled, _metrics=[None] * len(losses)):
        measuring = [each._replace(loss=functools.partial(measure, each.loss)) for each in losses]
        with replaced(compiled, _flat_losses=measuring):
            total = original(compiled, *given)
    values = within.replaced(own)
    if not compiled._metrics and all(a is b.value for a, b in zip(values, own, strict=True)):
        return total
    known = [
        each._replace(loss=lambda *_, value=value: value)
        for each, value in zip(losses, values, strict=False)  # Keras may use the first one alone
    ]
    with replaced(compiled, _flat_losses=known):
        return original(compiled, *given)


def _build(original: Callable[..., Any], compiled: Any, *given: Any) -> None:
    """Builds losses of `compile` without calling them: a step calls each once, and may count."""
    build, found = compiled.build, list[Any]()

    def without_calls(*structures: Any) -> None:
        build(*structures)
        found.extend(compiled._flat_losses)
        compiled._flat_losses = [each._replace(loss=lambda *_: ops.zeros(())) for each in found]

    try:
        with replaced(compiled, _metrics=[None], build=without_calls):
            original(compiled, *given)
    finally:
        compiled._flat_losses = found or compiled._flat_losses


def _measured(
    loss: Any, outputs: Sequence[Any], y_true: Any, y_pred: Any, sample_weight: Any
) -> Measured:
    """Calls a loss and returns its value with what it was divided by."""
    # A loss of the user that does not call Keras' reduction counts as a mean over the samples, or
    # as a sum if that is its `reduction`. If it is not a single number, nothing has reduced it.
    with _recorded() as calls:
        value = loss(y_true, y_pred, sample_weight)
    is_vector = not calls and len(getattr(value, "shape", ())) > 0
    if calls and calls[-1][-1] not in (None, "none") and len(value.shape):
        value = ops.sum(value)  # of no elements, which Keras does not reduce
    reduction = "none" if is_vector else getattr(loss, "reduction", "mean")
    # The last call is the one of the loss itself, if it uses others.
    values, weights, mask, reduction = calls[-1] if calls else (None, None, None, reduction)
    if reduction in (None, "none", "sum"):
        return Measured(value, reduction or "none", 1.0, True, True)
    number, is_count = _denominator(values, weights, mask, reduction, y_pred)
    is_count = is_count and shapes_tell(loss, values, y_true, y_pred)
    has_rows = is_count and is_of_rows(values, outputs)
    is_number = not len(getattr(values, "shape", ()))
    # Keras multiplies one number for a batch by the mean of its weights.
    is_product = is_number and weights is not None
    name = loss.name if calls and (is_product or is_of_whole_batch(loss, values)) else ""
    found = Measured(value, "mean", number, is_count, has_rows, name)
    own = getattr(loss, "name", type(loss).__name__), loss, y_true, y_pred
    return found._replace(number=own) if is_number and mask is None and not name else found


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


@contextmanager
def _recorded() -> Iterator[list[Any]]:
    """Returns a context that lists the arguments of Keras' reductions of losses."""
    calls: list[Any] = []
    _stacks.recording.append(calls)
    try:
        yield calls
    finally:
        _stacks.recording.pop()


@functools.cache
def _watch() -> None:
    module, compiled = _module(), importlib.import_module(COMPILED).CompileLoss
    reduce, call = module.reduce_weighted_values, compiled.call

    @functools.wraps(reduce)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if _stacks.recording:
            _stacks.recording[-1].append((values, sample_weight, mask, reduction))
        return reduce(values, sample_weight, mask, reduction, dtype)

    @functools.wraps(call)
    def combined(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if (model := _owner(self)) is not None:
            if keras.tree.is_nested(y_pred) and not keras.tree.is_nested(y_true):
                # Keras takes the rows of a tensor for targets of outputs if there are as many.
                y_true = [y_true]
            return _combined(call, model, self, y_true, y_pred, sample_weight)
        return call(self, y_true, y_pred, sample_weight)

    @functools.wraps(_losses_of)
    def losses(self: Any) -> Any:
        within = _stacks.within[-1] if _stacks.within else None
        if within is not None and within.model is self:
            return within.additional()
        return _losses_of(self)

    module.reduce_weighted_values = reduce_weighted_values
    compiled.call = combined
    setattr(keras.layers.Layer, "losses", property(losses))  # noqa: B010


_losses_of: Callable[[Any], Any] = keras.layers.Layer.losses.fget


def _module() -> Any:
    return importlib.import_module(LOSS_MODULE)


LOSS_MODULE = "keras.src.losses.loss"
LOSSES = Owner(LOSS_MODULE)
COMPILED = "keras.src.trainers.compile_utils"
INEXACT = "a loss would count each rank alike, however many elements it has"
WEIGHING = "to weigh the losses of ranks by what they are divided by"

CONTRACT = (
    LOSSES.method(
        "reduce_weighted_values(values, sample_weight, mask, reduction, dtype)", WEIGHING, INEXACT
    ),
    LOSSES.method("apply_mask(sample_weight, mask, dtype, reduction)", WEIGHING, INEXACT),
    Owner(f"{COMPILED}:CompileLoss").method("call(y_true, y_pred)", WEIGHING, INEXACT),
    Owner(f"{COMPILED}:CompileLoss").method("build(y_true, y_pred)", WEIGHING, INEXACT),
    Owner(f"{COMPILED}:CompileLoss").attribute("_flat_losses", WEIGHING, INEXACT),
    Owner("keras:Model").attribute("_compile_loss", WEIGHING, INEXACT),
    Owner(f"{COMPILED}:CompileLoss").attribute("_metrics", WEIGHING, INEXACT),
    Owner("keras:layers.Layer").attribute(
        "_loss_ids",
        "to tell the losses of a step from those of an earlier one",
        "a compiled step might lack the loss of a layer",
        applies=lambda: uses("jax"),
    ),
)
