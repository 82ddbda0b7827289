"""The running calls of `fit` and `evaluate` of a model, and what they do at the end of their steps.

Keras has no hook between the last step of an epoch and its validation. It computes the logs there,
in a method of the model. The innermost call owns this method while it runs: calls within it, such
as an `evaluate` in a callback, neither inherit nor remove what the outer one does.
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import keras

from keras_dist._compat.keras.models import LOGS

# Attribute of a model: the innermost call that is running.
TASK = "_keras_dist_task"

#: Keras' function of the logs of the last batch, which returns those of the epoch
Compute = Callable[[Any], Any]


class Task:
    """A running `fit` or `evaluate`; a context manager."""

    def __init__(self, model: keras.Model):
        self._attributes = vars(model)
        self._outside = {name: self._attributes.get(name) for name in (TASK, LOGS)}
        self._compute: Compute = getattr(model, LOGS) if self.outer is None else self.outer._compute
        #: functions that are called once, when the steps end, before the logs are computed
        self.before_logs: list[Callable[[], None]] = []
        #: functions that are called once, after the logs have been computed
        self.after_logs: list[Callable[[], None]] = []
        #: computes the logs by Keras' function, which is the first argument; `None` for Keras alone
        self.reduce_logs: Callable[[Compute, Any], Any] | None = None
        #: whether all ranks evaluate the model in this call
        self.is_evaluation = False

    @property
    def outer(self) -> "Task | None":
        """The call of a method of the same model within which this one runs."""
        return self._outside[TASK]

    @property
    def outermost(self) -> "Task":
        """The call within which all others of the same model run."""
        return self if self.outer is None else self.outer.outermost

    def __enter__(self) -> "Task":
        # Attributes of the instance that bypass Keras' tracking.
        self._attributes.update({TASK: self, LOGS: self._logs})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, value in self._outside.items():
            if value is None:
                self._attributes.pop(name, None)
            else:
                self._attributes[name] = value

    def _logs(self, logs: Any) -> Any:
        _call_all(self.before_logs)
        if self.reduce_logs is None:
            found = self._compute(logs)
        else:
            found = self.reduce_logs(self._compute, logs)
        _call_all(self.after_logs)
        return found


def as_task(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of a model: each call is a task."""

    @functools.wraps(method)
    def running(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        with Task(self):
            return method(self, *args, **kwargs)

    return running


def task_of(model: keras.Model) -> Task:
    """Returns the innermost running task of a model.

    A call that began before the methods of Keras were wrapped is no task. It gets one here, which
    stays until the next task begins.
    """
    running: Task | None = vars(model).get(TASK)
    return Task(model).__enter__() if running is None else running


def is_evaluated_together(model: keras.Model | None) -> bool:
    """Returns whether all ranks are evaluating a model."""
    running: Task | None = None if model is None else vars(model).get(TASK)
    return running is not None and running.is_evaluation


def _call_all(functions: list[Callable[[], None]]) -> None:
    while functions:
        functions.pop(0)()
