"""Hooks of `keras.Model` that prepare models with distributed optimizers for training.

An optimizer does not know its model, and `train_on_batch` calls no callbacks. All training goes
through `Model.make_train_function`, which Keras documents as the place to customize the step. It is
wrapped once, when the first optimizer is distributed, and leaves other models alone.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.models import LOGS, layers_of
from keras_dist.data import epochs
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_plan import agree_on_fit
from keras_dist.training.loss_scale import move_outwards
from keras_dist.training.model_state import SKIPPING, optimizers_of

__all__ = ["check_undistributed", "watch_models"]


TRACED_FOR = "_keras_dist_traced_for"
RECORDED = "_keras_dist_recorded"


@functools.cache
def watch_models() -> None:
    """Installs the hooks in `keras.Model`, for all models of this process."""
    original = keras.Model.make_train_function

    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> Any:
        for optimizer in optimizers_of(self):
            move_outwards(optimizer)
        optimizers = distributed_optimizers(self)
        if not optimizers:
            return original(self, force)
        # A step that was traced before the optimizer was wrapped, or for ranks that have
        # been left since, holds no reduction, or one among those ranks.
        reductions = [(one._keras_dist, one._keras_dist.communicator()) for one in optimizers]
        force = force or self.__dict__.get(TRACED_FOR) != reductions
        meets_host: Any = contextlib.nullcontext()
        if any(comm is not None for _, comm in reductions):
            backend = _backends.active()
            check_undistributed(f"a model whose gradients keras_dist alone averages, {self.name!r}")
            backend.check_model(self)
            _check_layers(self)
            # Only the train step meets the host; evaluate and predict are compiled as ever.
            meets_host = backend.train_step_for_host(self)
        with meets_host:
            made = original(self, force)
        self.__dict__[TRACED_FOR] = reductions
        self.train_function = _recorded(self.train_function, self)
        return made

    keras.Model.make_train_function = make_train_function
    keras.Model.fit = _agreed(keras.Model.fit)
    for task in ("fit", "evaluate", "predict"):
        setattr(keras.Model, task, _noted(getattr(keras.Model, task), task))


def check_undistributed(expected: str) -> None:
    """Refuses a distribution of Keras, which averages gradients and shares out data itself.

    Args:
        expected: what is done by keras_dist alone, for the message.

    Raises:
        BackendError: a distribution is active.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    raise errors.BackendError(
        errors.explain(
            runtime.where(),
            expected,
            f"keras.distribution.{type(distribution).__name__} active on {runtime.size()} ranks; "
            "both would act",
            "Leave out either keras.distribution or keras_dist.DistributedOptimizer and "
            "keras_dist.data.",
        )
    )


def _recorded(step: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """Wraps a train function: its calls are recorded as steps of the timeline."""
    if hasattr(step, RECORDED):
        return step  # Keras has returned the existing function
    count = model.steps_per_execution

    @functools.wraps(step, updated=())
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with _engine.tracing.step(count):
            return step(*args, **kwargs)

    setattr(recorded, RECORDED, True)
    return recorded


def _agreed(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fit`: the ranks first compare its arguments."""
    signature = inspect.signature(fit)
    place = list(signature.parameters).index("callbacks")

    @functools.wraps(fit)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if epochs.is_shared_out(bound.arguments["x"]) and runtime.size() > 1:
            check_undistributed("data that keras_dist alone shares out over the ranks")
        everywhere = agree_on_fit(bound.arguments)
        # Arguments are passed as given, since others may have wrapped `fit`, except callbacks.
        ordered = bound.arguments["callbacks"]
        given = [ordered if at == place else value for at, value in enumerate(args)]
        options = {**kwargs, "callbacks": ordered} if "callbacks" in kwargs else kwargs
        model = bound.arguments["self"]
        result = model.__dict__.get(LOGS)
        try:
            with epochs.training_on(bound.arguments, everywhere):
                return fit(*given, **options)
        finally:
            _leave_result(model, result)
            # A failed fit may not have skipped all batches; the next fit must not continue to.
            if (end := model.__dict__.pop(SKIPPING, None)) is not None:
                end()

    return agreed


def _leave_result(model: keras.Model, before: Any) -> None:
    """Leaves a model its function of the logs from before a fit, which may have failed."""
    model.__dict__.pop(LOGS, None)
    if before is not None:
        object.__setattr__(model, LOGS, before)


def _noted(method: Callable[..., Any], task: str) -> Callable[..., Any]:
    """Wraps a method: messages report that the rank is in it."""

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        with _engine.progress.during(task):
            return method(*args, **kwargs)

    return noted


def _check_layers(model: keras.Model) -> None:
    """Refuses `BatchNormalization(synchronized=True)`.

    Keras synchronizes it only under a TensorFlow strategy: between ranks it would silently
    normalize by the local batch. On the other backends Keras itself refuses it.
    """
    names = [
        layer.path
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]
    if names:
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                f"model {model.name!r} to have no BatchNormalization(synchronized=True)",
                ", ".join(names),
                "Use keras_dist.layers.SyncBatchNormalization(), without synchronized=True, "
                "which normalises by the batches of all ranks.",
            )
        )
