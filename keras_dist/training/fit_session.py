"""The life of a fit: one object for each call of `fit`, `evaluate`, `predict` or `train_on_batch`.

`keras_hooks` calls a session where Keras has something to say; nothing else steers a fit. The
innermost call of a model's methods is its session: calls within it, such as an `evaluate` in a
callback, neither inherit nor remove what the outer one does.
"""

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from keras_dist import errors
from keras_dist._compat.keras.callbacks import model_of
from keras_dist._compat.keras.models import has_weights
from keras_dist.runtime.process_sets import ProcessSet

# Attribute of a model: its innermost session. Of a list of callbacks: that of its fit.
SESSION = "_keras_dist_session"

# True values of `stop_training` that end only an epoch (out of data) or a job (to be restarted).
STOPS_EPOCH, STOPS_JOB = "this epoch alone", "this job alone"

Work = Callable[[], None]
Compute = Callable[[Any], Any]
Transformation = Callable[[Any, Compute], Any]


class FirstStep(enum.IntEnum):
    """What precedes the first step of a fit, once its batches are there, in this order."""

    BEGIN_LOOP = 0  # around the fit
    BROADCAST = 1
    COMPARE = 2
    METRICS = 3


class Logs(enum.IntEnum):
    """What makes the logs of an epoch of those of its last batch, in this order."""

    END_STEPS = 0  # all ranks have ended the steps of the epoch
    END_ROUND = 1  # of local steps
    COMPUTE = 2  # by Keras, unless a callback knows better
    LEAVE = 3


class Order(enum.IntEnum):
    """The place of a callback: `fit` moves all but the first behind what a user has appended."""

    AS_GIVEN = 0
    VERIFIES = 1
    STOPS = 2  # acts on the decisions of all callbacks before it
    LEAVES = 3


class SessionMember:
    """A callback that takes part in sessions, see `SessionCallback`."""


def members(callbacks: Iterable[Any]) -> list[Any]:
    """Returns the callbacks that take part in sessions."""
    return [each for each in callbacks if isinstance(each, SessionMember)]


