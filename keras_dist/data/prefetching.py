"""Prefetching: batches are made and moved to the device during the step before."""

import collections
import concurrent.futures
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import errors
from keras_dist.data import epochs
from keras_dist.data.array_dataset import Passes
from keras_dist.data.nested import mapped
from keras_dist.data.shard_options import wrong_kind

# A function for each batch to make, and its future; `None` ends the thread.
Wanted = queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future] | None]


def prefetch(data: Any, count: int = 2) -> Any:
    """Makes batches, and moves them to the device, ahead of their use.

    On TensorFlow it is `tf.data.experimental.prefetch_to_device` with a GPU, otherwise
    `Dataset.prefetch`. On JAX a thread makes batches and puts them on the device; on torch it
    copies them from pinned memory, with a GPU.

    Args:
        data: a result of a function of `keras_dist.data`, any `tf.data.Dataset`, or a
            `keras.utils.PyDataset`, whose batches keep their order even if `fit` would shuffle
            them.
        count: number of batches to keep on the device, at least 1. Defaults to 2.

    Returns:
        Data set of the same kind.

    Raises:
        ArgumentTypeError: `data` is of another type.
        ArgumentError: `count` is less than 1.

    Example:
    ```python
    train = keras_dist.data.prefetch(keras_dist.data.npz("train/*.npz", x="images", y="labels"))
    ```
    """
    if not isinstance(count, int) or count < 1:
        raise errors.ArgumentError("count to be at least 1", repr(count), "Leave it out.")
    if isinstance(data, keras.utils.PyDataset):
        made: Any = Prefetched(data, count)
    elif hasattr(data, "element_spec"):
        made = _tf_prefetched(data, count)
    else:
        raise wrong_kind("a tf.data.Dataset or a keras.utils.PyDataset", data)
    if epochs.is_sharded(data):
        epochs.register(made, epochs.of(data))
    return made


class Prefetched(Passes):
    """A data set that makes batches of another one ahead, within each epoch."""

    def __init__(self, data: keras.utils.PyDataset, count: int):
        super().__init__()
        self._data, self._count = data, count
        self._thread: threading.Thread | None = None
        self._waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        self._begun = 0

    def __len__(self) -> int:
        return self._data.num_batches

    def __getitem__(self, index: int) -> Any:
        # Keras reads batches outside of epochs, for their shapes; a loop may have been left early.
        if self._thread is None or epochs.awaits_steps(self):
            return self._data[index]
        while len(self._waiting) <= self._count and self._begun < len(self):
            self._waiting.append(concurrent.futures.Future())
            self._wanted.put((functools.partial(self._make, self._begun), self._waiting[-1]))
            self._begun += 1
        return self._waiting.popleft().result()

    def _make(self, step: int) -> Any:
        batch = mapped(self._move, self._data[step])
        # Keras takes a single array only of numpy.
        return batch if isinstance(batch, tuple | dict) else (batch,)

    def _begin(self) -> None:
        self._clear()  # batches of an epoch that was abandoned
        if epochs.awaits_steps(self):  # an epoch of Keras' own, for the shapes
            return
        self._data.on_epoch_begin()
        self._begun = 0
        self._move = _copy_function()
        self._wanted: Wanted = queue.SimpleQueue()
        weakref.finalize(self, self._wanted.put, None)  # an epoch that was abandoned
        # Not a pool: the interpreter would join its threads at exit, and a read may hang.
        self._thread = threading.Thread(
            target=_work, args=[self._wanted], name="keras_dist prefetch", daemon=True
        )
        self._thread.start()

    def _end(self, advances: bool) -> None:
        self._clear()
        if advances:
            self._data.on_epoch_end()

    def _clear(self) -> None:
        for future in self._waiting:
            future.cancel()
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()
        self._thread = None
        self._waiting.clear()


def _work(wanted: Wanted) -> None:
    """Makes batches until `None`; holds no data set while it waits."""
    while (item := wanted.get()) is not None:
        make, future = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make())
            except BaseException as failure:  # raised where the batch is used
                future.set_exception(failure)
        del item, make, future


def _copy_function() -> Callable[[Any], Any]:
    """Returns a function that moves an array of numpy to the device of the calling thread."""
    backend = keras.config.backend()
    if backend == "jax":
        import jax

        return jax.device_put
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            return functools.partial(_copied_by_cuda, torch.cuda.current_device())
        return torch.as_tensor
    return lambda array: array


def _copied_by_cuda(device: int, array: Any) -> Any:
    import torch

    # Each thread has a current device, and pinned memory belongs to a device as well.
    with torch.cuda.device(device):
        return torch.as_tensor(array).pin_memory().cuda(non_blocking=True)


def _tf_prefetched(data: Any, count: int) -> Any:
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    if gpus and keras.config.backend() == "tensorflow":
        return data.apply(tf.data.experimental.prefetch_to_device(gpus[0].name, count))
    return data.prefetch(count)
