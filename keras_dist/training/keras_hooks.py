"""The places at which Keras calls a session: the one module that patches its trainers and lists.

The methods are patched when the first optimizer is distributed, or the first callback of keras_dist
is made: in the classes that define them, so that trainers that are no `keras.Model` train alike.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import model_of
from keras_dist._compat.keras.metrics import build_from
from keras_dist._compat.keras.models import LOGS
from keras_dist.data import epochs
from keras_dist.data.array_dataset import InOrder
from keras_dist.data.prefetching import Prefetched
from keras_dist.data.streams import StreamDataset
from keras_dist.training import random_generators
from keras_dist.training.agreement import agree_on_evaluate, agree_on_fit, flat, set_of, within_set
from keras_dist.training.fit_session import (
    SESSION,
    FirstStep,
    FitSession,
    members,
    running_in,
    session_for_list,
)
from keras_dist.training.train_functions import (
    TRACED_FOR,
    check_undistributed,
    make_test_function,
    make_train_function,
    wrap_train_function,
)


@functools.cache
def watch_models() -> None:
    """Patches Keras' trainers and lists of callbacks."""
    around: Callable[..., Any]
    for name, around in (
        ("fit", _fit),
        ("evaluate", functools.partial(_running, "evaluate")),
        ("predict", functools.partial(_running, "predict")),
        ("train_on_batch", _train_on_batch),
        ("make_train_function", make_train_function),
        ("make_test_function", make_test_function),
        (LOGS, _logs),
    ):
        _patch(keras.Model, name, around)
    for name, hook in (
        ("on_train_begin", _on_train_begin),
        ("on_epoch_begin", functools.partial(_on_epoch, FitSession.call_hook)),
        ("on_train_batch_begin", functools.partial(_on_batch, FitSession.begin_step)),
        ("on_train_batch_end", functools.partial(_on_batch, FitSession.end_step)),
        ("on_test_begin", operator.call),
        ("on_test_end", operator.call),
        ("on_epoch_end", functools.partial(_on_epoch, FitSession.end_epoch)),
        ("on_train_end", _on_train_end),
    ):
        _patch(keras.callbacks.CallbackList, name, functools.partial(_within_loop, hook))


