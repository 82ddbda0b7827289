"""Rounds of local steps in `fit` and `train_on_batch`: they end between two calls of the step."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import _backends, errors
from keras_dist._compat.keras.models import is_built, layers_of, optimizer_of
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_session import Logs, running_in, steps_of_call
from keras_dist.training.rounds import Rounds


def rounds_of(model: Any) -> dict[Any, Rounds]:
    """Returns the rounds of a model's optimizers, by optimizer; inner ones share those around."""
    every = {optimizer: optimizer._keras_dist.rounds for optimizer in distributed_optimizers(model)}
    found: dict[Any, Rounds] = {}
    for optimizer, rounds in every.items():
        if rounds is not None and rounds not in found.values():
            found[optimizer] = rounds
    return found


def end_rounds(model: Any) -> None:
    """Ends the rounds of a model that have begun. Collective; blocks."""
    for rounds in rounds_of(model).values():
        rounds.finish()


def count_steps(model: Any, is_made: bool) -> None:
    """Makes rounds end between calls of a train function, new if `is_made`, and with `fit`."""
    if is_made:
        model.train_function = functools.partial(_step, model.train_function, model)
    session = running_in(model)
    if session is not None and session.task == "fit":

        def end(logs: Any, _: Any) -> Any:
            end_rounds(model)
            return logs

        session.transform_logs(Logs.END_ROUND, end)


def _step(step: Callable[..., Any], model: Any, *arguments: Any) -> Any:
    """Calls a train function, and ends the rounds that have all of their steps."""
    backend, every = _backends.active(), rounds_of(model)
    in_loop = [rounds for rounds in every.values() if rounds.is_in_loop]
    for rounds in in_loop:
        if not rounds.taken:
            rounds.finish()
    with contextlib.ExitStack() as entered:
        for rounds in every.values():
            entered.enter_context(rounds.entered())
        if not all(rounds.taken for rounds in every.values()):
            _build(model, every, arguments[-1])
        begun = [rounds for rounds in every.values() if not rounds.taken]
        if begun:
            backend.between_steps(_each(Rounds.start, begun), model, arguments, _own(begun))
        result = step(*arguments)
    for rounds in every.values():
        rounds.count(steps_of_call(model))
    session = running_in(model)
    if session is None or session.task != "fit":  # which ends its rounds by itself
        for rounds in in_loop:
            rounds.finish()
    due = [rounds for rounds in every.values() if rounds.is_due]
    if not due:
        return result
    values = result if isinstance(result, tuple) else (result,)
    values = backend.between_steps(_each(Rounds.end_due, due), model, values, _own(due))
    return values if isinstance(result, tuple) else values[0]


def _build(model: Any, every: dict[Any, Rounds], batches: Any) -> None:
    """Finds the variables of rounds, before the first step."""
    backend, compiled = _backends.active(), optimizer_of(model)
    if not is_built(model):
        backend.build_from(model, batches)
    if isinstance(compiled, keras.optimizers.Optimizer) and not compiled.built:
        compiled.build(model.trainable_variables)
    statistics = _statistics(model)
    for optimizer, rounds in every.items():
        if not optimizer.built:
            raise errors.UsageError(
                "an optimizer that is built before its first local step",
                f"a {type(optimizer).__name__} that is not built",
                "Call optimizer.build(variables) with the variables that it trains.",
            )
        rounds.build(optimizer, statistics)
        statistics = []  # averaged once


def _each(method: Callable[[Rounds], None], every: list[Rounds]) -> Callable[[], None]:
    def work() -> None:
        for rounds in every:
            method(rounds)

    return work


def _own(every: list[Rounds]) -> list[Any]:
    return [variable for rounds in every for variable in rounds.variables]


def _statistics(model: Any) -> list[Any]:
    """Returns the moving statistics of the layers of a model that are not frozen."""
    layers = layers_of(model)
    frozen = {id(weight) for each in layers if not each.trainable for weight in each.weights}
    return [
        weight
        for weight in model.non_trainable_weights
        if id(weight) not in frozen and keras.backend.is_float_dtype(weight.dtype)
    ]
