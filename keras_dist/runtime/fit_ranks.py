"""The ranks of the running fit: those of its process set, or all."""

import contextlib

from keras_dist import _engine
from keras_dist.runtime import job
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.runtime.running_calls import OfCall

_set = OfCall[ProcessSet | None](None)


def fit_within(process_set: ProcessSet | None) -> contextlib.AbstractContextManager[None]:
    """Makes a process set the ranks of the running fit; `None` leaves them as they are."""
    return _set.during(_set.own() if process_set is None else process_set)


def fit_set() -> ProcessSet | None:
    """Returns the process set of the running fit; `None`: all ranks."""
    return _set.get()


def fit_communicator() -> _engine.Communicator:
    """Returns the ranks of the running fit: those of its process set, or all; all outside of it."""
    return job.communicator(_set.get())


def fit_communicators() -> list[_engine.Communicator]:
    """Returns the communicators that this rank belongs to, of ranks of the running fit only."""
    ours = set(fit_communicator().ranks)
    return [comm for comm in job.communicators() if ours.issuperset(comm.ranks)]


def fit_rank() -> int:
    """Returns the place of this process among the ranks of the running fit."""
    return fit_communicator().rank


def fit_size() -> int:
    """Returns the number of ranks of the running fit."""
    return fit_communicator().size
