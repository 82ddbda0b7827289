"""`join`: uneven inputs in custom training loops."""

from keras_dist import _engine, runtime


def join() -> int:
    """Takes part in the reductions of the other ranks until all ranks have joined.

    Collective: every rank; blocks.

    A rank calls it when it has run out of data. Meanwhile `allreduce`, `grouped_allreduce` and
    `sparse_allreduce` of the other ranks, and the gradients of a `DistributedOptimizer`, continue,
    on process sets as well: a joined rank contributes nothing, and an average is that over the
    ranks that have not joined. (In Horovod an average still divides by the number of all ranks.)
    `Adasum` and all other collectives are an error on every rank.

    A joined rank does not take the steps of the other ranks: broadcast weights and optimizer
    state afterwards, from the rank that is returned. `fit` with `keras_dist.callbacks()` does this
    automatically.

    Returns:
        The last rank to join, equal on all ranks; the highest of those that joined after the same
        operation.

    Raises:
        MismatchError: other ranks call an operation that has no meaning without this rank; raised
            on every rank. Process sets that exist cannot be used afterwards.

    Example:
    ```python
    for batch in batches:  # more on some ranks than on others
        train_step(batch)
    last = keras_dist.join()
    for variable in model.variables + optimizer.variables:
        variable.assign(keras_dist.broadcast(variable, last))
    ```
    """
    comm = runtime.communicator()
    absence = _engine.collectives.join_all(runtime.communicators())[comm]
    return comm.size - 1 if absence is None else absence.here[-1]
