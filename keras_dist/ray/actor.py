"""A rank in an actor of Ray, which stays between calls."""

from collections.abc import Callable, Mapping
from typing import Any

import ray

from keras_dist import _engine, runtime
from keras_dist.launch.interactive.outcome import Failure, Value, as_failure, as_value
from keras_dist.launch.world.member import Member, join_world


class Rank:
    """The actor of a rank. Its calls return outcomes, so that errors keep their tracebacks."""

    def __init__(self) -> None:
        self._member: Member | None = None

    def node(self) -> str:
        """Returns the id of the node."""
        return ray.get_runtime_context().get_node_id()

    def join(self, world: Mapping[str, Any], made: tuple[Any, ...]) -> Value | Failure:
        """Joins a world and makes the object of the rank, from a class with its arguments."""
        self._rank = world["rank"]
        return self._outcome(self._join, world, *made)

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Value | Failure:
        """Calls a function on all ranks."""
        return self._outcome(self._to_the_end, fn, *args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Value | Failure:
        """Calls a function with the object of the rank, on all ranks."""
        return self._outcome(self._to_the_end, fn, self._object)

    def execute_single(self, fn: Callable[[Any], Any]) -> Value | Failure:
        """Calls a function with the object of the rank, on this rank only."""
        return self._outcome(fn, self._object)

    def leave(self) -> None:
        """Leaves the world."""
        runtime.shutdown()
        if self._member is not None:
            self._member.leave()

    def _outcome(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Value | Failure:
        try:
            return as_value(fn(*args, **kwargs), self._rank)
        except BaseException as error:
            if self._member is not None:
                self._member.fail_with(error)
            return as_failure(error)

    def _join(self, world: Any, cls: Any, args: Any, kwargs: Any) -> None:
        self._member = join_world(**world)
        self._object = None if cls is None else cls(*args, **kwargs)

    def _to_the_end(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        if runtime.is_initialized():  # finds ranks that still call collectives
            _engine.collectives.barrier(runtime.communicator(), operation="end of the function")
        return value
