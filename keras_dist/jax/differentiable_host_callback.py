"""Host functions of numpy arrays, called directly or as callbacks of a compiled program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from keras_dist import _engine, errors, runtime
from keras_dist._backends.jax import finish_calls

__all__ = ["differentiable", "host_callback"]

_engine.set_completion(finish_calls)  # as `init` does, which may have been called before


def differentiable(
    run: Callable[[Any], Any],
    forward: Callable[[Any], tuple[Any, Any]],
    backward: Callable[[Any, Any], tuple[Any]],
    given: Any,
) -> Any:
    """Runs a function of arrays that has a gradient. See `jax.custom_vjp`.

    Args:
        run: the function, of one argument.
        forward: returns the result of the function, and residuals for `backward`.
        backward: a function of the residuals and the gradient of the result, which returns the
            gradient of the argument.
        given: the argument, a pytree of arrays.
    """
    if not _is_traced(jax.tree.leaves(given)):
        return run(given)  # no gradient is needed, and `custom_vjp` takes time
    function = jax.custom_vjp(run)
    function.defvjp(forward, backward)
    return function(given)


def host_callback(
    function: Callable[[list[np.ndarray]], Sequence[np.ndarray]],
    arrays: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
) -> list[Any]:
    """Runs a collective on JAX arrays.

    Outside `jax.jit`, the arrays are read in place. Inside, the collective is an ordered callback,
    so that all ranks call collectives in the same order.

    Args:
        function: a function of a list of numpy arrays, which returns an array for each of `shapes`.
        arrays: JAX arrays, or values that JAX converts to arrays.
        shapes: shapes of the results inside `jax.jit`; outside, the results may have other shapes.
            The dtypes are those of `arrays`.
    """
    given = [jax.numpy.asarray(array) for array in arrays]
    if not _is_traced(given):
        results = function([np.asarray(array) for array in given])
        return [
            jax.device_put(result, array.sharding if array.committed else None, may_alias=True)
            for result, array in zip(results, given, strict=True)
        ]

    def called(*arrays: Any) -> list[np.ndarray]:
        results = function([np.asarray(array) for array in arrays])
        for result, shape in zip(results, shapes, strict=True):
            _check_shape(result.shape, shape)
        return list(results)

    specs = [
        jax.ShapeDtypeStruct(shape, array.dtype) for shape, array in zip(shapes, given, strict=True)
    ]
    return list(io_callback(called, specs, *given, ordered=True))


def _is_traced(arrays: Sequence[Any]) -> bool:
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def _check_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                f"a result of shape {expected} inside jax.jit, as for equal shapes on all ranks",
                f"a result of shape {found}",
                "Call the operation outside jax.jit, where lengths may differ between ranks.",
            )
        )
