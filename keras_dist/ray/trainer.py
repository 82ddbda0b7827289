"""A trainer of Ray Train whose workers are ranks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from keras_dist import _engine, runtime
from keras_dist.launch.world import WorldServer, join_world

_world: dict[str, Any] = {}  # in a worker: the arguments of `join_world`


class KerasTrainer(DataParallelTrainer):
    """Trains with a function on the workers of Ray Train, each of which is a rank.

    As with `keras_dist.run`, call `keras_dist.init()`, build the model and read the data inside the
    function. `ray.train.report` and the other functions of Ray Train work there as well; their
    ranks are those of keras_dist. An error of a rank, or its death, ends the others, and
    `FailureConfig` decides whether Ray starts the workers again. The workers need the MPICH
    library and must reach the node of this process. Needs Ray Train v2, the default of Ray 2.51.

    Args:
        train_loop_per_worker: function to run, without arguments or with `train_loop_config`.
        keras_config: how the workers become ranks. Defaults to `KerasConfig()`.
        **options: `train_loop_config`, `scaling_config`, `run_config`, `datasets` and others, as
            for `ray.train.torch.TorchTrainer`.

    Example:
    ```python
    trainer = keras_dist.ray.KerasTrainer(
        train, scaling_config=ray.train.ScalingConfig(num_workers=4)
    )
    result = trainer.fit()
    ...
    ```
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        keras_config: "KerasConfig | None" = None,
        **options: Any,
    ):
        config = KerasConfig() if keras_config is None else keras_config
        super().__init__(train_loop_per_worker, backend_config=config, **options)


@dataclasses.dataclass
class KerasConfig(BackendConfig):
    """How the workers of Ray Train become ranks.

    Args:
        timeout: seconds within which all workers must join. Defaults to 300.
    """

    timeout: float = 300.0

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that starts and ends the world of the workers."""
        return _KerasBackend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """What surrounds the function on each worker."""
        return _as_rank


class _KerasBackend(Backend):
    """Serves the world of the workers, in the controller of Ray Train, which is not a rank."""

    _server: WorldServer | None = None

    def on_start(self, worker_group: Any, backend_config: KerasConfig) -> None:
        host, timeout = ray.util.get_node_ip_address(), backend_config.timeout
        self._server = WorldServer(len(worker_group), host=host, timeout=timeout)
        world = {"address": self._server.address, "token": self._server.token, "timeout": timeout}
        worker_group.execute(_remember, world)

    def on_shutdown(self, worker_group: Any, backend_config: KerasConfig) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _remember(world: dict[str, Any]) -> None:
    _world.update(world)


@contextlib.contextmanager
def _as_rank() -> Iterator[None]:
    """Makes this worker a rank; in Ray's local mode there are no workers."""
    context = ray.train.get_context()
    if not _world and context.get_world_size() == 1:
        yield
        return
    member = join_world(rank=context.get_world_rank(), size=context.get_world_size(), **_world)
    try:
        yield
        if runtime.is_initialized():  # finds ranks that still call collectives
            _engine.collectives.wait_for_end(runtime.communicators())
        runtime.shutdown()
        member.leave()
    except BaseException as error:
        member.fail_with(error)
        raise
