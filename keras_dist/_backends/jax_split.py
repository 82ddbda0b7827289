"""Splits a JAX function into programs at its host calls, see decisions 5 and 43.

The function is traced once. Its equations are assigned to stages: those that depend on no result of
the host, those that depend on the first, and so on. Each stage is compiled as a program; values
that a later stage needs stay on the device.

What replicas compute from the results of a host call must have equal bits on all ranks. For a GPU,
each rank compiles for itself, and XLA chooses between kernels by their measured speed, also where
they add up in different orders. So it does not choose for programs after such a call, and these
programs compute what depends on the state alone, such as the norms of weights.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from keras_dist._backends.jax_rows import take_rows
from keras_dist._compat.jax import abstract_of, subset_of

Wait = Callable[[], Sequence[Any]]
Start = Callable[..., Wait]


class Traits(NamedTuple):
    """How a host call splits a step."""

    overlaps: bool = False
    are_alike: bool = False
    comes_early: bool = False


NONE = 2**31  # host calls have smaller numbers
ALIKE = {"xla_gpu_autotune_level": 0}  # XLA takes its default instead of the fastest kernel


def split_at(
    marker: core.Primitive,
    start: Start,
    function: Callable[..., Any],
    traits: Callable[..., Traits] = lambda **_: Traits(),
) -> Any:
    """Compiles a function as programs with host calls between them."""
    programs: dict[Any, Any] = {}

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        signature = (structure, tuple(abstract_of(leaf) for leaf in leaves))
        program = programs.get(signature)
        if program is None:
            program = programs[signature] = _Program(marker, start, function, traits, arguments)
        return program(leaves)

    return run


class _Program:
    """A function traced and split for certain shapes of its arguments."""

    def __init__(
        self, marker: core.Primitive, start: Start, function: Any, traits: Any, arguments: Any
    ):
        self._start = start
        flat, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        while any(_is_call_of(marker, equation) for equation in flat.jaxpr.eqns):
            flat = jax.make_jaxpr(_inlined(flat, marker))(*jax.tree.leaves(arguments))
        self._structure = jax.tree.structure(shapes)
        self._inputs = flat.jaxpr.invars
        self._outputs = flat.jaxpr.outvars
        self._constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        # The host reuses the memory of its results, so the step returns copies of them.
        equations = take_rows(flat.jaxpr.eqns, marker)
        of_host = {v for e in equations if e.primitive is marker for v in e.outvars}
        self._copied = _in_use(self._outputs, of_host)
        count = len(jax.tree.leaves(arguments[0]))
        state, data = self._inputs[:count], self._inputs[count:]
        stages = _Stages(equations, marker, traits, data)
        donated = set(state) - stages.read_meanwhile
        self._stages = self._compile(flat.jaxpr, stages, donated)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        values = _Values(dict(zip(self._inputs, leaves, strict=True)) | self._constants)
        for programs, markers in self._stages:
            # JAX returns before a program has ended: the next ones compute while the host waits for
            # the results of the first.
            for compiled, inputs, outputs in programs:
                values.set(outputs, compiled(*map(values.of, inputs)))
            for marker in markers:
                arrays = map(values.of, marker.invars)
                values.expect(marker.outvars, self._start(*arrays, **marker.params))
        values.wait()
        results = [
            jax.numpy.array(values.of(variable)) if copied else values.of(variable)
            for variable, copied in zip(self._outputs, self._copied, strict=True)
        ]
        return jax.tree.unflatten(self._structure, results)

    def _compile(self, jaxpr: Any, stages: "_Stages", donated: set[Any]) -> list[Any]:
        """Returns, for each stage, its programs with inputs and outputs, and its host calls."""
        # From the last program to the first: values that later programs need are outputs.
        needed = set(_variables(self._outputs))
        compiled: list[Any] = []
        for stage in range(stages.last, -1, -1):
            markers, programs = stages.markers[stage], []
            for marker in markers:
                needed.update(_variables(marker.invars))
            for equations in reversed(stages.programs(stage)):
                computed = {v for equation in equations for v in equation.outvars}
                outputs = [v for e in equations for v in e.outvars if v in needed]
                read = [v for equation in equations for v in _variables(equation.invars)]
                inputs = [v for v in dict.fromkeys(read) if v not in computed]
                free = [v in donated and v not in needed for v in inputs]
                options = ALIKE if stage >= stages.alike else None
                program = _compiled(subset_of(jaxpr, equations, inputs, outputs), free, options)
                programs.append((program, inputs, outputs))
                needed.update(inputs)
            compiled.append((programs[::-1], markers))
        return compiled[::-1]


class _Values:
    """The values of variables, some of which the host may still compute."""

    def __init__(self, known: dict[Any, Any]):
        self._known = known
        self._waits: dict[Any, tuple[Sequence[Any], Wait]] = {}

    def of(self, atom: Any) -> Any:
        """Returns the value of a variable or literal; waits for it if necessary."""
        if not _is_variable(atom):
            return atom.val
        if atom in self._waits:
            self._finish(*self._waits[atom])
        return self._known[atom]

    def set(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        self._known.update(zip(variables, values, strict=True))

    def expect(self, variables: Sequence[Any], wait: Wait) -> None:
        self._waits.update(dict.fromkeys(variables, (variables, wait)))

    def wait(self) -> None:
        while self._waits:
            self._finish(*next(iter(self._waits.values())))

    def _finish(self, variables: Sequence[Any], wait: Wait) -> None:
        for variable in variables:
            del self._waits[variable]
        self.set(variables, wait())


class _Stages:
    """The equations and host calls of a function by stage."""

    def __init__(
        self, equations: Sequence[Any], marker: core.Primitive, traits: Any, data: Sequence[Any]
    ):
        self._stage_of: dict[Any, int] = collections.defaultdict(int)  # of a variable
        #: number of the last host call of the stage before, if it overlaps, that a variable needs
        self._after: dict[Any, int] = collections.defaultdict(int)
        #: number of the first host call of its stage that needs a variable
        self._before: dict[Any, int] = collections.defaultdict(lambda: NONE)
        #: equations of each stage, each with the number that its results have in `_after`
        self._equations: dict[int, list[tuple[Any, int]]] = collections.defaultdict(list)
        self.markers: dict[int, list[Any]] = collections.defaultdict(list)
        #: inputs of host calls that read them while programs compute
        self.read_meanwhile: set[Any] = set()
        self._overlapping: set[int] = set()  # stages
        self.alike = NONE  #: first stage that all ranks compute alike
        numbers: dict[int, int] = {}  # of host calls
        for equation in equations:
            inputs = _variables(equation.invars)
            stage = max((self._stage_of[v] for v in inputs), default=0)
            after = max((self._after[v] for v in inputs if self._stage_of[v] == stage), default=0)
            if equation.primitive is marker:
                numbers[id(equation)] = len(numbers) + 1
                self.markers[stage].append(equation)
                stage, after = stage + 1, 0
                call = traits(**equation.params)
                if call.overlaps:
                    after = numbers[id(equation)]
                    self.read_meanwhile.update(inputs)
                    self._overlapping.add(stage - 1)
                if call.are_alike:
                    self.alike = min(self.alike, stage)
            else:
                self._equations[stage].append((equation, after))
            self._stage_of.update(dict.fromkeys(equation.outvars, stage))
            self._after.update(dict.fromkeys(equation.outvars, after))
        for stage in sorted(self.markers):
            if all(traits(**call.params).comes_early for call in self.markers[stage]):
                self._delay(stage)
        self._postpone(set(data))
        self.last = max([0, *self._equations, *(stage + 1 for stage in self.markers)])
        for stage in self._overlapping:
            for equation in self.markers[stage][::-1]:
                self._need(equation, stage, numbers[id(equation)])
            for equation, _ in self._equations[stage][::-1]:
                self._need(equation, stage, self._first_call_after(equation))

    def _delay(self, stage: int) -> None:
        """Moves what the host calls of a stage do not need to the next stage."""
        needed = {v for call in self.markers[stage] for v in _variables(call.invars)}
        for equation in self._move(stage, stage + 1, needed, lambda e: not e.effects):
            self._stage_of.update(dict.fromkeys(equation.outvars, stage + 1))
            self._after.update(dict.fromkeys(equation.outvars, 0))

    def _postpone(self, data: set[Any]) -> None:
        """Moves what depends on the state alone to the first stage that ranks compute alike."""
        early = range(0 if self.alike == NONE else self.alike)
        for equation in (e for stage in early for e, _ in self._equations[stage]):
            if equation.effects or not data.isdisjoint(_variables(equation.invars)):
                data.update(equation.outvars)
        calls = (e for stage in early for e in self.markers[stage])
        needed = {variable for equation in calls for variable in _variables(equation.invars)}
        for stage in reversed(early):
            self._move(stage, self.alike, needed, lambda e: data.isdisjoint(e.outvars))

    def _move(
        self, stage: int, target: int, needed: set[Any], may_move: Callable[[Any], bool]
    ) -> list[Any]:
        """Moves equations of whose results none is needed to another stage, and returns them."""
        kept, moved = [], []
        for equation, after in reversed(self._equations[stage]):
            if may_move(equation) and needed.isdisjoint(equation.outvars):
                moved.append((equation, 0))
            else:
                kept.append((equation, after))
                needed.update(_variables(equation.invars))
        self._equations[stage] = kept[::-1]
        self._equations[target][:0] = moved[::-1]
        return [equation for equation, _ in moved]

    def _need(self, equation: Any, stage: int, number: int) -> None:
        """Notes the first host call for which the inputs of an equation are needed."""
        for variable in _variables(equation.invars):
            if self._stage_of[variable] == stage:
                self._before[variable] = min(self._before[variable], number)

    def _first_call_after(self, equation: Any) -> int:
        return min((self._before[v] for v in equation.outvars), default=NONE)

    def programs(self, stage: int) -> list[list[Any]]:
        """Returns the equations of each program of a stage, in the order of the programs."""
        found: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
        for equation, after in self._equations[stage]:
            found[self._first_call_after(equation), after].append(equation)
        return [found[key] for key in sorted(found)]


def _compiled(jaxpr: Any, free: Sequence[bool], options: Any) -> Any:
    """Compiles a jaxpr; free inputs are donated to outputs of the same shape and dtype."""
    unmatched = collections.Counter((v.aval.shape, v.aval.dtype) for v in jaxpr.outvars)
    donated = []
    for number, (variable, is_free) in enumerate(zip(jaxpr.invars, free, strict=True)):
        spec = (variable.aval.shape, variable.aval.dtype)
        if is_free and unmatched[spec]:
            unmatched[spec] -= 1
            donated.append(number)
    function = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))
    return jax.jit(function, donate_argnums=donated, compiler_options=options)


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


def _inlined(closed: Any, marker: core.Primitive) -> Callable[..., list[Any]]:
    """Returns a function in which the called functions that contain the marker are inlined."""
    jaxpr = closed.jaxpr

    def run(*leaves: Any) -> list[Any]:
        values = _Values(dict(zip(jaxpr.invars, leaves, strict=True)))
        values.set(jaxpr.constvars, closed.consts)
        for equation in jaxpr.eqns:
            inputs = list(dict.fromkeys(_variables(equation.invars)))
            if _is_call_of(marker, equation):
                inner, atoms = _called(equation), equation.invars
            else:
                inner = core.ClosedJaxpr(subset_of(jaxpr, [equation], inputs, equation.outvars), [])
                atoms = inputs
            values.set(equation.outvars, core.jaxpr_as_fun(inner)(*map(values.of, atoms)))
        return [values.of(atom) for atom in jaxpr.outvars]

    return run


def _in_use(atoms: Sequence[Any], used: set[Any]) -> list[bool]:
    """Returns whether each atom is a variable whose memory is in use, also by an atom before it."""
    # `jax.jit` returns an array of its own for each result, so that a caller may donate all.
    found = []
    for atom in atoms:
        found.append(_is_variable(atom) and atom in used)
        used.update(_variables([atom]))
    return found


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if _is_variable(atom)]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)
