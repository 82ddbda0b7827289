"""Private and undocumented names of JAX."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_dist._compat.contract import Owner, has, require


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
    return tuple(context.module_context.platforms) == ("cpu",) and has(*BUFFERS)


def devices_of(context: Any) -> int:
    """Returns the number of devices that run a program, each of which would call the host."""
    axes = context.module_context.axis_context  # of a mesh, of shardings, or of `pmap`
    if (mesh := getattr(axes, "mesh", None)) is not None:
        return int(mesh.size)
    count = getattr(axes, "num_devices", None)
    return int(axes.axis_env.nreps if count is None else count)


def emit_buffer_callback(
    context: Any,
    effect: Any,
    function: Callable[[list[np.ndarray], list[np.ndarray]], None],
    operands: Sequence[Any],
) -> list[Any]:
    """Emits an ordered call of the host that reads and writes the memory of a program."""
    # As `jax.experimental.buffer_callback` does, with a token as first operand and first result.
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


def put_like(array: np.ndarray, like: Any) -> Any | None:
    """Returns an array, in place, as a JAX array like another; `None` if `jax.device_put` must."""
    # Takes a tenth of the time of `jax.device_put`, which works out shape and device again.
    sharding = like.sharding
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding) or not has(PUT):
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
    if has(GARBAGE):
        require(GARBAGE, version).collect_garbage()


def _jaxpr() -> Any:
    return type(jax.make_jaxpr(lambda: 0)().jaxpr)


def _debug_info() -> Any:
    return type(jax.make_jaxpr(lambda: 0)().jaxpr.debug_info)


SPLIT = "to compile a train step as programs before and after the reduction"
NOT_SPLIT = "a train step could not be compiled"

CLIENT = Owner("jax._src.xla_bridge").method(
    "backends_are_initialized()",
    "to choose the GPU of a rank before JAX allocates memory on all GPUs",
    "each rank would allocate memory on every GPU",
    on_use=True,
)

REFUSED = "to explain which transformations a collective does not support"
IN_PLACE = "to read and write the memory of a compiled program on the host"
COPIED = "none: calls of the host copy arguments and results"

TOKEN = Owner("jax._src.core").name("abstract_token", IN_PLACE, COPIED, on_use=True)

# Without one of these names, calls of the host are `io_callback`s.
BUFFERS = (
    TOKEN,
    *(
        Owner(owner).name(name, IN_PLACE, COPIED, on_use=True)
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

PUT = Owner("jax._src.interpreters.pxla").method(
    "batched_device_put(aval, sharding, xs, devices, committed)",
    "to make JAX arrays of results without a copy",
    "none: jax.device_put makes them, which takes longer",
    on_use=True,
)

GARBAGE = Owner("jaxlib._jax").name(
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
    Owner(lambda: type(jax.config)).name(
        "values",
        "to see whether the script has chosen GPUs",
        "each rank would allocate memory on every GPU",
    ),
    Owner("jax:api_util").method("shaped_abstractify(x)", SPLIT, NOT_SPLIT),
    Owner(_jaxpr).name("replace", SPLIT, NOT_SPLIT),
    Owner(_jaxpr).name("debug_info", SPLIT, NOT_SPLIT),
    Owner(_debug_info).method("with_unknown_names()", SPLIT, NOT_SPLIT),
    *(
        Owner("jax.extend.core").name(name, SPLIT, NOT_SPLIT)
        for name in ("ClosedJaxpr", "Literal", "Primitive", "jaxpr_as_fun")
    ),
    *(
        Owner("jax.extend.core:Primitive").name(name, SPLIT, NOT_SPLIT)
        for name in ("bind", "def_effectful_abstract_eval", "def_impl")
    ),
    Owner("jax.interpreters.ad").name("primitive_jvps", REFUSED, NOT_SPLIT),
    Owner("jax.interpreters.batching").name("primitive_batchers", REFUSED, NOT_SPLIT),
    *(
        Owner("jax.interpreters.mlir").name(
            name, "to call the host from a step in one piece", NOT_SPLIT
        )
        for name in ("lower_fun", "register_lowering")
    ),
    Owner("jax.interpreters.mlir:ModuleContext").attribute(
        "axis_context",
        "to refuse a collective that each of several devices would call",
        "a program with a collective could not be compiled",
        on_use=True,
    ),
)
