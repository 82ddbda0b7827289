"""Python objects that go from rank to rank, pickled."""

from typing import Any

from keras_dist import _engine, runtime
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet

__all__ = [
    "allgather_object",
    "broadcast_object",
]


@raises_on_all
def broadcast_object(
    value: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Returns the root's Python object on every rank. It travels pickled.

    Collective: every rank; `root_rank` and `name` must agree; blocks.

    Args:
        value: any object that can be pickled; only the root's counts.
        root_rank: the rank whose object all receive, by its number in the job, also in a
            process set. Defaults to 0.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not one of the ranks, or its object cannot be pickled; raised
            on every rank.
    """
    return _engine.broadcast_object(runtime.communicator(process_set), value, root_rank, name)


@raises_on_all
def allgather_object(
    value: Any,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Returns the Python objects of all ranks, in rank order. They travel pickled.

    Collective: every rank; `name` must agree; blocks.

    Args:
        value: any object that can be pickled.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: the object of a rank cannot be pickled; raised on every rank.
    """
    return _engine.allgather_object(runtime.communicator(process_set), value, name)
