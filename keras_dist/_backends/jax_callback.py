"""Calls of the host inside a compiled JAX program, in program order, see decision 54."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from keras_dist import errors
from keras_dist._compat.jax import devices_of, emit_buffer_callback, has_buffer_callbacks

HostCall = Callable[[list[np.ndarray]], Sequence[np.ndarray]]
WritingCall = Callable[[list[np.ndarray], list[np.ndarray]], None]


def call_host(
    function: HostCall,
    arrays: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    into: WritingCall | None = None,
) -> list[Any]:
    """Adds a host call, which neither changes nor keeps arrays, with results of `shapes`."""
    # XLA packs elements of less than a byte; numpy does not.
    given = [array.astype(_unpacked(array.dtype)) for array in arrays]
    results = _host_call.bind(*given, function=function, shapes=tuple(shapes), into=into)
    return [result.astype(array.dtype) for result, array in zip(results, arrays, strict=True)]


def differentiable(run: Callable[[Any], Any], back: Callable[[Any], Any], given: Any) -> Any:
    """Runs a function of arrays whose gradient is another one, of the gradients of its results."""
    # The gradient has a gradient of its own if `back` calls this function.
    if not is_traced(jax.tree.leaves(given)):
        return run(given)  # no gradient is needed, and `custom_vjp` takes time
    function = jax.custom_vjp(run)

    def forward(given: Any) -> tuple[Any, None]:
        # Not `run` itself: where gradients of gradients are taken, the arrays are traced here too.
        return differentiable(run, back, given), None

    function.defvjp(forward, lambda _, gradients: (back(gradients),))
    return function(given)


def is_traced(arrays: Sequence[Any]) -> bool:
    """Returns whether arrays are those of a step that is being compiled."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


# The effect of an ordered callback keeps host calls in program order.
[ORDERED] = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects

_host_call = Primitive("keras_dist_host_call")
_host_call.multiple_results = True


def _unpacked(dtype: Any) -> Any:
    """Returns a dtype of whole bytes that holds the numbers of another."""
    if jax.numpy.issubdtype(dtype, jax.numpy.integer) and jax.numpy.iinfo(dtype).bits < 8:
        return jax.numpy.int8
    if jax.numpy.issubdtype(dtype, jax.numpy.floating) and jax.numpy.finfo(dtype).bits < 8:
        return jax.numpy.float8_e4m3fn
    return dtype


def _abstract(
    *arrays: Any, function: HostCall, shapes: Any, into: Any
) -> tuple[list[Any], set[Any]]:
    results = [
        array.update(shape=shape, weak_type=False)
        for array, shape in zip(arrays, shapes, strict=True)
    ]
    return results, {ORDERED}


def _run(*arrays: Any, function: HostCall, shapes: Any, into: Any) -> list[Any]:
    """Runs a call of a program that is not compiled."""
    results = function([np.asarray(array) for array in arrays])
    return [jax.numpy.array(result) for result in results]


def _lower(context: Any, *operands: Any, function: HostCall, shapes: Any, into: Any) -> Any:
    if (count := devices_of(context)) > 1:
        # Each device would call the host with its part, in an order that differs between ranks.
        raise errors.ArgumentError(
            "[keras_dist.jax]",
            "a collective in a program of one device",
            f"a program of {count} devices, as jax.shard_map, jax.pmap and shardings make them",
            "Call the collective on the results of the program, outside of it.",
        )
    if not has_buffer_callbacks(context):
        return _lower_copying(context, *operands, function=function, shapes=shapes)

    def write(arrays: list[np.ndarray], results: list[np.ndarray]) -> None:
        for result, array in zip(results, function(arrays), strict=True):
            np.copyto(result, array)

    return emit_buffer_callback(context, ORDERED, into or write, operands)


def _copying(*arrays: Any, function: HostCall, shapes: Any) -> Any:
    def call(*given: Any) -> tuple[np.ndarray, ...]:
        # Copies: JAX may still read a result when the next call writes to its memory.
        return tuple(map(np.array, function([np.asarray(array) for array in given])))

    specs = tuple(
        jax.ShapeDtypeStruct(shape, array.dtype)
        for array, shape in zip(arrays, shapes, strict=True)
    )
    return io_callback(call, specs, *arrays, ordered=True)


def _refuse(transformation: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **parameters: Any) -> Any:
        raise errors.ArgumentError(
            "[keras_dist.jax]",
            "a collective outside of jax.vmap, and differentiated in reverse mode if at all",
            transformation,
            "Use jax.grad or jax.vjp, and pass whole arrays.",
        )

    return refuse


_lower_copying = mlir.lower_fun(_copying, multiple_results=True)
_host_call.def_effectful_abstract_eval(_abstract)
_host_call.def_impl(_run)
ad.primitive_jvps[_host_call] = _refuse("a derivative in forward mode")
batching.primitive_batchers[_host_call] = _refuse("jax.vmap")
mlir.register_lowering(_host_call, _lower)