class FitSession:
    """A running call; a context manager."""

    def __init__(self, model: Any, task: str = "fit"):
        self.model, self.task = model, task
        #: the call of a method of the same model within which this one runs
        self.outer: FitSession | None = running_in(model)
        #: all callbacks of the list, including those that Keras adds; without a fit, the members
        self.callbacks: Sequence[keras.callbacks.Callback] = ()
        #: members that can write a backup of the current step at once, by `save_now`
        self.backups: list[Any] = []
        #: result of the last train function of this epoch, without additions of callbacks
        self.last_logs: dict[str, Any] = {}
        #: the ranks of the callbacks of a loop, and of calls within it; `None`: all
        self.process_set: ProcessSet | None = None
        #: whether all ranks evaluate the model in this call
        self.is_evaluation = False
        #: what precedes the first step of a loop whose model is not built yet: it takes the
        #: arguments of that step, from whose batches it builds the model, or none if that is built
        self.when_built: Callable[..., tuple[Any, ...]] | None = None
        self._list: Callable[[], Any] = lambda: model
        self._first_step: dict[FirstStep, Callable[..., tuple[Any, ...]]] = {}
        self._resumed: Any = None
        self._logs: dict[Logs, Transformation] = {Logs.COMPUTE: lambda logs, compute: compute(logs)}
        self._after_hook: list[Work] = []
        self._is_in_hook = False

    @property
    def outermost(self) -> "FitSession":
        """The call within which all others of the same model run."""
        return self if self.outer is None else self.outer.outermost

    # --- a call begins -----------------------------------------------------------------------

    def __enter__(self) -> "FitSession":
        vars(self.model)[SESSION] = self  # bypasses Keras' tracking
        return self

    def begin(self, callbacks: keras.callbacks.CallbackList, hook: Work) -> None:
        """Lets the members of a list take part, and calls `on_train_begin` of all callbacks."""
        vars(callbacks)[SESSION] = self
        self._list = weakref.ref(callbacks)
        self.callbacks = callbacks.callbacks
        self._is_in_hook = True
        for member in members(self.callbacks):
            member.enter(self)
        self.call_hook(hook)

    # --- before and around steps -------------------------------------------------------------

    def before_first_step(self, place: FirstStep, work: Callable[..., tuple[Any, ...]]) -> None:
        """Adds a function of the arguments of the first step; it returns those to use instead."""
        self._first_step[place] = work

    def resume(self, epoch: Any) -> None:
        """Begins an epoch with its first batches, which are read, without training or hooks."""
        self._resumed, self.last_logs = epoch, epoch.logs

    @property
    def precedes_steps(self) -> bool:
        """Whether something is to be done before the next step, or in place of it."""
        return bool(self._first_step) or (self._resumed is not None and self._resumed.is_left)

    def step(self, *arguments: Any) -> Any:
        """Calls the train function of the model, after what precedes it, or skips its batches."""
        if self._resumed is not None and self._resumed.is_left:
            skipped = self._resumed.skip(*arguments)
            if skipped is not None:
                return skipped
        first, self._first_step = self._first_step, {}
        for place in sorted(first):
            arguments = first[place](*arguments)
        return self.model.train_function(*arguments)

    @property
    def is_built(self) -> bool:
        """Whether the model has its weights, also one that trains its layers without a `call`."""
        return has_weights(self.model)

    def begin_step(self, *arguments: Any) -> tuple[Any, ...]:
        """Does what waits for the model of a loop to be built, or for the arguments of a step."""
        if self.when_built is not None and (arguments or self.is_built):
            work, self.when_built = self.when_built, None
            return work(*arguments)
        return arguments

    def end_step(self) -> None:
        """Checks that what precedes the first step of a loop has been done."""
        if self.when_built is not None and self.is_built:
            raise errors.UsageError(
                f"model {self.model.name!r} to be built before the first step of a loop",
                "a step that has built it, so that each rank began with weights of its own",
                "Call the model on a batch before on_train_begin of the callbacks.",
            )

    # --- hooks of callbacks ------------------------------------------------------------------

    def skips_hook(self, batch: int) -> bool:
        """Returns whether callbacks are not told of a batch."""
        return self._resumed is not None and batch < self._resumed.batches

    def call_hook(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Calls a hook of all callbacks, then the functions that wait for its end."""
        self._is_in_hook = True
        hook(*arguments)
        self._is_in_hook = False
        while self._after_hook:
            self._after_hook.pop(0)()

    def after_hook(self, work: Work) -> None:
        """Calls a function after the current hook of all callbacks; at once outside of a hook."""
        if self._is_in_hook:
            self._after_hook.append(work)
        else:
            work()

    # --- the end of the steps of an epoch ----------------------------------------------------

    def transform_logs(self, place: Logs, function: Transformation) -> None:
        """Adds a function of logs, which returns those to use instead, for the end of steps."""
        # Keras has no hook there, before the validation of an epoch; it computes the logs there.
        self._logs[place] = function

    def logs_of_epoch(self, compute: Compute, logs: Any) -> Any:
        """Returns the logs of an epoch, or of `evaluate`; `compute` is Keras' function."""
        for place in sorted(self._logs):
            logs = self._logs[place](logs, compute)
        return logs

    def end_epoch(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Calls `on_epoch_end` of all callbacks."""
        self.end_step()
        if self._resumed is not None:
            self._resumed.end()
        self.call_hook(hook, *arguments)
        self._resumed, self.last_logs = None, {}

    # --- a call ends -------------------------------------------------------------------------

    @property
    def is_left(self) -> bool:
        """Whether this is a loop that has raised: its list of callbacks is gone."""
        return self._list() is None

    def __exit__(self, *_: object) -> None:
        if self.outer is None:
            vars(self.model).pop(SESSION, None)
        else:
            vars(self.model)[SESSION] = self.outer


def running_in(owner: Any) -> FitSession | None:
    """Returns the innermost session of a model, or that of a list of callbacks that trains."""
    found: FitSession | None = vars(owner).get(SESSION)
    while found is not None and found.is_left:
        found.__exit__()
        found = found.outer
    return found


def steps_of_call(model: Any) -> int:
    """Returns the number of steps of a call of the train function; `train_on_batch` takes one."""
    running = running_in(model)
    is_one = running is not None and running.task == "train_on_batch"
    return 1 if is_one else model.steps_per_execution


def session_for_list(callbacks: Any) -> FitSession:
    """Returns the session of a list that begins to train: that of `fit`, or of a user's loop."""
    running, before = running_in(model_of(callbacks)), running_in(callbacks)
    if before is not None and before is running:  # an earlier loop with the list has raised
        before.__exit__()
    elif running is not None and running.task == "fit" and not running.callbacks:
        return running
    return FitSession(model_of(callbacks), "loop").__enter__()


def is_evaluated_together(model: Any) -> bool:
    """Returns whether all ranks are evaluating a model."""
    running = None if model is None else running_in(model)
    return running is not None and running.is_evaluation


def is_stopped(model: Any) -> bool:
    """Returns whether training is stopped, rather than only the epoch or the job."""
    stop = model.stop_training
    return bool(stop) and stop is not STOPS_EPOCH and stop is not STOPS_JOB
