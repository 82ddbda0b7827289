"""Arguments that Horovod's functions have and those of keras_dist have not, or not so."""

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist import errors, runtime
from keras_dist.reduce_op import Average, ReduceOp, Sum

__all__ = ["as_tensors", "chosen_groups", "chosen_op"]


def as_tensors(values: Sequence[Any]) -> list[Any]:
    """Returns values, variables among them, as tensors."""
    # To find out that a tensor is one takes TensorFlow longer than anything else here.
    return [one if isinstance(one, tf.Tensor) else tf.convert_to_tensor(one) for one in values]


def chosen_op(op: ReduceOp | str | None, average: bool | None) -> ReduceOp | str:
    """Returns the op that is meant.

    Args:
        op: the reduction; `None` where it is not given.
        average: what was passed before there was `op`: whether to average or to add up.

    Raises:
        ArgumentError: both are given.
    """
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                "either op or average",
                f"op={op} and average={average}",
                "Leave out average.",
            )
        )
    chosen = Average if average else Sum
    warnings.warn(
        f"average={average} is deprecated: pass op=hvd.{chosen.value.capitalize()}.",
        DeprecationWarning,
        stacklevel=2,
    )
    return chosen


def chosen_groups(groups: Any, num_groups: int) -> Any:
    """Returns the groups that are meant: `num_groups` is what they were before."""
    if not num_groups:
        return groups
    warnings.warn("num_groups is deprecated: pass groups.", DeprecationWarning, stacklevel=2)
    return num_groups if groups is None else groups
