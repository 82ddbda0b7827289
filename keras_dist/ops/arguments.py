"""Arguments that Horovod's functions have and those of keras_dist have not, or not so."""

import warnings
from typing import Any

from keras_dist import errors, runtime
from keras_dist.ops.reduce_op import Average, ReduceOp, Sum

__all__ = ["chosen_groups", "chosen_op"]


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
        stacklevel=3,
    )
    return chosen


def chosen_groups(groups: Any, num_groups: int) -> Any:
    """Returns the groups that are meant: `num_groups` is what they were before."""
    if not num_groups:
        return groups
    warnings.warn("num_groups is deprecated: pass groups.", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups
