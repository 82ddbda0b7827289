"""The rendezvous that starts every collective: all ranks meet and agree on the operation."""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from keras_dist import errors
from keras_dist._engine.collectives import piggyback
from keras_dist._engine.collectives.differences import RepeatRendezvous, resolve_difference
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.peers import Payload
from keras_dist._engine.recovery import retried
from keras_dist._engine.shm.wait import note
from keras_dist._engine.signature import CollectiveSignature, entries_of_arrays
from keras_dist._engine.tracing import spans

PAYLOAD_ALONE = b"payload follows."  # 16 bytes, as a digest
SLICES = "every rank to reduce its slice of a bucket"

Operation = TypeVar("Operation", bound=Callable[..., Any])


class _OfThread(threading.local):
    """How often the thread has started a rendezvous."""

    count = 0


_of_thread = _OfThread()


def rendezvous(
    comm: Communicator,
    call: CollectiveSignature,
    notices: bool = False,
    payload: Payload | None = None,
    publish: Callable[[], None] | None = None,
) -> None:
    """Waits for all ranks and checks that they call the same operation. Collective; blocks.

    If some ranks have joined and the others agree, `comm.faults.joined` is set, and the operation
    runs without the ranks that have joined. `publish` makes the contribution of this rank visible.
    """
    if comm.size == 1:
        if publish is not None:
            publish()
        return
    _of_thread.count += 1
    note(comm.ranks, call)
    # Published again each time: ranks that ran another operation meanwhile have published that to
    # the same memory.
    while True:
        if publish is not None:
            publish()
        with contextlib.suppress(RepeatRendezvous):
            _rendezvous(comm, call, notices, payload)
            return


def _rendezvous(
    comm: Communicator, call: CollectiveSignature, notices: bool, payload: Payload | None
) -> None:
    if notices and piggyback.notice() is not None and comm.job is comm:
        call = dataclasses.replace(call, notice=piggyback.notice())
    if comm.order.refused:
        call = dataclasses.replace(call, refused=tuple(sorted(comm.order.refused)))
    launched = 0 if comm.nccl is None else comm.nccl.launched
    if launched != call.launched:
        call = dataclasses.replace(call, launched=launched, ahead=False)
    with spans.rendezvous(call, comm.digests.count + 1):
        same = comm.digests.compare(call.digest, payload)
    if not same:
        resolve_difference(comm, _with_failure(comm, call, payload))
    if comm.nccl is not None:
        comm.nccl.agree()
    if same:
        for name in call.refused:  # the same on all ranks
            comm.order.forget_refused(name)


def repeated_rendezvous(
    comm: Communicator, call: CollectiveSignature
) -> Callable[[Payload | None], bool]:
    """Returns a short form of `rendezvous` for a call that is repeated.

    The caller holds the lock, brings no notice and has refused no name. The function takes the
    payload, and returns whether all ranks brought the same digest; otherwise they have agreed to
    continue, as after `rendezvous`. If it raises `RepeatRendezvous`, the caller publishes and
    repeats.
    """
    ranks, digests, digest = comm.ranks, comm.digests, call.digest
    on_node = digests.on_node

    def again(payload: Payload | None) -> bool:
        _of_thread.count += 1
        note(ranks, call)
        if on_node is None:
            same = digests.compare(digest, payload)
        else:
            digests.count += 1
            same = on_node(digest)
        if not same:
            resolve_difference(comm, _with_failure(comm, call, payload))
        return same

    return again


def rendezvous_for_payload(comm: Communicator, call: CollectiveSignature, payload: Payload) -> None:
    """Lets a payload travel after a rendezvous where ranks differed, but go on. Collective."""
    if not comm.digests.compare(PAYLOAD_ALONE, payload):
        resolve_difference(comm, _with_failure(comm, call, payload))


def rank_error(comm: Communicator, expected: str, received: str) -> errors.RankError:
    """Returns the error of a rank that others waited for."""
    remedy = "See the traceback of the rank that failed."
    return errors.RankError(errors.explain(comm.where(), expected, received, remedy))


