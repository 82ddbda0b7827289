"""Conversion and checks of the arguments of collectives, also of Horovod's deprecated ones."""

import functools
import inspect
import warnings
from typing import Any, cast

import numpy as np

from keras_dist import _engine, _gpu, errors, runtime
from keras_dist.ops.reduce_op import Average, ReduceOp, Sum


def as_array(value: Any) -> np.ndarray:
    """Returns a value as an array in the byte order of this machine."""
    if isinstance(value, _gpu.DeviceArray):
        return cast(np.ndarray, value)  # the engine takes it where it is
    try:
        return native(np.asarray(value))
    except ValueError as error:
        raise errors.ArgumentError(
            runtime.where(),
            "a number or an array of one shape",
            f"{type(value).__name__} ({error})",
            "Pass rows of equal length.",
        ) from error
    except (NotImplementedError, TypeError) as error:
        raise errors.ArgumentTypeError(
            runtime.where(),
            "a value that numpy can read",
            f"{type(value).__name__} ({str(error).partition(chr(10))[0]})",
            "In tf.function or jax.jit, and for tensors on a GPU, use the functions of "
            "keras_dist.tensorflow, keras_dist.jax or keras_dist.torch.",
        ) from error


def native(array: np.ndarray) -> np.ndarray:
    """Returns an array in the byte order of this machine: itself, or a copy."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@functools.lru_cache
def names_of(name: str | None, count: int) -> tuple[str, ...]:
    """Returns the names of the values of a list, for messages."""
    if count == 1:
        return (name or "value",)
    return tuple(f"{name or 'values'}[{index}]" for index in range(count))


def parse_factors(prescale: float, postscale: float) -> tuple[float, float]:
    """Returns both factors, checked. See `keras_dist._engine.parse_factor`."""
    where = runtime.where()
    return (
        _engine.parse_factor(prescale, "prescale_factor", where),
        _engine.parse_factor(postscale, "postscale_factor", where),
    )


def check_writeable(variable: Any, name: str) -> None:
    """Checks that a collective can write into a value."""
    where = runtime.where()
    if not isinstance(variable, np.ndarray) or variable.dtype.hasobject:
        kind = getattr(variable, "dtype", None) or type(variable).__name__
        remedy = "Use keras_dist.broadcast, which returns a new array."
        raise errors.ArgumentTypeError(
            where, f"{name} to be a numpy array of numbers", str(kind), remedy
        )
    if not variable.flags.writeable:
        expected, received = f"{name} to be writeable", "a read-only array"
        raise errors.ArgumentError(where, expected, received, "Pass a writeable copy.")


def check_out(out: Any, array: np.ndarray) -> None:
    """Checks that the result for an array can be written into another."""
    check_writeable(out, "out")
    dtypes = {out.dtype.newbyteorder("="), array.dtype.newbyteorder("=")}
    if out.shape != array.shape or len(dtypes) > 1:
        raise errors.ArgumentError(
            runtime.where(),
            f"out to have the shape {array.shape} and dtype {array.dtype} of the value",
            f"shape {out.shape}, dtype {out.dtype}",
            "Pass numpy.empty_like(value), or omit out.",
        )


def resolve_op(op: ReduceOp | str | None, average: bool | None) -> ReduceOp | str:
    """Returns the reduction that `op` or the deprecated `average` selects."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise errors.ArgumentError(
            runtime.where(),
            "either op or average",
            f"op={op} and average={average}",
            "Omit average.",
        )
    chosen = Average if average else Sum
    _warn_deprecated(f"average={average}", f"op=hvd.{chosen.value.capitalize()}")
    return chosen


def resolve_groups(groups: Any, num_groups: int) -> Any:
    """Returns `groups`, or the deprecated `num_groups` if only that is given."""
    if not num_groups:
        return groups
    _warn_deprecated("num_groups", "groups")
    return num_groups if groups is None else groups


OURS = ("keras_dist.", "tensorflow.")  # some operations are called by a wrapper of TensorFlow


def _warn_deprecated(old: str, new: str, until: str = "2.0") -> None:
    """Warns the caller of a public function that an argument leaves with a version."""
    text = f"{old} is deprecated and will be removed in keras_dist {until}: pass {new}."
    # Python shows such warnings of the script itself only, so it must not seem to be one of ours.
    frames = inspect.getouterframes(inspect.currentframe(), context=0)
    names = [found.frame.f_globals.get("__name__", "") for found in frames]
    level = next((at for at, name in enumerate(names) if not name.startswith(OURS)), 0)
    warnings.warn(text, DeprecationWarning, stacklevel=level + 1)
