"""Host functions of numpy arrays, called directly or by a compiled program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._backends.jax import backend
from keras_dist._backends.jax_callback import call_host, is_traced
from keras_dist._compat.jax import put_like, release_dropped

_engine.set_completion(backend.finish_calls)  # as `init` does, which may have been called before


def of_floats(
    back: Callable[..., Sequence[Any]], gradients: Sequence[Any], *others: Sequence[Any]
) -> list[Any]:
    """Returns the gradients of arrays; `None` for integers."""
    results: list[Any] = [None] * len(gradients)
    floats = [i for i, each in enumerate(gradients) if each.dtype != jax.dtypes.float0]
    if floats:
        given = ([values[i] for i in floats] for values in (gradients, *others))
        for i, found in zip(floats, back(*given), strict=True):
            results[i] = found
    return results


def host_callback(
    function: Callable[[list[np.ndarray]], Sequence[np.ndarray]],
    arrays: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    into: Callable[[list[np.ndarray], list[np.ndarray]], None] | None = None,
) -> list[Any]:
    """Runs a collective of numpy arrays on JAX arrays, read in place; in `jax.jit`, in order.

    Results have the dtypes of `arrays` and, inside `jax.jit`, these `shapes`.
    """
    given = [jax.numpy.asarray(array) for array in arrays]
    if not is_traced(given):
        release_dropped()
        results = function([np.asarray(array) for array in given])
        return [as_jax(result, array) for result, array in zip(results, given, strict=True)]

    def called(arrays: list[np.ndarray]) -> Sequence[np.ndarray]:
        results = function(arrays)
        for result, shape in zip(results, shapes, strict=True):
            _check_shape(result.shape, shape)
        return results

    return call_host(called, given, shapes, into)


def as_jax(array: np.ndarray, like: jax.Array) -> jax.Array:
    """Returns a numpy array as a JAX array on the devices of another, in place on the CPU."""
    found = put_like(array, like)
    if found is not None:
        return found
    return jax.device_put(array, like.sharding if like.committed else None, may_alias=True)


def _check_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise errors.ArgumentError(
            runtime.where(),
            f"a result of shape {expected} inside jax.jit, as for equal shapes on all ranks",
            f"a result of shape {found}",
            "Call the operation outside jax.jit, where lengths may differ between ranks.",
        )
