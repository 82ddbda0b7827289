"""Differentiable data movement of tensors, and the broadcast of variables."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import _engine, ops, runtime
from keras_dist._backends.tensorflow_host import differentiable
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.face import face, own_rows
from keras_dist.ops.gradient_plans import SAME_MODEL
from keras_dist.ops.reduce_op import Average
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.tensorflow.host_callback import as_tensors, collective, operation
from keras_dist.training.distributed import restart_rounds, variables_of_rank
from keras_dist.training.model_state import variable_name
from keras_dist.training.replicas import broadcast_layers


@described_by(ops.allgather)
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The gradient is this rank's rows of the gradients averaged over ranks, as in Horovod."""
    return grouped_allgather([tensor], name, process_set=process_set)[0]


@operation
@face(ops.grouped_allgather)
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The gradient is that of `allgather`."""
    given = as_tensors(tensors)

    def gather(*arrays: Any) -> Any:
        return ops.grouped_allgather(arrays, name, process_set)

    def back(*arrays: Any) -> Any:
        *gradients, lengths = arrays
        return own_rows(gradients, lengths, None, process_set)

    def forward(*tensors: Any) -> list[Any]:
        return collective(gather, tensors, [rows_like(tensor) for tensor in tensors])

    def average(*gradients: Any) -> list[Any]:
        lengths = tf.stack([tf.shape(tensor, out_type=tf.int64)[0] for tensor in given])
        shapes, dtypes = [tensor.shape for tensor in given], [tensor.dtype for tensor in gradients]
        return collective(back, [*gradients, lengths], shapes, dtypes)

    def spread(_: Any, upstream: list[Any]) -> list[Any]:
        gathered = grouped_allgather(upstream, process_set=process_set)
        return [_shared_out(tensor, process_set) for tensor in gathered]

    def backward(_: Any, upstream: list[Any]) -> list[Any]:
        return differentiable(average, spread, upstream)

    return differentiable(forward, backward, given)


@operation
@face(ops.broadcast)
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The gradient on the root is the average over ranks, on other ranks zero, as in Horovod.

    Args:
        root_rank: rank in the job that sends its tensor, also in a process set.
    """

    def send(array: Any) -> Any:
        return ops.broadcast(array, root_rank, name, process_set)

    def back(array: Any) -> Any:
        averaged = ops.allreduce(array, Average, process_set=process_set)
        return averaged if runtime.rank() == root_rank else np.zeros_like(averaged)

    def forward(given: Any) -> list[Any]:
        return collective(send, [given], [given.shape])

    def average(gradient: Any) -> list[Any]:
        return collective(back, [gradient], [gradient.shape])

    def spread(_: Any, upstream: list[Any]) -> list[Any]:
        sent = broadcast(upstream[0], root_rank, process_set=process_set)
        return [_shared_out(sent, process_set)]

    def backward(_: Any, upstream: list[Any]) -> list[Any]:
        return differentiable(average, spread, upstream)

    return differentiable(forward, backward, as_tensors([tensor]))[0]


@operation
@face(ops.alltoall)
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The gradient sends the rows back.

    Returns:
        Tensor: the rows from rank 0, then from rank 1, and so on. With `splits`, a pair: that
        tensor, and the number of rows from each rank, int32 of shape (number of ranks,).
    """
    size = runtime.communicator(process_set).size
    counts = [] if splits is None else as_tensors([splits])

    def send(array: Any, own_splits: Any = None) -> Any:
        comm = runtime.communicator(process_set)
        rows, received = _engine.collectives.alltoall(
            comm, array, own_splits, name or "value", name
        )
        return rows, received.astype(np.int32)

    def back(gradient: Any, received: Any, length: Any) -> Any:
        comm = runtime.communicator(process_set)
        rows, _ = _engine.collectives.alltoall(comm, gradient, received, "a gradient of alltoall")
        unsent = np.zeros((int(length) - len(rows), *rows.shape[1:]), rows.dtype)
        return np.concatenate([rows, unsent])

    def forward(given: Any) -> list[Any]:
        shapes = [rows_like(given), (size,)]
        return collective(send, [given, *counts], shapes, [given.dtype, tf.int32])

    given = tf.convert_to_tensor(tensor)

    def backward(results: list[Any], upstream: list[Any]) -> list[Any]:
        def send_back(gradient: Any) -> list[Any]:
            rows = [gradient, results[1], tf.shape(given)[0]]
            return collective(back, rows, [given.shape], [gradient.dtype])

        def send_again(_: Any, upstream: list[Any]) -> list[Any]:
            sent = alltoall(upstream[0], splits, process_set=process_set)
            return [sent if splits is None else sent[0]]

        return differentiable(send_back, send_again, upstream[:1])

    output, received = differentiable(forward, backward, [given])
    return output if splits is None else (output, received)


def rows_like(tensor: Any) -> tf.TensorShape:
    """Returns the shape of any number of rows of a tensor, whose rank may be unknown."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def _shared_out(tensor: Any, process_set: ProcessSet) -> Any:
    return tensor * tf.cast(1 / runtime.communicator(process_set).size, tensor.dtype)


@operation
@raises_on_all
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assigns the values of the root rank to variables of every rank.

    Collective: every rank; shapes, dtypes, `root_rank` and `name` must agree; blocks.

    Args:
        variables: list of variables of TensorFlow or Keras.
        root_rank: rank in the job that sends its values, also in a process set.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        The variables.

    Raises:
        MismatchError: the ranks differ; the message names the variable; raised on every rank.
        ArgumentError: `root_rank` is not a rank of the process set.
    """
    variables = list(variables)
    names = [variable_name(variable) for variable in variables]

    def send(*arrays: Any) -> Any:
        comm = runtime.communicator(process_set)
        what = "the broadcast of variables"
        return _engine.collectives.broadcast(comm, arrays, names, root_rank, what, name, SAME_MODEL)

    given = as_tensors(variables)
    received = collective(send, given, [tensor.shape for tensor in given])
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)
    return variables


@described_by(broadcast_)
def broadcast_variables(
    variables: Sequence[Any] | keras.Model,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """A Keras model in place of the list stands for its variables and the state of its layers.

    That is what layers compute with besides their variables, such as a vocabulary and the constants
    of `Normalization`. With a list of variables it stays as it is; `keras_dist.verify_replicas`
    finds a difference. A model can be passed outside of a `tf.function` only.

    `model.variables`, unlike `model.weights`, includes the states of random generators.

    After their broadcast, dropout layers drop the same units on all ranks.

    Variables in which a `DistributedOptimizer` accumulates the gradients of several passes, and
    slices of sharded state, keep their values, although `optimizer.variables` includes them: they
    differ between ranks.

    Returns:
        `None`.

    Example:
    ```python
    import keras_dist.tensorflow as hvd

    hvd.broadcast_variables(model, root_rank=0)
    ```
    """
    if isinstance(variables, keras.Model):
        with broadcast_layers(runtime.communicator(process_set), variables, root_rank):
            broadcast_variables(variables.variables, root_rank, process_set)
        return
    local = {
        id(tracked) for variable in variables_of_rank() for tracked in (variable, variable.value)
    }
    shared = [variable for variable in variables if id(variable) not in local]
    broadcast_(shared, root_rank, process_set=process_set)
    restart_rounds(shared)
