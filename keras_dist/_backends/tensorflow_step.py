"""Keras' train step on TensorFlow: XLA programs, batches, refused strategies. See decision 5."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_dist import errors
from keras_dist._backends import Backend, overrides, uncompiled_step
from keras_dist._backends.tensorflow_host import HostCalled, without_host
from keras_dist._compat.python import replaced

_log = logging.getLogger("keras_dist")

# Only Keras' own step is split. It calls these methods after the update; they do not read weights,
# so they may run before it as well.
KERAS_OWN = ("train_step", "compute_metrics", "get_metrics_result")

# Why a step that turns out to call the host is not compiled.
SHARED_LOSS = "its losses are divided by numbers of all ranks, because of masks or weights"

WithRows = Callable[[Any], contextlib.AbstractContextManager[None]]


def _reason_not_to_split(model: Any) -> str | None:
    """Returns the reason why the step of a model cannot be split; `None` if it can."""
    from keras_dist._compat.keras.models import layers_of

    for name in KERAS_OWN:
        if overrides(model, name):
            return f"it overrides {name}, which may use the updated weights"
    for layer in layers_of(model):
        if getattr(layer, "calls_host", False) or not layer.supports_jit:
            return f"XLA cannot compile its layer of class {type(layer).__name__}"
    return None


def _split(model: Any, step: Callable[[Any], Any], with_rows: WithRows) -> Callable[[Any], Any]:
    """Returns a train step of two programs. It is called once for each graph that is traced."""

    def train_step(data: Any) -> Any:
        variables: list[Any] = []

        def differentiate() -> tuple[Any, list[Any]]:
            pairs: list[tuple[Any, Any]] = []
            with replaced(model.optimizer, apply_gradients=pairs.extend):
                logs = step(data)
            variables[:] = [variable for _, variable in pairs]
            return logs, [gradient for gradient, _ in pairs]

        first = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
        try:
            with with_rows(tf.shape(first)[0]):
                logs, gradients = _compiled(differentiate)()
        except HostCalled:
            _warn_once(SHARED_LOSS)
            with _compiled_update(model.optimizer):
                return step(data)
        if variables:
            with _compiled_update(model.optimizer):
                model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return logs

    return train_step


@contextlib.contextmanager
def _compiled_update(optimizer: Any) -> Iterator[None]:
    """Returns a context in which a traced update of dense gradients is compiled by XLA."""
    from keras_dist._compat.keras.optimizers import TF_UPDATE, innermost_optimizer

    applying = innermost_optimizer(optimizer)
    update = getattr(applying, TF_UPDATE)

    def compiled_update(strategy: Any, pairs: Sequence[tuple[Any, Any]], *arguments: Any) -> None:
        # The number of rows differs from step to step, and XLA would compile a program for each.
        rows = [pair for pair in pairs if isinstance(pair[0], tf.IndexedSlices)]
        dense = [pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]
        update(strategy, rows, *arguments)
        _compiled(lambda: update(strategy, dense, *arguments))()

    with replaced(applying, **{TF_UPDATE: compiled_update}):
        yield


def _compiled(function: Callable[[], Any]) -> Any:
    """Returns a function that XLA compiles; tracing it raises `HostCalled` if it calls the host."""

    def traced() -> Any:
        with without_host(), tf.variable_creator_scope(_with_value):
            return function()

    return tf.function(traced, autograph=False, jit_compile=True)


def _with_value(create: Callable[..., Any], **options: Any) -> Any:
    """Makes a variable that has its value although the trace within which it is made may fail."""
    # TensorFlow gives variables that a function makes their values when its trace has succeeded.
    # The first step makes those of models, losses and metrics that have not been built.
    value = options.get("initial_value")
    if not callable(value):
        value = tf.get_static_value(value)
    if value is None:  # it is computed in the graph
        return create(**options)
    with tf.init_scope():
        return create(**{**options, "initial_value": value})


@functools.cache
def _warn_once(why: str) -> None:
    _log.warning(
        "keras_dist trains a model without XLA (jit_compile): %s. Gradients are averaged on "
        "the host, which an XLA program cannot call. No change is required; "
        "compile(..., jit_compile=False) has the same effect.",
        why,
    )


def _are_dense(batches: Any) -> bool:
    """Returns whether batches are known to consist of dense tensors."""
    specs = tf.nest.flatten(getattr(batches, "element_spec", None))
    return all(isinstance(spec, tf.TensorSpec) for spec in specs)


def _take(iterator: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            return
        yield optional.get_value()


def refuse_strategy(expected: str, model: Any = None) -> None:
    """Checks that no strategy is in scope, nor was when a model or its optimizer was made."""
    used = [tf.distribute.get_strategy()] if tf.distribute.has_strategy() else _used_by(model)
    if used:
        raise errors.BackendError(
            "[keras_dist]",
            expected,
            f"a tf.distribute.{type(used[0]).__name__}, so that both would act",
            "Make the model and its optimizer, and train, outside of the scope of a strategy.",
        )


def _used_by(model: Any) -> list[Any]:
    """Returns the strategies in whose scope a model and its optimizer were made."""
    if model is None:
        return []
    from keras_dist._compat.keras.optimizers import TF_STRATEGY, innermost_optimizer

    optimizer = innermost_optimizer(model.optimizer)
    return [s for s in (model.distribute_strategy, getattr(optimizer, TF_STRATEGY)) if _acts(s)]


def _acts(strategy: Any) -> bool:
    """Returns whether a strategy is another one than TensorFlow's default."""
    with strategy.scope():
        return tf.distribute.has_strategy()


