"""Values as tensors of TensorFlow."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["as_tensors"]


def as_tensors(values: Sequence[Any]) -> list[Any]:
    """Returns values, variables among them, as tensors."""
    # To find out that a tensor is one takes TensorFlow longer than anything else here.
    return [one if isinstance(one, tf.Tensor) else tf.convert_to_tensor(one) for one in values]
