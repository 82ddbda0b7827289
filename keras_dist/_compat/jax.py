"""Private and undocumented names of JAX."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import xla_bridge
from jax.extend import core
from jax.interpreters import mlir

from keras_dist._compat.contract import Name

__all__ = ["CONTRACT", "has_client", "kind_of", "part_of", "see_only", "version", "visible_devices"]


def version() -> str:
    """Returns the name and the version of JAX."""
    return f"JAX {jax.__version__}"


def has_client() -> bool:
    """Tells whether JAX has made a client, which takes memory on all GPUs that it sees."""
    return bool(xla_bridge.backends_are_initialized())


def visible_devices(platform: str) -> str:
    """Returns which GPUs of a platform JAX will see; `all` unless that was chosen."""
    chosen: str = jax.config.values[f"jax_{platform}_visible_devices"]
    return chosen


def see_only(platform: str, device: int) -> None:
    """Makes JAX see one GPU of a platform alone; before it makes its client."""
    jax.config.update(f"jax_{platform}_visible_devices", str(device))


def kind_of(leaf: Any) -> Any:
    """Returns shape, dtype and weak type of an array, by which a function is traced."""
    array = jax.api_util.shaped_abstractify(leaf)
    return array.shape, array.dtype, array.weak_type


def part_of(
    jaxpr: Any, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """Returns some operations of a traced function as a traced function."""
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


CUT = "to compile a train step in programs around the reduction"
NOT_CUT = "a train step could not be compiled"

CONTRACT = (
    Name(
        lambda: xla_bridge,
        "backends_are_initialized",
        "to choose the GPU of a rank before JAX takes memory on all",
        "each rank would take memory on every GPU",
        (),
    ),
    Name(
        lambda: type(jax.config),
        "values",
        "to see whether the script has chosen GPUs",
        "each rank would take memory on every GPU",
    ),
    Name(lambda: jax.api_util, "shaped_abstractify", CUT, NOT_CUT, ("x",)),
    Name(_jaxpr, "replace", CUT, NOT_CUT),
    Name(_jaxpr, "debug_info", CUT, NOT_CUT),
    Name(_debug_info, "with_unknown_names", CUT, NOT_CUT, ()),
    *(
        Name(lambda: core, name, CUT, NOT_CUT)
        for name in ("ClosedJaxpr", "Literal", "Primitive", "jaxpr_as_fun")
    ),
    *(
        Name(lambda: core.Primitive, name, CUT, NOT_CUT)
        for name in ("bind", "def_effectful_abstract_eval", "def_impl")
    ),
    *(
        Name(lambda: mlir, name, "to call the host from a step that is not cut", NOT_CUT)
        for name in ("lower_fun", "register_lowering")
    ),
)
