"""The train and test functions of models with distributed optimizers.

An optimizer does not know its model, and `train_on_batch` calls no callbacks. All training calls
`make_train_function`, which Keras documents for customized steps. Models without a distributed
optimizer train as before.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.losses import own_losses
from keras_dist._compat.keras.models import is_trainer, layers_of
from keras_dist.data import epochs
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.training import random_generators
from keras_dist.training.agreement import within_set
from keras_dist.training.copies import complete, move_outwards
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_session import (
    is_evaluated_together,
    members,
    running_in,
    steps_of_call,
)
from keras_dist.training.global_losses import Step, with_rows, within
from keras_dist.training.gradient_reduction import GradientReduction
from keras_dist.training.model_state import optimizers_of
from keras_dist.training.rounds_in_fit import count_steps

# Attribute of a model: the reductions and communicators that its train function was made for.
TRACED_FOR = "_keras_dist_traced_for"
# Attribute of a train or test function that is wrapped: its contexts.
WRAPPED = "_keras_dist_wrapped"


def make_train_function(original: Callable[..., Any], model: Any, force: bool = False) -> Any:
    """Makes the train function of a model; what precedes its first step is in its session."""
    fit = epochs.fits.get()
    fit.awaits_steps = False
    for optimizer in optimizers_of(model):
        complete(optimizer, model)
    for optimizer in optimizers_of(model):
        move_outwards(optimizer)
    optimizers = distributed_optimizers(model)
    if not optimizers:
        made = original(model, force)
        contexts: list[Callable[[], Any]] = [own_losses]
        if keras.config.backend() == "torch":
            contexts.append(random_generators.in_step)
        wrap_train_function(model, *contexts)
        return made
    every = [optimizer._keras_dist for optimizer in optimizers]
    for reduction in every:
        reduction.model = model.name
    # A step that was traced before the optimizer was wrapped, or for another communicator,
    # has no reduction or an outdated one.
    reductions = [(reduction, reduction.communicator()) for reduction in every]
    has_equal_batches = fit.equal_batches and fit.arguments.get("self") is model
    for comm in (comm for each in every for comm in (each.communicator(), each.replicas())):
        if comm is not None:
            _engine.progress.acts_among(comm.ranks)
    traced_for = [*reductions, has_equal_batches]
    before = model.__dict__.get(TRACED_FOR)
    if before is not None and before != traced_for:
        renew_steps(model)
    force = force or before != traced_for
    for_host: Any = contextlib.nullcontext()
    if any(comm is not None for _, comm in reductions):
        backend = _backends.active()
        check_undistributed(f"a model whose gradients keras_dist alone averages, {model.name!r}")
        backend.check_model(model)
        _check_layers(model)
        # Only the train step calls the host; evaluate and predict compile as before.
        is_only = len(optimizers) == 1 and optimizers[0] is model.optimizer
        takes_rows = is_only and every[0].takes_rows
        for_host = backend.train_step_for_host(model, with_rows, takes_rows)
    with for_host as in_step:
        made = original(model, force)
    model.__dict__[TRACED_FOR] = traced_for
    if any(reduction.rounds is not None for reduction in every):
        count_steps(model, is_made=not hasattr(model.train_function, WRAPPED))

    def recorded() -> Any:
        return _engine.tracing.step(steps_of_call(model))

    losses = functools.partial(within, Step(every[0], has_equal_batches), model)
    contexts = [recorded, losses, random_generators.in_step]
    wrap_train_function(model, *contexts, *([] if in_step is None else [in_step]))
    return made


def make_test_function(original: Callable[..., Any], model: Any, force: bool = False) -> Any:
    """Makes the test function of a model; where all ranks evaluate, losses are those of all."""
    reductions = [optimizer._keras_dist for optimizer in distributed_optimizers(model)]
    ranks: Callable[[], Any] = runtime.fit_communicator
    if reductions:
        ranks = functools.partial(runtime.communicator, reductions[0].options.process_set)
    elif _is_evaluated_with_callbacks(model):  # of a model without a distributed optimizer
        reductions = [GradientReduction(ReductionOptions())]
    if not any(reduction.replicas() is not None for reduction in reductions):
        made = original(model, force)
        model.test_function = _wrapped(model.test_function, own_losses)
        return made
    is_undistributed = own_losses in getattr(model.test_function, WRAPPED, (own_losses,))
    if not is_undistributed and not force:
        return model.test_function
    renew_steps(model, "test_step")
    with _backends.active().test_step_for_host(model):
        original(model, True)
    known = weakref.ref(model)  # TensorFlow keeps functions of the host until the process ends
    step = Step(
        reductions[0], evaluates=lambda: ranks() if is_evaluated_together(known()) else None
    )
    model.test_function = _wrapped(model.test_function, lambda: within(step, model))
    return model.test_function


def _is_evaluated_with_callbacks(model: Any) -> bool:
    """Returns whether an `evaluate` with members among its callbacks runs, on data of each rank."""
    session = running_in(model)
    if session is None or session.task != "evaluate" or not session.callbacks:
        return False
    return keras.distribution.distribution() is None  # which may shard the data among ranks


def wrap_train_function(model: Any, *contexts: Callable[[], Any]) -> None:
    """Makes the train function of a model ask the session; its calls run in contexts."""
    # A model may make its function itself, without Keras' method.
    if model.train_function is None or hasattr(model.train_function, WRAPPED):
        return  # not made yet, or the existing function
    made = _wrapped(model.train_function, *contexts)

    @functools.wraps(made, updated=())
    def train_function(*arguments: Any) -> Any:
        session = running_in(model)
        if session is not None and session.precedes_steps:
            with within_set(session.process_set, members(session.callbacks)):
                return session.step(*arguments)
        return made(*arguments)

    setattr(train_function, WRAPPED, contexts)
    model.train_function = train_function


def check_undistributed(expected: str) -> None:
    """Checks that no distribution of Keras is active, which averages gradients and shards data."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    raise errors.BackendError(
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


def _check_layers(model: keras.Model) -> None:
    """Checks that a model has no `BatchNormalization(synchronized=True)`."""
    names = [
        layer.path
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]
    # Keras synchronizes only under a TensorFlow strategy: it would silently normalize by the local
    # batch. On other backends Keras itself rejects it.
    if names:
        raise errors.ArgumentError(
            f"model {model.name!r} to have no BatchNormalization(synchronized=True)",
            ", ".join(names),
            "Use keras_dist.layers.SyncBatchNormalization(), without synchronized=True, "
            "which normalizes by the batches of all ranks.",
        )


def retrace(model: keras.Model) -> None:
    """Makes a model trace its steps again, since constants in them have changed."""
    for inner in layers_of(model):
        if is_trainer(inner):
            renew_steps(inner)
            inner.test_function = inner.predict_function = None
            if inner.train_function is not None:
                inner.make_train_function(force=True)


def renew_steps(model: keras.Model, *names: str) -> None:
    """Gives a model functions that JAX has not traced: it knows traced functions by their value."""
    if keras.backend.backend() != "jax":
        return
    for name in names or ("train_step", "test_step"):
        step = model.__dict__.get(name) or getattr(model, name)
        model.__dict__[name] = _Renewed(step.func if isinstance(step, _Renewed) else step)


class _Renewed(functools.partial):
    """A step that is equal to no other."""
