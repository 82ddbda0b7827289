"""Deprecated arguments of Horovod."""

import warnings
from typing import Any

from keras_dist import errors, runtime
from keras_dist.ops.reduce_op import Average, ReduceOp, Sum

__all__ = ["resolve_groups", "resolve_op"]


def resolve_op(op: ReduceOp | str | None, average: bool | None) -> ReduceOp | str:
    """Returns the reduction that `op` or the deprecated `average` selects.

    Args:
        op: the reduction; `None` for the default, `Average`.
        average: `True` for `Average`, `False` for `Sum`, `None` where it is not given.

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


def resolve_groups(groups: Any, num_groups: int) -> Any:
    """Returns `groups`, or the deprecated `num_groups` where only that is given."""
    if not num_groups:
        return groups
    warnings.warn("num_groups is deprecated: pass groups.", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups
