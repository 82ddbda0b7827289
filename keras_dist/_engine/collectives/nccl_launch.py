"""The launch of operations by NCCL: on all ranks or on none, see decision 63."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

from keras_dist import errors
from keras_dist._engine.collectives.rendezvous import rendezvous, report_error
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.gradient_sets import GradientSet
from keras_dist._engine.nccl.path import NCCL
from keras_dist._engine.nccl.ranks import FailedElsewhere, NcclRanks, abandon, nccl_of
from keras_dist._engine.signature import CollectiveSignature
from keras_dist._engine.tracing import spans

R = TypeVar("R")


def launch_on_all(
    comm: Communicator, call: CollectiveSignature, work: Callable[[NcclRanks], R], ends: bool = True
) -> R:
    """Launches an operation by NCCL, after its rendezvous. Collective: every rank; blocks."""
    success = _success(call.operation, call.gradients, call.bucket) if ends else None
    return _launch(comm, call, work, success)


def is_known(comm: Communicator, call: CollectiveSignature) -> bool:
    """Returns whether `launch_known` takes an operation; the same on all ranks that call it."""
    ranks, faults = comm.nccl, comm.faults
    alone = call.key is None and faults.retry is None and faults.joined is None
    return alone and ranks is not None and not ranks.launched and call.digest in ranks.known


def launch_known(
    comm: Communicator,
    call: CollectiveSignature,
    work: Callable[[NcclRanks], R],
    notices: bool = False,
) -> R | None:
    """Launches an operation like an earlier one, and then meets: once, instead of twice.

    Collective: every rank; blocks. Returns `None` if it was abandoned, and the ranks have agreed on
    the operation as by `rendezvous`.
    """
    # The ranks find a difference before any of them uses a result. Then they abandon what they have
    # launched, and meet before every launch from then on.
    ranks = comm.nccl
    result = _launch(comm, call, work, call.launched_ahead, notices)
    return result if comm.nccl is ranks else None


def _launch(
    comm: Communicator,
    call: CollectiveSignature,
    work: Callable[[NcclRanks], R],
    success: CollectiveSignature | None,
    notices: bool = False,
) -> R:
    """Launches an operation, and brings success or an error to the rendezvous that follows."""
    ranks = nccl_of(comm)
    ranks.launched += 1

    def explain(failure: Exception) -> errors.RankError:
        return _rank_error(comm, f"launch {call}", failure)

    error: errors.RankError | None = None
    cause: Exception | None = None
    try:
        with spans.phase("launch"):
            ranks.connect(explain)
            result = work(ranks)
    except errors.RankLostError:
        raise
    except FailedElsewhere as told:
        error = told.error
    except Exception as failure:
        error, cause = explain(failure), failure
        ranks.tell(error)
    if success is None:
        if error is None:
            return result
        success = _success(call.operation, call.gradients, call.bucket)
    try:
        brought = success if error is None else dataclasses.replace(success, error=error)
        rendezvous(comm, brought, notices)
    except errors.RankError as failure:  # all ranks raise the same
        raise failure from cause
    if error is not None:  # all ranks bring the same error
        abandon(comm, error)
        raise error from cause
    if comm.meets_once:
        ranks.known.add(call.digest)
    return result


def tell_all(
    comm: Communicator, operation: str, work: Callable[[], R], key: str | None = None
) -> R:
    """Runs what prepares an operation, before its rendezvous."""
    try:
        return work()
    except Exception as failure:
        error = _rank_error(comm, f"prepare {operation}", failure)
        report_error(comm, operation, error, key)
        raise error from failure


@functools.lru_cache(64)
def _success(
    operation: str, gradients: GradientSet | None, bucket: int | None
) -> CollectiveSignature:
    # A rank that has found other gradients meanwhile meets this one here.
    what = f"launch of {operation}"
    return CollectiveSignature(what, library=NCCL, gradients=gradients, bucket=bucket)


def _rank_error(comm: Communicator, what: str, failure: Exception) -> errors.RankError:
    expected, received = f"every rank to {what}", f"{type(failure).__name__}: {failure}"
    remedy = "See the traceback of that rank. KERAS_DIST_GPU=host reduces on the host."
    return errors.RankError(errors.explain(comm.where(), expected, received, remedy), comm.job.rank)
