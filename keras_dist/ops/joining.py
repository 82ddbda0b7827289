"""join: for loops of one's own whose data ends earlier on some ranks than on others."""

from keras_dist import _engine, runtime

__all__ = ["join"]


def join() -> int:
    """Takes part in the reductions that other ranks still call, until all ranks have joined.

    A rank calls it when it is out of data. `allreduce`, `grouped_allreduce` and
    `sparse_allreduce` of the others, and the gradients of a `DistributedOptimizer`, go on
    meanwhile, on process sets as well: this rank brings nothing, and an average is that over the
    ranks which still bring something. (In Horovod an average still divides by the number of all
    ranks.) `Adasum` and all other collectives are an error on every rank.

    The rank does not take the steps that others take meanwhile: broadcast weights and optimizer
    state afterwards, from the rank that is returned. `fit` with `keras_dist.callbacks()` does all
    that by itself.

    Collective: every rank; blocks.

    Returns:
        The last rank to join; of those that joined behind the same operation, the highest. Equal
        on all ranks.

    Raises:
        MismatchError: other ranks call what has no meaning without this one; raised on every
            rank. Where there are process sets, they cannot be used afterwards.

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
    absence = _engine.stand_in(runtime.communicators())[comm]
    return comm.size - 1 if absence is None else absence.here[-1]