class Steps(Backend):
    """What the backend of TensorFlow does with the steps of a model."""

    @contextlib.contextmanager
    def train_step_for_host(
        self, model: Any, with_rows: WithRows, takes_rows: bool
    ) -> Iterator[None]:
        """Gives Keras a step of two compiled programs or, with a warning, one without XLA."""
        if not model.jit_compile or model.run_eagerly:
            yield
            return
        why_not = _reason_not_to_split(model)
        step = model.train_step if why_not else _split(model, model.train_step, with_rows)
        if why_not:
            _warn_once(why_not)
        with uncompiled_step(model, "train_step", step):
            yield

    @contextlib.contextmanager
    def test_step_for_host(self, model: Any) -> Iterator[None]:
        """Compiles the step unless it calls the host."""
        if not model.jit_compile or model.run_eagerly:
            yield
            return
        step = model.test_step

        def test_step(data: Any) -> Any:
            try:
                return _compiled(lambda: step(data))()
            except HostCalled:
                return step(data)

        with uncompiled_step(model, "test_step", test_step):
            yield

    def first_batch(self, count: int, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        """Takes the batches of one call; an iterator of the same type needs no new trace."""
        [iterator] = arguments
        # Only dense tensors can be put into an iterator of the same type.
        can_take = isinstance(iterator, tf.data.Iterator) and _are_dense(iterator)
        batches = list(_take(iterator, count)) if can_take else []
        if not batches:
            return None, (iterator,)

        def with_spec(*batch: Any) -> Any:
            specs = tf.nest.flatten(iterator.element_spec)
            tensors = [
                tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape)
                for tensor, spec in zip(tf.nest.flatten(batch), specs, strict=True)
            ]
            return tf.nest.pack_sequence_as(iterator.element_spec, tensors)

        datasets = [tf.data.Dataset.from_tensors(batch).map(with_spec) for batch in batches]
        dataset = functools.reduce(lambda first, second: first.concatenate(second), datasets)
        return batches[0], (iter(dataset),)

    def build_from(self, model: Any, batches: Any) -> None:
        """Traces a train step, which creates the variables, without running it."""
        try:
            tf.function(model.train_step).get_concrete_function(batches.element_spec)
        except Exception as error:
            raise errors.ArgumentError(
                "[keras_dist]",
                f"to build model {model.name!r} from the shapes of its data",
                f"{type(error).__name__}: {error}",
                "Build the model before fit: call it on a batch.",
            ) from error

    def build_metrics(self, model: Any, batches: Any) -> None:
        """Makes the metrics that `compile` knows by name before a first step of Keras is traced."""
        # TensorFlow traces a step anew if its first trace has made variables.
        from keras_dist._compat.keras import metrics

        is_own = any(overrides(model, name) for name in KERAS_OWN)
        if model.run_eagerly or is_own or not _are_dense(batches):
            return
        # The step itself makes them, or fails with the error of plain Keras.
        with contextlib.suppress(Exception):
            metrics.build_metrics(model, batches.element_spec)

    def check_model(self, model: Any) -> None:
        refuse_strategy(f"a model whose gradients keras_dist alone averages, {model.name!r}", model)

    def skip_batches(self, count: int, logs: dict[str, Any], *arguments: Any) -> dict[str, Any]:
        [iterator] = arguments
        next(iterator)  # StopIteration ends the epoch, but an execution may be incomplete
        for _ in itertools.islice(iterator, count - 1):
            pass
        return logs