def _patch(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Makes calls of a method call `around` with the method and the arguments."""
    owner = next(each for each in cls.__mro__ if name in vars(each))
    original = vars(owner)[name]

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, patched)


# --- methods of models -------------------------------------------------------------------------


@_engine.progress.during("fit")
def _fit(fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a fit: first the ranks compare its arguments."""
    signature = inspect.signature(fit)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    if epochs.is_sharded(bound.arguments["x"]) and runtime.size() > 1:
        check_undistributed("data that keras_dist alone shares out over the ranks")
    model = bound.arguments["self"]
    is_within = epochs.fits.get().arguments.get("self") is model
    outer = model.train_function, model.__dict__.get(TRACED_FOR)
    found = members(flat(bound.arguments))
    with within_set(set_of(found, model), found):
        agreement = agree_on_fit(bound.arguments)
        # Other arguments are passed as given: other code may have wrapped `fit`.
        changed = {"callbacks": bound.arguments["callbacks"]}
        data = bound.arguments["x"]
        if isinstance(data, InOrder) and epochs.has_workers(data):
            changed["shuffle"] = False
        given = [
            changed.pop(name, value) for name, value in zip(bound.arguments, args, strict=False)
        ]
        is_passed = {*kwargs, "shuffle"} & set(bound.arguments)
        options = {**kwargs, **{name: changed[name] for name in is_passed & set(changed)}}
        training = epochs.Fit(bound.arguments, *agreement, awaits_steps=True)
        try:
            with FitSession(model), epochs.fits.during(training), random_generators.separable():
                _build_before_reading(model, data)
                return fit(*given, **options)
        finally:
            if is_within:  # the outer fit goes on with its own step
                model.train_function, model.__dict__[TRACED_FOR] = outer


def _running(task: str, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = inspect.signature(method).bind(model, *args, **kwargs).arguments
    found = members(flat(arguments))
    with (
        _engine.progress.during(task),
        within_set(set_of(found, model), found),
        FitSession(model, task) as session,
    ):
        session.callbacks = found
        is_common = any(member.evaluates_together for member in found)
        has_agreed = bool(epochs.fits.get().arguments)  # in the fit that evaluates
        if task == "evaluate" and is_common and not has_agreed:
            agree_on_evaluate(arguments)
        if task == "evaluate":
            _build_before_reading(model, arguments.get("x"))
        return method(model, *args, **kwargs)


def _build_before_reading(model: Any, data: Any) -> None:
    """Builds a model, its losses and metrics if Keras would build them from workers or a stream."""
    # On JAX and torch Keras takes a batch for their shapes, and keeps what workers have read by
    # then for the first epoch: these batches come twice, and the last ones of the epoch do not
    # come. An iterator would go on with its next epoch.
    is_read = keras.config.backend() != "tensorflow" and epochs.is_sharded(data)
    is_stream = isinstance(data, StreamDataset | Prefetched)
    has_workers = isinstance(data, keras.utils.PyDataset) and epochs.has_workers(data)
    if is_read and (is_stream or has_workers):
        try:
            build_from(model, data, begins=not is_stream)
        except errors.KerasDistError:  # a part of the model communicates
            raise
        except Exception:  # Keras itself fails with its error
            return


def _train_on_batch(method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    loop = running_in(model)
    if loop is not None and loop.when_built is not None:
        if not loop.is_built:
            model(inspect.signature(method).bind(model, *args, **kwargs).arguments["x"])
        _begin_loop(loop)
    with FitSession(model, "train_on_batch"):
        return method(model, *args, **kwargs)


def _logs(compute: Callable[..., Any], model: Any, logs: Any) -> Any:
    session = running_in(model)
    own = functools.partial(compute, model)
    return own(logs) if session is None else session.logs_of_epoch(own, logs)


# --- hooks of lists of callbacks ---------------------------------------------------------------


def _within_loop(
    around: Callable[..., Any], hook: Any, callbacks: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs a hook of a loop within the process set of its callbacks; `fit` does so as a whole."""
    session = running_in(callbacks)
    if session is None or session.process_set is None:
        return around(hook, callbacks, *args, **kwargs)
    with within_set(session.process_set, members(session.callbacks)):
        return around(hook, callbacks, *args, **kwargs)


def _begin_loop(loop: FitSession, *arguments: Any) -> tuple[Any, ...]:
    """Does what precedes the first step of a loop."""
    with within_set(loop.process_set, members(loop.callbacks)):
        return loop.begin_step(*arguments)


def _on_train_begin(hook: Callable[..., None], callbacks: Any, logs: Any = None) -> None:
    model, found = model_of(callbacks), members(callbacks.callbacks)
    running = None if model is None else running_in(model)
    loop = None if running is None else running.outer
    if running is not None and loop is not None and loop.when_built is not None:  # a fit within it
        _begin_loop(loop)
        if loop.when_built is not None:  # TensorFlow builds a model in its first step
            running.before_first_step(FirstStep.BEGIN_LOOP, functools.partial(_begin_loop, loop))
    if model is None or not found:
        return hook(callbacks, logs)
    wrap_train_function(model)
    process_set = set_of(found, model)
    session = session_for_list(callbacks)
    if session.task == "loop":
        session.process_set = process_set
    with within_set(process_set, found):
        return session.begin(callbacks, functools.partial(hook, callbacks, logs))


def _on_epoch(
    call: Callable[..., None],
    hook: Callable[..., None],
    callbacks: Any,
    epoch: int,
    logs: Any = None,
) -> None:
    session = running_in(callbacks)
    if session is None:
        hook(callbacks, epoch, logs)
    else:
        call(session, hook, callbacks, epoch, logs)


def _on_batch(
    place: Callable[[FitSession], Any],
    hook: Callable[..., None],
    callbacks: Any,
    batch: int,
    logs: Any = None,
) -> None:
    session = running_in(callbacks)
    if session is None:
        hook(callbacks, batch, logs)
    elif not session.skips_hook(batch):
        place(session)
        if isinstance(logs, dict):
            session.last_logs = logs
        session.call_hook(hook, callbacks, batch, logs)


def _on_train_end(hook: Callable[..., None], callbacks: Any, logs: Any = None) -> None:
    hook(callbacks, logs)
    session: FitSession | None = vars(callbacks).pop(SESSION, None)
    if session is not None and session.task == "loop":
        session.__exit__()
        session.end_step()
