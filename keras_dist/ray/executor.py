"""Horovod's `RayExecutor`: functions on ranks that stay, in actors of Ray."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from keras_dist import _engine, errors, runtime
from keras_dist.launch.interactive.outcome import Failure, Value, as_failure, as_value
from keras_dist.launch.world import WorldServer
from keras_dist.launch.world.member import Member, join_world
from keras_dist.launch.world.worker import END_SECONDS, Outcome, gather, lost

WHERE = "[keras_dist.ray.RayExecutor]"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a `RayExecutor`: seconds for all ranks to join, and for Ray to have resources."""

    timeout_s: float = 300.0
    placement_group_timeout_s: float = 100.0


class RayExecutor:
    """Runs functions on ranks in actors of Ray, with the names of `horovod.ray.RayExecutor`.

    The ranks stay between calls, and so does what `keras_dist.init` has set up. An error of a rank,
    or its death, ends the others; then call `start` again. The workers need the
    MPICH library and must reach this process.

    Args:
        settings: the result of `create_settings`. Defaults to `None`: its defaults.
        num_workers: number of ranks. Defaults to 1.
        cpus_per_worker: cores of each rank. Defaults to 1.
        use_gpu: whether each rank has GPUs. Defaults to `False`.
        gpus_per_worker: GPUs of each rank. Defaults to 1 with `use_gpu`.

    Raises:
        ArgumentError: `num_workers` is less than 1.

    Example:
    ```python
    executor = keras_dist.ray.RayExecutor(num_workers=4)
    executor.start()
    histories = executor.run(train, kwargs={"epochs": 3})
    executor.shutdown()
    ...
    ```
    """

    def __init__(
        self,
        settings: Limits | None = None,
        num_workers: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
    ):
        if num_workers < 1:
            raise errors.ArgumentError(
                WHERE, "num_workers to be 1 or more", repr(num_workers), "Pass num_workers=2."
            )
        self._settings = Limits() if settings is None else settings
        gpus = {"GPU": gpus_per_worker or 1} if use_gpu else {}
        self._bundles = [{"CPU": cpus_per_worker, **gpus}] * num_workers
        self._group: Any = None
        self._server: Any = None
        self._ranks: list[Any] = []

    @classmethod
    def create_settings(
        cls, timeout_s: float = 300, placement_group_timeout_s: float = 100
    ) -> Limits:
        """Returns settings, see `Limits`."""
        return Limits(timeout_s, placement_group_timeout_s)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the ranks, and ends those of an earlier start.

        Args:
            executable_cls: class of an object that each rank makes, for `execute`.
            executable_args: positional arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: environment variables of the ranks.

        Raises:
            LaunchError: Ray does not have the resources within `placement_group_timeout_s`, or
                its actors do not answer within `timeout_s`.
            RankError: a rank did not join, or the class raised.
        """
        self.shutdown()
        try:
            self._reserve()
            self._ranks = self._spawn(dict(extra_env_vars or {}))
            made = executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})
            self._join(made)
        except BaseException:
            self.shutdown()
            raise

    def _reserve(self) -> None:
        """Waits until Ray has reserved the resources."""
        limit = self._settings.placement_group_timeout_s
        self._group = placement_group(self._bundles)
        if not self._group.wait(limit):
            raise errors.LaunchError(
                WHERE,
                f"{len(self._bundles)} workers with {self._bundles[0]} within {limit:g} s",
                f"{ray.available_resources()} free",
                "Start fewer ranks, or more nodes.",
            )

    def _spawn(self, variables: dict[str, str]) -> list[Any]:
        """Returns an actor for each rank; those of a node are neighbours."""
        actor = ray.remote(
            num_cpus=self._bundles[0]["CPU"],
            num_gpus=self._bundles[0].get("GPU", 0),
            runtime_env={"env_vars": variables},
        )(Rank)
        places = [
            PlacementGroupSchedulingStrategy(self._group, index)
            for index in range(len(self._bundles))
        ]
        actors = [actor.options(scheduling_strategy=place).remote() for place in places]
        self._ranks = actors  # shutdown ends them after an error
        limit = self._settings.timeout_s
        try:
            nodes = ray.get([each.node.remote() for each in actors], timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise errors.LaunchError(
                WHERE,
                f"{len(actors)} actors to answer within {limit:g} s",
                str(error),
                "Look at the logs of Ray, or pass a longer timeout_s.",
            ) from error
        by_node = sorted(zip(nodes, actors, strict=True), key=lambda pair: pair[0])
        return [each for _, each in by_node]

    def _join(self, made: tuple[Any, ...]) -> None:
        size, timeout = len(self._ranks), self._settings.timeout_s
        self._server = WorldServer(size, host=ray.util.get_node_ip_address(), timeout=timeout)
        world = {"address": self._server.address, "token": self._server.token, "timeout": timeout}
        worlds = iter([{**world, "size": size, "rank": rank} for rank in range(size)])
        self._gather(lambda rank: rank.join.remote(next(worlds), made))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a function on each rank, and returns its values in the order of ranks.

        Args:
            fn: function to run.
            args: positional arguments, the same on every rank. Defaults to none.
            kwargs: keyword arguments, the same on every rank. Defaults to none.

        Raises:
            RankError: the function raised on a rank, or a rank died.
        """
        work = fn, tuple(args or ()), dict(kwargs or {})
        return self._gather(lambda rank: rank.call.remote(*work))

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Calls a function with the object of each rank; as `run` else.

        Args:
            fn: function of the object that `executable_cls` has made.
        """
        return self._gather(lambda rank: rank.execute.remote(fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls a function with the object of rank 0, and returns its value; as `execute` else.

        Args:
            fn: function of the object that `executable_cls` has made; it may call no collective.
        """
        return self._gather(lambda rank: rank.execute_single.remote(fn), 1)[0]

    def shutdown(self) -> None:
        """Ends the ranks and gives their resources back."""
        if self._server is not None:
            if self._server.failure is None:
                left = [rank.leave.remote() for rank in self._ranks]
                ray.wait(left, num_returns=len(left), timeout=END_SECONDS)
            self._server.close()
        for rank in self._ranks:
            ray.kill(rank)
        if self._group is not None:
            remove_placement_group(self._group)
        self._group, self._server, self._ranks = None, None, []

    def _gather(self, send: Callable[[Any], Any], ranks: int | None = None) -> list[Any]:
        """Sends a call to the actors of ranks, by default of all, and returns their values."""
        if not self._ranks:
            raise errors.LaunchError(
                WHERE, "a call of start before", "no ranks", "Call start first."
            )
        if self._server.failure is not None:
            raise errors.RankError(f"{WHERE} {self._server.failure} Call start again.")
        calls = [send(rank) for rank in self._ranks[:ranks]]

        def poll(seconds: float) -> list[Outcome]:
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=seconds)
            return [self._outcome(call) if call in ready else None for call in calls]

        return gather(poll, self._server)

    def _outcome(self, call: Any) -> Outcome:
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:  # the actor has died
            return lost(error, self._server)


class Rank:
    """The actor of a rank. Its calls return outcomes, so that errors keep their tracebacks."""

    def __init__(self) -> None:
        self._member: Member | None = None

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def join(self, world: Mapping[str, Any], made: tuple[Any, ...]) -> Value | Failure:
        """Joins a world and makes the object of the rank, from a class with its arguments."""
        self._rank = world["rank"]
        return self._outcome(self._join, world, *made)

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Value | Failure:
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
