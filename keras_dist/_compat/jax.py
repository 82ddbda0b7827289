"""Private and undocumented names of JAX."""

from collections.abc import Sequence
from typing import Any

import jax

from keras_dist._compat.contract import Name, require

__all__ = [
    "CONTRACT",
    "abstract_of",
    "has_client",
    "restrict_to_device",
    "subset_of",
    "version",
    "visible_devices",
]


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

CONTRACT = (
    CLIENT,
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
    *(
        Name("jax.interpreters.mlir", name, "to call the host from a step in one piece", NOT_SPLIT)
        for name in ("lower_fun", "register_lowering")
    ),
)
