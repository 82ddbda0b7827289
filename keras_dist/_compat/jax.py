"""Private and undocumented names of JAX."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_dist._compat.contract import Name, missing, require


def version() -> str:
    """Returns the name and the version of JAX."""
    return f"JAX {jax.__version__}"


def has_client() -> bool:
    """Returns whether JAX has a client, which allocates memory on all visible GPUs."""
    return bool(require(CLIENT, version).backends_are_initialized())


def visible_devices(platform: str) -> str:
    """Returns the GPUs of a platform that JAX will see; `all` unless the script has chosen some."""
    visible: str = jax.config.values[f"jax_{platform}_visible_devices"]
    return visible


def restrict_to_device(platform: str, device: int) -> None:
    """Makes JAX see a single GPU of a platform, before it creates its client."""
    jax.config.update(f"jax_{platform}_visible_devices", str(device))


def abstract_of(leaf: Any) -> Any:
    """Returns shape, dtype and weak type of an array, which determine how a function is traced."""
    array = jax.api_util.shaped_abstractify(leaf)
    return array.shape, array.dtype, array.weak_type


def subset_of(
    jaxpr: Any, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """Returns a subset of the equations of a jaxpr as a jaxpr."""
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def has_buffer_callbacks(context: Any) -> bool:
    """Returns whether the host can read and write the memory of a program."""
    return tuple(context.module_context.platforms) == ("cpu",) and _knows_buffers()


def emit_buffer_callback(
    context: Any,
    effect: Any,
    function: Callable[[list[np.ndarray], list[np.ndarray]], None],
    operands: Sequence[Any],
) -> list[Any]:
    """Emits an ordered call of the host that reads and writes the memory of a program.

    As `jax.experimental.buffer_callback` does, with a token as first operand and first result.
    """
    from jax.interpreters import mlir

    count = len(operands)

    def call(stage: Any, *buffers: Any) -> tuple[()]:
        # A token, the operands, a token, the results.
        arrays = [np.asarray(buffer) for buffer in buffers[1 : count + 1]]
        function(arrays, [np.asarray(buffer) for buffer in buffers[count + 2 :]])
        return ()

    context.module_context.add_host_callback(call)
    token = require(TOKEN, version).abstract_token
    with_token = dataclasses.replace(
        context, avals_in=[token, *context.avals_in], avals_out=[token, *context.avals_out]
    )
    lower = jax.ffi.ffi_lowering("xla_buffer_python_cpu_callback", has_side_effect=True)
    index = np.uint64(len(context.module_context.host_callbacks) - 1)
    token_out, *results = lower(with_token, context.tokens_in.get(effect), *operands, index=index)
    tokens = mlir.TokenSet({effect: token_out})
    context.set_tokens_out(context.tokens_in.update_tokens(tokens))
    return results


@functools.cache
def _knows_buffers() -> bool:
    return not missing(BUFFERS)


def put_like(array: np.ndarray, like: Any) -> Any | None:
    """Returns an array as a JAX array beside another, in place; `None` if `jax.device_put` must.

    It takes a tenth of the time of `jax.device_put`, which works out shape and device again.

    Args:
        like: a JAX array of the shape, the dtype and the device of the result.
    """
    sharding = like.sharding
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding) or not _puts_in_place():
        return None
    if like.weak_type or array.shape != like.shape or array.dtype != like.dtype:
        return None
    [device] = sharding.device_set
    if device.platform != "cpu":
        return None
    put = require(PUT, version).batched_device_put
    return put(like.aval, sharding, [array], [device], like.committed)


def release_dropped() -> None:
    """Releases the memory of arrays that the script has dropped; JAX does it at its next call."""
    if _releases():
        require(GARBAGE, version).collect_garbage()


@functools.cache
def _releases() -> bool:
    return not missing((GARBAGE,))


@functools.cache
def _puts_in_place() -> bool:
    return not missing((PUT,))


def _jaxpr() -> Any:
    return type(jax.make_jaxpr(lambda: 0)().jaxpr)


def _debug_info() -> Any:
    return type(jax.make_jaxpr(lambda: 0)().jaxpr.debug_info)


SPLIT = "to compile a train step as programs before and after the reduction"
NOT_SPLIT = "a train step could not be compiled"

CLIENT = Name(
    "jax._src.xla_bridge",
    "backends_are_initialized",
    "to choose the GPU of a rank before JAX allocates memory on all GPUs",
    "each rank would allocate memory on every GPU",
    (),
    on_use=True,
)

REFUSED = "to explain which transformations a collective does not support"
IN_PLACE = "to read and write the memory of a compiled program on the host"
COPIED = "none: calls of the host copy arguments and results"

TOKEN = Name("jax._src.core", "abstract_token", IN_PLACE, COPIED, on_use=True)

# Without one of these names, calls of the host are `io_callback`s.
BUFFERS = (
    TOKEN,
    *(
        Name(owner, name, IN_PLACE, COPIED, on_use=True)
        for owner, name in (
            ("jax.experimental.buffer_callback", "buffer_callback"),
            ("jax.ffi", "ffi_lowering"),
            ("jax.interpreters.mlir:LoweringRuleContext", "set_tokens_out"),
            ("jax.interpreters.mlir:ModuleContext", "add_host_callback"),
            ("jax.interpreters.mlir:TokenSet", "get"),
            ("jax.interpreters.mlir:TokenSet", "update_tokens"),
        )
    ),
)

PUT = Name(
    "jax._src.interpreters.pxla",
    "batched_device_put",
    "to make JAX arrays of results without a copy",
    "none: jax.device_put makes them, which takes longer",
    ("aval", "sharding", "xs", "devices", "committed"),
    on_use=True,
)

GARBAGE = Name(
    "jaxlib._jax",
    "collect_garbage",
    "to use the memory of results again that the script has dropped",
    "none: JAX releases them at its next call, and results are copied meanwhile",
    on_use=True,
)

CONTRACT = (
    CLIENT,
    PUT,
    GARBAGE,
    *BUFFERS,
    Name(
        lambda: type(jax.config),
        "values",
        "to see whether the script has chosen GPUs",
        "each rank would allocate memory on every GPU",
    ),
    Name("jax:api_util", "shaped_abstractify", SPLIT, NOT_SPLIT, ("x",)),
    Name(_jaxpr, "replace", SPLIT, NOT_SPLIT),
    Name(_jaxpr, "debug_info", SPLIT, NOT_SPLIT),
    Name(_debug_info, "with_unknown_names", SPLIT, NOT_SPLIT, ()),
    *(
        Name("jax.extend.core", name, SPLIT, NOT_SPLIT)
        for name in ("ClosedJaxpr", "Literal", "Primitive", "jaxpr_as_fun")
    ),
    *(
        Name("jax.extend.core:Primitive", name, SPLIT, NOT_SPLIT)
        for name in ("bind", "def_effectful_abstract_eval", "def_impl")
    ),
    Name("jax.interpreters.ad", "primitive_jvps", REFUSED, NOT_SPLIT),
    Name("jax.interpreters.batching", "primitive_batchers", REFUSED, NOT_SPLIT),
    *(
        Name("jax.interpreters.mlir", name, "to call the host from a step in one piece", NOT_SPLIT)
        for name in ("lower_fun", "register_lowering")
    ),
)
