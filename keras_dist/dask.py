"""Runs a function on ranks in the workers of a Dask cluster.

```python
with distributed.Client(cluster) as client:
    histories = keras_dist.dask.run(train, kwargs={"epochs": 3}, client=client)
    ...
```
"""

import contextlib
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import distributed

from keras_dist import errors
from keras_dist.launch.interactive.outcome import pickled
from keras_dist.launch.world import WorldServer
from keras_dist.launch.world.worker import Outcome, gather, lost, run_rank

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    client: distributed.Client | None = None,
    workers: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Runs a function on ranks in the workers of a Dask cluster; returns its value on each rank.

    Each rank is a child process of a worker, one for each worker, and prints where the worker
    prints. The ranks of a host are neighbours. As with `keras_dist.run`, call `keras_dist.init()`,
    build the model and read the data inside the function. The workers need the MPICH library and
    must reach this process; threads of a worker beyond the first one stay free for other tasks.

    Args:
        fn: function to run.
        args: positional arguments, the same on every rank. Defaults to none.
        kwargs: keyword arguments, the same on every rank. Defaults to none.
        np: number of ranks. Defaults to all workers.
        client: client of the cluster. Defaults to the current one.
        workers: addresses of the workers to use. Defaults to the first `np` by address.
        env: environment variables for the ranks. Defaults to none.
        timeout: seconds within which all ranks must start, for example on a busy cluster. Defaults
            to 300.

    Returns:
        List with the value of each rank, in the order of ranks.

    Raises:
        RankError: the function raised on a rank, or a rank or its worker died or did not start.
        ArgumentError: there are fewer workers than `np`.
    """
    client = distributed.default_client() if client is None else client
    chosen = _workers(client, workers, np)
    work = pickled((fn, tuple(args), dict(kwargs or {})))
    name = secrets.token_hex(4)
    host = distributed.utils.get_ip(_host(client.scheduler.address))
    with WorldServer(len(chosen), host=host, timeout=timeout) as server:
        world = {"address": server.address, "size": len(chosen), "token": server.token}
        futures = [
            client.submit(
                run_rank,
                work,
                {**world, "rank": rank, "timeout": timeout},
                dict(env or {}),
                workers=[worker],
                pure=False,
                key=f"keras_dist-{name}-rank-{rank}",
            )
            for rank, worker in enumerate(chosen)
        ]
        try:
            return gather(functools.partial(_poll, futures, server), server)
        finally:
            client.cancel(futures)


def _poll(futures: list[distributed.Future], server: WorldServer, seconds: float) -> list[Outcome]:
    """Returns the outcome of each rank, after a wait for all."""
    with contextlib.suppress(TimeoutError):
        distributed.wait(futures, timeout=seconds)
    return [
        future.result()
        if future.status == "finished"
        else lost(future.exception(), server)
        if future.status == "error"
        else None
        for future in futures
    ]


def _workers(
    client: distributed.Client, workers: Sequence[str] | None, np: int | None
) -> list[str]:
    known = client.scheduler_info(n_workers=-1)["workers"]
    found = sorted(
        known if workers is None else workers, key=lambda address: (_host(address), address)
    )
    if (np is not None and len(found) < np) or not found:
        raise errors.ArgumentError(
            "[keras_dist.dask.run]",
            f"{np or 1} workers or more",
            f"{len(found)}",
            "Start more workers, wait for them with client.wait_for_workers, or lower np.",
        )
    return found if np is None else found[:np]


def _host(address: str) -> str:
    return distributed.comm.get_address_host(address)
