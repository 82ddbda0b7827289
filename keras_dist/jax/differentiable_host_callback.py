"""Where a function of numpy arrays runs: now, or where the compiled program comes to it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from keras_dist import _engine, errors, runtime
from keras_dist._backends.jax import finish_calls

__all__ = ["differentiable", "on_host"]

_engine.wait_first(finish_calls)  # `init` does so as well, but may have been called already


def differentiable(
    run: Callable[[Any], Any],
    forward: Callable[[Any], tuple[Any, Any]],
    backward: Callable[[Any, Any], tuple[Any]],
    given: Any,
) -> Any:
    """Runs a function of arrays that has a gradient.

    Args:
        run: the function, of one argument.
        forward: returns its result, and what `backward` is to know.
        backward: takes that and the gradients of the result, gives that of the argument.
        given: the argument, a tree of arrays.
    """
    if not _is_traced(jax.tree.leaves(given)):
        return run(given)  # nobody asks for a gradient: to say that there is one takes JAX longer
    function = jax.custom_vjp(run)
    function.defvjp(forward, backward)
    return function(given)


def on_host(
    function: Callable[[list[np.ndarray]], Sequence[np.ndarray]],
    arrays: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
) -> list[Any]:
    """Runs a collective on arrays of JAX.

    Outside of `jax.jit` it reads them where they lie. Inside it is a callback that keeps its place
    among the others of the program, so that all ranks come to theirs in the same order.

    Args:
        function: takes a list of numpy arrays, gives one for each of `shapes`.
        arrays: arrays, or what arrays can be made from.
        shapes: of the results inside of `jax.jit`; outside they may turn out otherwise. The
            dtypes are those of `arrays`.
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

    kinds = [
        jax.ShapeDtypeStruct(shape, array.dtype) for shape, array in zip(shapes, given, strict=True)
    ]
    return list(io_callback(called, kinds, *given, ordered=True))


def _is_traced(arrays: Sequence[Any]) -> bool:
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def _check_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                f"a result of shape {expected} inside of jax.jit, as ranks with equal shapes give",
                f"one of shape {found}",
                "Call it outside of jax.jit, where lengths may differ from rank to rank.",
            )
        )
