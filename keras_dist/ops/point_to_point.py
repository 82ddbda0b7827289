"""`send` and `recv`: from one rank to another, for models whose parts lie on several.

Knows tensors by the backend's `through_host` alone; how two ranks meet is the engine's.
"""

import sys
from typing import Any

import numpy as np

from keras_dist import _backends, _engine, runtime
from keras_dist.ops.values import as_array

__all__ = ["recv", "send"]


def send(value: Any, destination: int, name: str | None = None) -> Any:
    """Sends a value to another rank, which calls `recv`; blocks until it has come.

    Of a tensor of Keras' backend it gives back a zero that stands for what becomes of it: the
    loss of this rank, if it has no other, or a part of it. Taking the gradient of that zero
    receives the gradient from the other rank. So each rank takes gradients of what it has, and
    all take them in the reverse order of their calls.

    Two ranks take part, and no other. Shape, dtype and `name` must agree with what the other
    expects.

    Args:
        value: number, array, tensor or Keras variable; a tensor may be one of a graph, or traced.
        destination: the rank that receives it, by its number in the job.
        name: a name for messages; where the two pass different names both get an error. Defaults
            to `None`.

    Returns:
        A zero of the dtype of `value`, a tensor without dimensions, where that is a tensor or a
        variable; else `None`.

    Raises:
        ArgumentError: there is no other rank of that number.
        ArgumentTypeError: `value` holds Python objects.
        MismatchError: the other rank does something else; raised on both.
        RankLostError: a rank has died. Ranks do not go on without it, whatever
            `KERAS_DIST_ON_FAILURE` says.

    Example:
    ```python
    # y = w0 * x0 + w1 * x1, of which each rank has a term
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
        _engine.send(comm, np.asarray(array), destination, label, name)
        return np.zeros_like(array)

    def backward(array: np.ndarray) -> np.ndarray:
        return _engine.recv(
            comm, destination, _gradient(label), _gradient(name), (array.shape, array.dtype)
        )

    tensor = _tensor_of(value)
    if tensor is None:
        _engine.send(comm, as_array(value), destination, label, name)
        return None
    zeros = _backends.active().through_host(tensor, forward, backward)
    return sys.modules["keras"].ops.sum(zeros)


def recv(source: int, like: Any = None, name: str | None = None) -> Any:
    """Receives what another rank sends by `send`; blocks until it has come.

    Two ranks take part, and no other.

    Args:
        source: the rank that sends it, by its number in the job.
        like: an array or tensor of the shape and dtype that are expected; its values do not
            count. Where it is a tensor of Keras' backend, or a Keras variable, the result is a
            tensor, and taking a gradient through that sends the gradient back. For this `like`
            must depend on what gradients are taken for, such as weights. Defaults to `None`: any
            shape and dtype.
        name: as for `send`.

    Returns:
        What was sent: a tensor where `like` is one or a variable, else a numpy array.

    Raises:
        ArgumentError: there is no other rank of that number.
        MismatchError: the other rank does something else; raised on both.
        RankLostError: a rank has died. Ranks do not go on without it, whatever
            `KERAS_DIST_ON_FAILURE` says.
    """
    comm, label = runtime.communicator(), name or "value"

    def forward(array: np.ndarray) -> np.ndarray:
        return _engine.recv(comm, source, label, name, (array.shape, array.dtype))

    def backward(array: np.ndarray) -> np.ndarray:
        _engine.send(comm, np.asarray(array), source, _gradient(label), _gradient(name))
        return np.zeros_like(array)

    if like is None:
        return _engine.recv(comm, source, label, name)
    tensor = _tensor_of(like)
    if tensor is None:
        return forward(as_array(like))
    return _backends.active().through_host(tensor, forward, backward)


def _gradient(name: str | None) -> Any:
    return name and f"gradient of {name}"


def _tensor_of(value: Any) -> Any:
    """Returns a tensor of Keras' backend, or what a variable holds; without Keras there is none."""
    keras = sys.modules.get("keras")
    if keras is None:
        return None
    if isinstance(value, keras.Variable):
        return keras.ops.convert_to_tensor(value)
    return value if keras.ops.is_tensor(value) else None
