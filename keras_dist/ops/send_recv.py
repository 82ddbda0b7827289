"""`send` and `recv`: point-to-point operations for models that span several ranks."""

import sys
from typing import Any

import numpy as np

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.ops.arguments import as_array


def send(value: Any, destination: int, name: str | None = None) -> Any:
    """Sends a value to another rank, which calls `recv`; blocks until the value has arrived.

    Only the two ranks take part. Shape, dtype and `name` must agree with those that the other rank
    expects.

    For a tensor of Keras' backend it returns a zero that represents what the receiver computes: use
    it as the loss of this rank, or add it to the loss. Taking the gradient of that zero receives
    the gradient from the other rank. Each rank thus takes gradients of its own loss, and all ranks
    take them in the reverse order of their calls.

    Args:
        value: number, array, tensor or Keras variable; a tensor may be symbolic or traced.
        destination: rank of the job that receives the value.
        name: operation name, for messages; different names on the two ranks are an error on both.
            Defaults to `None`.

    Returns:
        A scalar zero tensor of the dtype of `value` where `value` is a tensor or a variable, else
        `None`.

    Raises:
        ArgumentError: `destination` is not another rank of the job.
        ArgumentTypeError: `value` holds Python objects.
        MismatchError: the other rank calls another operation; raised on both.
        UsageError: a gradient of the gradient is taken.
        RankLostError: a rank has died. The operation is not retried, whatever
            `KERAS_DIST_ON_FAILURE` says.

    Example:
    ```python
    # y = w0 * x0 + w1 * x1, with one term on each rank
    w, x = keras.Variable(1.0), keras.ops.ones(4)
    if keras_dist.rank() == 0:
        loss = keras_dist.send(w * x, destination=1)
    else:
        y = keras_dist.recv(source=0, like=w * x) + w * x
        loss = keras.ops.mean(y**2)
    ```
    """
    comm, label = runtime.communicator(), name or "value"

    def forward(array: np.ndarray) -> np.ndarray:
        _engine.point_to_point.send(comm, np.asarray(array), destination, label, name)
        return np.zeros_like(array)

    def backward(array: np.ndarray) -> np.ndarray:
        return _engine.point_to_point.recv(
            comm, destination, _gradient(label), _gradient(name), (array.shape, array.dtype)
        )

    tensor = _tensor_of(value)
    if tensor is None:
        _engine.point_to_point.send(comm, as_array(value), destination, label, name)
        return None
    zeros = _backends.active().differentiable_host_callback(
        tensor, forward, backward, again=_refuse_again
    )
    return sys.modules["keras"].ops.sum(zeros)


def recv(source: int, like: Any = None, name: str | None = None) -> Any:
    """Receives a value that another rank sends by `send`; blocks until the value has arrived.

    Only the two ranks take part.

    Args:
        source: rank of the job that sends the value.
        like: array or tensor of the expected shape and dtype; its values are ignored. For a tensor
            of Keras' backend, or a Keras variable, the result is a tensor whose gradient is sent
            back to `source`; `like` must then depend on the weights to differentiate by. Defaults
            to `None`: any shape and dtype.
        name: as in `send`.

    Returns:
        The value that was sent: a tensor where `like` is a tensor or a variable, else a numpy
        array.

    Raises:
        ArgumentError: `source` is not another rank of the job.
        MismatchError: the other rank calls another operation; raised on both.
        UsageError: a gradient of the gradient is taken.
        RankLostError: a rank has died. The operation is not retried, whatever
            `KERAS_DIST_ON_FAILURE` says.
    """
    comm, label = runtime.communicator(), name or "value"

    def forward(array: np.ndarray) -> np.ndarray:
        return _engine.point_to_point.recv(comm, source, label, name, (array.shape, array.dtype))

    def backward(array: np.ndarray) -> np.ndarray:
        _engine.point_to_point.send(
            comm, np.asarray(array), source, _gradient(label), _gradient(name)
        )
        return np.zeros_like(array)

    if like is None:
        return _engine.point_to_point.recv(comm, source, label, name)
    tensor = _tensor_of(like)
    if tensor is None:
        return forward(as_array(like))
    return _backends.active().differentiable_host_callback(
        tensor, forward, backward, again=_refuse_again
    )


def _refuse_again(_: np.ndarray) -> np.ndarray:
    # The other rank need not differentiate twice: this one would wait for it.
    expected, received = "one gradient through send and recv", "the gradient of a gradient"
    remedy = "Send the gradients yourself, or keep what is differentiated twice on one rank."
    raise errors.UsageError(runtime.where(), expected, received, remedy)


def _gradient(name: str | None) -> Any:
    return name and f"gradient of {name}"


def _tensor_of(value: Any) -> Any:
    """Returns a tensor of Keras' backend, or the value of a variable; `None` for other values."""
    keras = sys.modules.get("keras")
    if keras is None:
        return None
    if isinstance(value, keras.Variable):
        return keras.ops.convert_to_tensor(value)
    return value if keras.ops.is_tensor(value) else None
