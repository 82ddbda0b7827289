"""Runs a function on ranks in the executors of Spark, as `horovod.spark.run`.

```python
losses = keras_dist.spark.run(train, kwargs={"epochs": 3}, num_proc=4)
...
```
"""

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pyspark
import pyspark.errors
import pyspark.sql

from keras_dist import errors
from keras_dist.launch.interactive.outcome import pickled
from keras_dist.launch.world import WorldServer
from keras_dist.launch.world.worker import Outcome, gather, lost, run_rank

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs a function on ranks in the executors of the current Spark session.

    The ranks are the tasks of one barrier stage. Each is a child process of the Python worker of
    its task, and prints where the executor prints. As with `keras_dist.run`, call
    `keras_dist.init()`, build the model and read the data inside the function. The executors need
    the MPICH library and must reach the driver.

    Args:
        fn: function to run.
        args: positional arguments, the same on every rank. Defaults to none.
        kwargs: keyword arguments, the same on every rank. Defaults to none.
        num_proc: number of ranks. Defaults to `spark.default.parallelism`.
        start_timeout: seconds within which all ranks must start, for example on a busy cluster.
            Defaults to 300.
        env: environment variables for the ranks. Defaults to none.

    Returns:
        List with the value of each rank, in the order of ranks.

    Raises:
        RankError: the function raised on a rank, a rank or its executor died, or Spark did not
            start all ranks within `start_timeout`.
        LaunchError: there is no Spark session.
    """
    context = _context()
    size = num_proc or context.defaultParallelism
    settings = context.getConf()
    host = settings.get("spark.driver.host", "127.0.0.1")
    # In a container, for example, this host has no interface with the name that executors use.
    own = settings.get("spark.driver.bindAddress", host)
    work = pickled((fn, tuple(args), dict(kwargs or {})))
    group = f"keras_dist-{secrets.token_hex(4)}"
    with WorldServer(size, host=own, timeout=start_timeout) as server:
        address = f"{host}:{server.address.rpartition(':')[2]}"
        world = {"address": address, "size": size, "token": server.token}
        task = functools.partial(_task, work, {**world, "timeout": start_timeout}, dict(env or {}))
        job = _submit(context, group, task, size)
        try:
            return gather(functools.partial(_poll, job, size, server), server)
        finally:
            if not job.done():
                context.cancelJobGroup(group)


def _context() -> pyspark.SparkContext:
    try:  # that of another thread as well
        return pyspark.sql.SparkSession.active().sparkContext
    except pyspark.errors.PySparkRuntimeError as error:
        raise errors.LaunchError(
            "[keras_dist.spark.run]",
            "a Spark session",
            "none",
            "Make one with pyspark.sql.SparkSession.builder.getOrCreate().",
        ) from error


def _submit(
    context: pyspark.SparkContext, group: str, task: Callable[..., Any], size: int
) -> "Future[list[Outcome]]":
    """Starts the barrier stage."""
    job: Future[list[Outcome]] = Future()

    def collect() -> None:
        context.setJobGroup(group, "keras_dist", interruptOnCancel=True)
        try:
            ranks = context.parallelize(range(size), size).barrier()
            job.set_result(ranks.mapPartitions(task).collect())
        except Exception as error:  # Java's, by py4j
            job.set_exception(error)

    # A daemon: Spark may try to start a stage that is too large for minutes.
    pyspark.InheritableThread(target=collect, daemon=True).start()
    return job


def _task(
    work: bytes, world: Mapping[str, Any], env: Mapping[str, str], partition: Iterator[int]
) -> Iterator[Any]:
    """Runs a rank in the task of a partition."""
    for rank in partition:
        yield run_rank(work, {**world, "rank": rank}, env)


def _poll(
    job: "Future[list[Outcome]]", size: int, server: WorldServer, seconds: float
) -> list[Outcome]:
    """Returns the outcome of each rank; Spark tells of all at once."""
    with contextlib.suppress(TimeoutError):
        error = job.exception(seconds)
        return job.result() if error is None else [lost(error, server)] * size
    return [None] * size
