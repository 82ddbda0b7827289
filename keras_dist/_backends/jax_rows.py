"""Finds the rows of gradients that JAX makes dense, as those of embeddings, in a traced step.

The gradient of `jax.numpy.take` is a table of zeros to which rows are added. A host call that takes
such a table is given the rows and their indices instead, and the table is not computed.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

CALLS = ("jit", "pjit")
# An index outside the table adds nothing.
DROPS = (jax.lax.GatherScatterMode.FILL_OR_DROP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


class HostCall(NamedTuple):
    """An equation that calls the host, and is in no program."""

    primitive: core.Primitive
    invars: Sequence[Any]
    outvars: Sequence[Any]
    params: dict[str, Any]
    effects: Any


def known_rows(
    indices: np.ndarray, values: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of a table and their indices, without those that JAX drops."""
    flat, rows = indices.reshape(-1).astype(np.int64), values.reshape(-1, values.shape[-1])
    within = (flat >= 0) & (flat < length)
    return (rows, flat) if within.all() else (rows[within], flat[within])


def table_of(rows: Any, place: Any) -> Any:
    """Returns, as a JAX array at `place`, the table of which these are the rows, each once."""
    length, count = rows.shape[0], len(rows.indices)
    # One of few sizes, since each is compiled: further rows lie outside the table.
    size = 1 << max(0, count - 1).bit_length()
    indices = np.arange(length, length + size)
    indices[:count] = rows.indices
    values = np.zeros((size, rows.values.shape[1]), rows.dtype)
    values[:count] = rows.values
    return _filled(*jax.device_put((indices, values), place), tuple(rows.shape))


@functools.partial(jax.jit, static_argnums=2)
def _filled(indices: Any, values: Any, shape: tuple[int, ...]) -> Any:
    table = jax.numpy.zeros((shape[0], values.shape[1]), values.dtype)
    return table.at[indices].set(values, mode="drop", unique_indices=True).reshape(shape)


def take_rows(equations: Sequence[Any], marker: core.Primitive) -> list[Any]:
    """Returns equations whose calls of the host take rows of tables, where they are known.

    The parameter `tables` of a call says how many rows of each array may be given as such. In the
    call that is returned two arrays, indices and rows, take the place of a table whose rows are
    known; `known` holds the shape of each such table, and `None` for other arrays.
    """
    made = {v: equation for equation in equations for v in equation.outvars}
    return [
        _take_rows(equation, made) if equation.primitive is marker else equation
        for equation in equations
    ]


def _take_rows(call: Any, made: dict[Any, Any]) -> Any:
    tables = call.params.get("tables") or ()
    if not any(tables):
        return call
    now, *arrays = call.invars
    invars, shapes = [now], []
    for array, most in zip(arrays, tables, strict=True):
        rows = _rows(array, made) if most and isinstance(array, core.Var) else None
        if rows is not None and rows[0].aval.size <= most:
            invars += rows
            shapes.append(array.aval.shape)
        else:
            invars.append(array)
            shapes.append(None)
    params = call.params | {"known": tuple(shapes)}
    return HostCall(call.primitive, invars, call.outvars, params, call.effects)


def _rows(table: Any, made: dict[Any, Any]) -> tuple[Any, Any] | None:
    """Returns the indices and the rows that are added to zeros, if that is how a table is made."""
    equation = made.get(table)
    if equation is None:
        return None
    if equation.primitive.name in CALLS:
        inner = equation.params["jaxpr"].jaxpr
        result = inner.outvars[equation.outvars.index(table)]
        within = {v: each for each in inner.eqns for v in each.outvars}
        rows = _rows(result, within) if isinstance(result, core.Var) else None
        given = dict(zip(inner.invars, equation.invars, strict=True))
        if rows is None or any(v not in given for v in rows):
            return None
        indices, values = (given[v] for v in rows)
        return indices, values
    if equation.primitive.name != "scatter-add" or equation.params["mode"] not in DROPS:
        return None
    zeros, indices, values = equation.invars
    adds_rows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(indices.aval.ndim - 1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    is_plain = (
        equation.params["dimension_numbers"] == adds_rows
        and indices.aval.shape[-1] == 1
        and zeros.aval.shape[1:] == values.aval.shape[-1:]  # whole rows
    )
    return (indices, values) if is_plain and _are_zeros(zeros, made) else None


def _are_zeros(variable: Any, made: dict[Any, Any]) -> bool:
    equation = made.get(variable) if isinstance(variable, core.Var) else None
    if equation is None or equation.primitive.name != "broadcast_in_dim":
        return False
    value = equation.invars[0]
    return isinstance(value, core.Literal) and value.val == 0
