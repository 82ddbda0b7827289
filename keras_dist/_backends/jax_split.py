"""Splits a JAX function into programs at its host calls.

The function is traced once. Its equations are assigned to stages: those that depend on no result of
the host, those that depend on the first, and so on. Each stage is compiled as a program; values
that a later stage needs stay on the device.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from keras_dist._compat.jax import abstract_of, subset_of

__all__ = ["split_at"]

Call = Callable[..., list[Any]]


def split_at(marker: core.Primitive, on_host: Call, function: Callable[..., Any]) -> Any:
    """Compiles a function as programs with host calls between them.

    Args:
        marker: the primitive that represents a host call. Within loops and branches its lowering
            applies.
        on_host: the host function: takes the inputs and parameters of the marker, returns its
            outputs.
        function: a function of pytrees of arrays; its first argument is donated, as by
            `jax.jit(function, donate_argnums=0)`.

    Returns:
        A function with the same arguments and results.
    """
    programs: dict[Any, Any] = {}

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        signature = (structure, tuple(abstract_of(leaf) for leaf in leaves))
        program = programs.get(signature)
        if program is None:
            program = programs[signature] = _Program(marker, on_host, function, arguments)
        return program(leaves)

    return run


class _Program:
    """A function traced and split for certain shapes of its arguments."""

    def __init__(self, marker: core.Primitive, on_host: Call, function: Any, arguments: Any):
        self._on_host = on_host
        flat, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        while any(_is_call_of(marker, equation) for equation in flat.jaxpr.eqns):
            flat = jax.make_jaxpr(_inlined(flat, marker))(*jax.tree.leaves(arguments))
        self._structure = jax.tree.structure(shapes)
        self._inputs = flat.jaxpr.invars
        self._outputs = flat.jaxpr.outvars
        self._constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        donated = set(self._inputs[: len(jax.tree.leaves(arguments[0]))])
        # The host reuses the memory of its results, so the step returns copies of them.
        of_host = {v for e in flat.jaxpr.eqns if e.primitive is marker for v in e.outvars}
        self._copied = [_is_variable(v) and v in of_host for v in self._outputs]
        self._stages = self._split(flat.jaxpr, marker, donated)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        values: dict[Any, Any] = dict(zip(self._inputs, leaves, strict=True)) | self._constants
        for compiled, inputs, outputs, markers in self._stages:
            results = compiled(*[values[variable] for variable in inputs])
            values.update(zip(outputs, results, strict=True))
            for marker in markers:
                arrays = [_value(values, variable) for variable in marker.invars]
                results = self._on_host(*arrays, **marker.params)
                values.update(zip(marker.outvars, results, strict=True))
        results = [_value(values, variable) for variable in self._outputs]
        results = [
            jax.numpy.array(result) if copied else result
            for result, copied in zip(results, self._copied, strict=True)
        ]
        return jax.tree.unflatten(self._structure, results)

    def _split(self, jaxpr: Any, marker: core.Primitive, donated: set[Any]) -> list[Any]:
        """Returns, for each stage, its program, inputs, outputs and the host calls after it."""
        stage_of: dict[Any, int] = collections.defaultdict(int)
        equations: dict[int, list[Any]] = collections.defaultdict(list)
        markers: dict[int, list[Any]] = collections.defaultdict(list)
        for equation in jaxpr.eqns:
            stage = max((stage_of[v] for v in _variables(equation.invars)), default=0)
            is_marker = equation.primitive is marker
            (markers if is_marker else equations)[stage].append(equation)
            stage_of.update((variable, stage + is_marker) for variable in equation.outvars)
        last = max([0, *equations, *(stage + 1 for stage in markers)])
        # From the last stage to the first: values that later stages need are outputs.
        needed = set(_variables(self._outputs))
        stages: list[Any] = []
        for stage in range(last, -1, -1):
            for equation in markers[stage]:
                needed.update(_variables(equation.invars))
            computed = {v for equation in equations[stage] for v in equation.outvars}
            outputs = [v for e in equations[stage] for v in e.outvars if v in needed]
            read = [v for equation in equations[stage] for v in _variables(equation.invars)]
            inputs = [v for v in dict.fromkeys(read) if v not in computed]
            free = [v in donated and v not in needed for v in inputs]
            compiled = _compiled(subset_of(jaxpr, equations[stage], inputs, outputs), free)
            stages.append((compiled, inputs, outputs, markers[stage]))
            needed.update(inputs)
        return stages[::-1]


def _compiled(jaxpr: Any, free: Sequence[bool]) -> Any:
    """Compiles a jaxpr; free inputs are donated to outputs of the same shape and dtype."""
    unmatched = collections.Counter((v.aval.shape, v.aval.dtype) for v in jaxpr.outvars)
    donated = []
    for number, (variable, is_free) in enumerate(zip(jaxpr.invars, free, strict=True)):
        spec = (variable.aval.shape, variable.aval.dtype)
        if is_free and unmatched[spec]:
            unmatched[spec] -= 1
            donated.append(number)
    return jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, [])), donate_argnums=donated)


# Primitives that call a function, and its parameter name; the last has a custom gradient.
_CALLED = {"jit": "jaxpr", "pjit": "jaxpr", "custom_vjp_call": "call_jaxpr"}


def _is_call_of(marker: core.Primitive, equation: Any) -> bool:
    """Returns whether an equation calls a function that contains the marker."""
    return equation.primitive.name in _CALLED and any(
        inner.primitive is marker or _is_call_of(marker, inner)
        for inner in _called(equation).jaxpr.eqns
    )


def _called(equation: Any) -> Any:
    return equation.params[_CALLED[equation.primitive.name]]


def _inlined(closed: Any, marker: core.Primitive) -> Call:
    """Returns a function in which the called functions that contain the marker are inlined."""
    jaxpr = closed.jaxpr

    def run(*leaves: Any) -> list[Any]:
        values = dict(zip(jaxpr.invars, leaves, strict=True))
        values |= dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for equation in jaxpr.eqns:
            inputs = list(dict.fromkeys(_variables(equation.invars)))
            if _is_call_of(marker, equation):
                inner, atoms = _called(equation), equation.invars
            else:
                inner = core.ClosedJaxpr(subset_of(jaxpr, [equation], inputs, equation.outvars), [])
                atoms = inputs
            results = core.jaxpr_as_fun(inner)(*[_value(values, atom) for atom in atoms])
            values.update(zip(equation.outvars, results, strict=True))
        return [_value(values, atom) for atom in jaxpr.outvars]

    return run


def _value(values: dict[Any, Any], variable: Any) -> Any:
    return values[variable] if _is_variable(variable) else variable.val


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if _is_variable(atom)]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)
