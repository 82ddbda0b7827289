"""Overlaps the reduction of gradients with the other operations of a TensorFlow graph.

A host operation queues a bucket when its gradients have been computed, and another one waits for
the results. In between, TensorFlow computes the gradients of the next buckets. On a GPU, the ranks
agree on a bucket and launch it while the operation of the next one waits for its gradients.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist._backends.tensorflow_host import on_host


class QueuedBuckets:
    """The buckets of a plan in one graph: operations that queue them, and that wait for them."""

    def __init__(self, fused: Any, on_device: bool):
        self._plan, self._on_device = fused.weak(), on_device
        self._handles: dict[int, Any] = {}
        self._queued: list[tf.Tensor] = []  # one for each bucket: it has been queued

    def queue(self, number: int, tensors: Sequence[tf.Tensor], lend: bool) -> None:
        """Adds an operation that queues a bucket; call it for the buckets in their order."""

        def start(*arrays: Any) -> np.int64:
            # The handle keeps the arrays, and they the memory of the tensors.
            self._handles[number] = self._plan().queue_bucket(number, arrays, lend)
            return np.int64(number)

        self._queued += on_host(start, tensors, [()], [tf.int64], on_device=self._on_device)

    def results(
        self, number: int, tensors: Sequence[tf.Tensor], shapes: Sequence[Any], buffers: Any
    ) -> list[tf.Tensor]:
        """Adds an operation that waits for a bucket; call it when all have been queued.

        Args:
            shapes: their shapes.
        """

        def wait(*_: Any) -> list[Any]:
            reduced: list[Any] = self._handles.pop(number).wait()
            return reduced

        # A thread of TensorFlow that waits computes nothing: first, all buckets are queued.
        dtypes = [tensor.dtype for tensor in tensors]
        return on_host(wait, self._queued, shapes, dtypes, buffers, on_device=self._on_device)