def _with_failure(
    comm: Communicator, call: CollectiveSignature, payload: Payload | None
) -> CollectiveSignature:
    """Returns what this rank brings after digests differed: also its error, if it has failed."""
    if payload is None or payload.failure is None:
        return call
    failure, payload.failure = payload.failure, None
    error = rank_error(comm, SLICES, repr(failure))
    error.__cause__ = failure
    return dataclasses.replace(call, error=error)


def rendezvous_count() -> int:
    """Returns how often the calling thread has started a rendezvous."""
    return _of_thread.count


def by_name(operation: Operation) -> Operation:
    """Makes ranks match an operation by its argument `key`, or by that of its `options`."""
    key_among = key_of(operation)

    @functools.wraps(operation)
    def run(comm: Communicator, *args: Any, **kwargs: Any) -> Any:
        key = key_among(*args, **kwargs)
        if comm.size == 1:
            return operation(comm, *args, **kwargs)
        return comm.order.run_by_name(functools.partial(operation, comm, *args, **kwargs), key)

    return cast(Operation, run)


def key_of(operation: Callable[..., Any]) -> Callable[..., str | None]:
    """Returns a function that finds the user's name among the arguments of an operation."""
    parameters = list(inspect.signature(operation).parameters)
    holder = "options" if "options" in parameters else "key"
    index = parameters.index(holder) - 1

    def find(*args: Any, **kwargs: Any) -> str | None:
        found = args[index] if len(args) > index else kwargs.get(holder)
        return found.key if found is not None and holder == "options" else found

    return find


class raise_on_all:  # a class, since a generator takes three times as long
    """Context manager that raises an error in the arguments of this rank on every rank.

    Wraps the checks before a rendezvous. A rank whose check fails comes to the rendezvous to report
    the error; otherwise the others would wait for it, and be one operation behind.
    """

    __slots__ = ("_comm", "_key", "_operation")

    def __init__(self, comm: Communicator, operation: str, key: str | None = None):
        self._comm, self._operation, self._key = comm, operation, key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, *trace: Any) -> None:
        if isinstance(error, Exception):  # reading a user's value may raise anything
            known = isinstance(error, errors.KerasDistError)
            reported = error if known else _unreadable(self._comm, self._operation, error)
            call = CollectiveSignature(self._operation, key=self._key, error=reported)
            _report(self._comm, call, self._key)


def report_error(
    comm: Communicator, operation: str, error: Exception, key: str | None = None
) -> None:
    """Raises an error in the arguments of this rank on every other rank; see `raise_on_all`."""
    with contextlib.suppress(errors.KerasDistError), raise_on_all(comm, operation, key):
        raise error


@by_name
@retried
def _report(comm: Communicator, call: CollectiveSignature, key: str | None) -> None:
    with comm.lock:
        rendezvous(comm, call)


def _unreadable(comm: Communicator, operation: str, error: Exception) -> errors.ArgumentError:
    expected = f"arguments of {operation} that can be read"
    remedy = "See the traceback of that rank; copy tensors of a GPU to the host first."
    received = f"{type(error).__name__}: {error}"
    return errors.ArgumentError(comm.where(), expected, received, remedy)


@by_name
@retried
def barrier(
    comm: Communicator,
    key: str | None = None,
    operation: str = "barrier",
    arrays: Sequence[Any] = (),
    names: Sequence[str] = (),
    remedy: str = CollectiveSignature.remedy,
) -> None:
    """Waits for all ranks, whose `arrays` must agree in shapes and dtypes. Collective; blocks."""
    entries = entries_of_arrays(names, arrays)
    with comm.lock:
        rendezvous(comm, CollectiveSignature(operation, entries, key=key, remedy=remedy))


def exchange_or_raise(comm: Communicator, found: Any) -> list[Any]:
    """Returns the objects of all ranks, or raises the error of one on all. Collective; blocks."""
    objects = comm.allgather_objects(found)
    for each in objects:
        if isinstance(each, errors.KerasDistError):
            raise each
    return objects
