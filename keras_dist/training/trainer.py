"""Hooks of `keras.Model` that prepare models with distributed optimizers for training.

An optimizer does not know its model, and `train_on_batch` calls no callbacks. All training calls
`Model.make_train_function`, which Keras documents for customized steps. The method is wrapped when
the first optimizer is distributed; models without a distributed optimizer train as before.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.losses import own_losses
from keras_dist._compat.keras.models import layers_of
from keras_dist.data import epochs
from keras_dist.training import random_generators, seeds
from keras_dist.training.copies import complete
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_plan import agree_on_fit
from keras_dist.training.global_losses import Step, with_rows, within
from keras_dist.training.loss_scaling import move_outwards
from keras_dist.training.model_state import SKIPPING, optimizers_of
from keras_dist.training.tasks import as_task, is_evaluated_together
from keras_dist.training.traced_steps import renew_steps

# Attribute of a model: the reductions and communicators that its train function was made for.
TRACED_FOR = "_keras_dist_traced_for"
# Attribute of a train or test function that is wrapped: its contexts.
WRAPPED = "_keras_dist_wrapped"


@functools.cache
def watch_models() -> None:
    """Installs the hooks in `keras.Model`, for all models of this process."""
    original = keras.Model.make_train_function

    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> Any:
        epochs.expect_steps()
        for optimizer in optimizers_of(self):
            complete(optimizer, self)
        for optimizer in optimizers_of(self):
            move_outwards(optimizer)
        optimizers = distributed_optimizers(self)
        if not optimizers:
            train_function = original(self, force)
            contexts = [own_losses]
            if keras.config.backend() == "torch":
                contexts.append(random_generators.in_step)
            self.train_function = _wrapped(self.train_function, *contexts)
            return train_function
        for optimizer in optimizers:
            optimizer._keras_dist.model = self.name
        # A step that was traced before the optimizer was wrapped, or for another communicator,
        # has no reduction or an outdated one.
        reductions = [
            (optimizer._keras_dist, optimizer._keras_dist.communicator())
            for optimizer in optimizers
        ]
        has_equal_batches = epochs.has_equal_batches(self)
        traced_for = [*reductions, has_equal_batches]
        before = self.__dict__.get(TRACED_FOR)
        if before is not None and before != traced_for:
            renew_steps(self)
        force = force or before != traced_for
        for_host: Any = contextlib.nullcontext()
        if any(comm is not None for _, comm in reductions):
            backend = _backends.active()
            check_undistributed(f"a model whose gradients keras_dist alone averages, {self.name!r}")
            backend.check_model(self)
            _check_layers(self)
            # Only the train step calls the host; evaluate and predict compile as before.
            for_host = backend.train_step_for_host(self, with_rows)
        with for_host:
            train_function = original(self, force)
        self.__dict__[TRACED_FOR] = traced_for
        recorded = functools.partial(_engine.tracing.step, self.steps_per_execution)
        losses = functools.partial(within, Step(optimizers[0]._keras_dist, has_equal_batches), self)
        self.train_function = _wrapped(
            self.train_function, recorded, losses, random_generators.in_step
        )
        return train_function

    keras.Model.make_train_function = make_train_function
    keras.Model.make_test_function = _together(keras.Model.make_test_function)
    keras.Model.fit = _checked(as_task(keras.Model.fit))
    keras.Model.evaluate = as_task(keras.Model.evaluate)
    for task in ("fit", "evaluate", "predict"):
        setattr(keras.Model, task, _reported(getattr(keras.Model, task), task))


def _together(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `make_test_function`: where all ranks evaluate, losses are those of all ranks."""

    @functools.wraps(original)
    def make_test_function(self: keras.Model, force: bool = False) -> Any:
        reductions = [optimizer._keras_dist for optimizer in distributed_optimizers(self)]
        if not any(reduction.communicator() is not None for reduction in reductions):
            test_function = original(self, force)
            self.test_function = _wrapped(self.test_function, own_losses)
            return test_function
        is_undistributed = own_losses in getattr(self.test_function, WRAPPED, (own_losses,))
        if not is_undistributed and not force:
            return self.test_function
        with _backends.active().test_step_for_host(self):
            original(self, True)
        model = weakref.ref(self)  # TensorFlow keeps functions of the host until the process ends
        step = Step(reductions[0], evaluates=lambda: is_evaluated_together(model()))
        self.test_function = _wrapped(self.test_function, lambda: within(step, self))
        return self.test_function

    return make_test_function


def check_undistributed(expected: str) -> None:
    """Checks that no distribution of Keras is active, which averages gradients and shards data."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    raise errors.BackendError(
        runtime.where(),
        expected,
        f"keras.distribution.{type(distribution).__name__} active on {runtime.size()} ranks, "
        "so that both would act",
        "Use either keras.distribution, or keras_dist.DistributedOptimizer and keras_dist.data.",
    )


def _wrapped(step: Callable[..., Any], *contexts: Callable[[], Any]) -> Callable[..., Any]:
    """Wraps a train or test function: its calls run in contexts."""
    if hasattr(step, WRAPPED):
        return step  # Keras has returned the existing function

    @functools.wraps(step, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return step(*args, **kwargs)

    setattr(wrapped, WRAPPED, contexts)
    return wrapped


def _checked(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fit`: first the ranks compare its arguments."""
    signature = inspect.signature(fit)
    position = list(signature.parameters).index("callbacks")

    @functools.wraps(fit)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if epochs.is_sharded(bound.arguments["x"]) and runtime.size() > 1:
            check_undistributed("data that keras_dist alone shares out over the ranks")
        agreement = agree_on_fit(bound.arguments)
        # Arguments except callbacks are passed as given: other code may have wrapped `fit`.
        ordered = bound.arguments["callbacks"]
        given = [ordered if at == position else value for at, value in enumerate(args)]
        options = {**kwargs, "callbacks": ordered} if "callbacks" in kwargs else kwargs
        model = bound.arguments["self"]
        is_within = epochs.fit_arguments().get("self") is model
        outer = model.train_function, model.__dict__.get(TRACED_FOR)
        try:
            with epochs.training_on(bound.arguments, *agreement), seeds.separable():
                return fit(*given, **options)
        finally:
            if is_within:  # the outer fit goes on with its own step
                model.train_function, model.__dict__[TRACED_FOR] = outer
            # A fit that failed while it skipped batches must not make the next fit skip them.
            if (end := model.__dict__.pop(SKIPPING, None)) is not None:
                end()

    return checked


def _reported(method: Callable[..., Any], task: str) -> Callable[..., Any]:
    """Wraps a method: messages name it as the current task of the rank."""

    @functools.wraps(method)
    def reported(*args: Any, **kwargs: Any) -> Any:
        with _engine.progress.during(task):
            return method(*args, **kwargs)

    return reported


def _check_layers(model: keras.Model) -> None:
    """Checks that a model has no `BatchNormalization(synchronized=True)`.

    Keras synchronizes it only under a TensorFlow strategy: on several ranks it would silently
    normalize by the local batch. On other backends Keras itself rejects it.
    """
    names = [
        layer.path
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]
    if names:
        raise errors.ArgumentError(
            runtime.where(),
            f"model {model.name!r} to have no BatchNormalization(synchronized=True)",
            ", ".join(names),
            "Use keras_dist.layers.SyncBatchNormalization(), without synchronized=True, "
            "which normalizes by the batches of all ranks.",
        )
