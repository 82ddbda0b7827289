"""A JAX function that is split at host calls returns the results of the whole function."""

import unittest.mock

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402
from jax.extend.core import Primitive  # noqa: E402
from jax.interpreters import mlir  # noqa: E402

from keras_dist._backends import jax_rows, jax_split  # noqa: E402
from keras_dist._backends.jax_split import Traits, split_at  # noqa: E402
from keras_dist._engine import TableRows  # noqa: E402

double = Primitive("double")
double.multiple_results = True
double.def_impl(lambda *arrays: [2 * array for array in arrays])
double.def_abstract_eval(lambda *arrays: list(arrays))
mlir.register_lowering(
    double, mlir.lower_fun(lambda *arrays: [2 * array for array in arrays], multiple_results=True)
)
sent = Primitive("sent")  # whether to send, and arrays, of which rows may be known
sent.multiple_results = True
sent.def_abstract_eval(lambda now, *arrays, **_: list(arrays))


def recording(seen):
    def start(*arrays):
        seen.append("start")
        host = [np.asarray(array) for array in arrays]

        def wait():
            seen.append("wait")
            return [jax.device_put(2 * array) for array in host]

        return wait

    return start


def once(state, x):
    gradients = jax.grad(lambda w: (jnp.sin(x @ w["a"]) * w["b"]).sum())(state)
    a, b = double.bind(gradients["a"], gradients["b"])
    return {"a": state["a"] - a, "b": state["b"] - b}, (x.sum(), 3, None)


def twice(state, x):
    first, logs = once(state, x)
    second, more = once(first, x + 1)
    return second, (logs, more)


def inside_jit(state, x):
    return jax.jit(once)(state, x)


def nested(state, x):
    return jax.jit(lambda *arguments: jax.jit(twice)(*arguments))(state, x)


def only_a_host_call(state, x):
    return double.bind(state["a"])[0], x


def inside_a_loop(state, x):
    return jax.lax.fori_loop(0, 3, lambda _, w: double.bind(w)[0], x), state["a"]


doubled = jax.custom_vjp(lambda array: double.bind(array)[0])
doubled.defvjp(lambda a: (doubled(a), None), lambda _, gradient: (doubled(gradient),))


def with_a_custom_gradient(state, x):
    """Differentiates one host call, and not the other, of data."""
    return jax.grad(lambda w: (doubled(w["a"]) * doubled(x)[:3, :2]).sum())(state), x


def without_a_host_call(state, x):
    return state["a"] + x.sum()


def arguments():
    return {"a": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(2)}, jnp.arange(12.0).reshape(4, 3)


def layered(state, x):
    """A host call for the gradient of each layer, the last one first; then their norm."""

    def loss(layers):
        hidden = x
        for layer in layers:
            hidden = jnp.tanh(hidden @ layer)
        return hidden.sum(), hidden.mean()

    gradients, mean = jax.grad(loss, has_aux=True)(state)
    doubled = [double.bind(gradient)[0] for gradient in reversed(gradients)][::-1]
    norm = sum((gradient**2).sum() for gradient in doubled)
    return [w - g for w, g in zip(state, doubled, strict=True)], (mean, norm)


def layers():
    return [jnp.eye(3) * number for number in (1.0, 2.0, 3.0)], jnp.arange(12.0).reshape(4, 3) / 9


def layered_twice(state, x):
    """The second step has host calls that need the results of the first."""
    first, logs = layered(state, x)
    second, more = layered(first, x + 1)
    return second, (logs, more)


def test_each_overlapping_call_has_a_program_before_and_after_it():
    compiled, start = [], recording([])
    with pytest.MonkeyPatch.context() as patch:
        compile_one = jax_split._compiled
        patch.setattr(
            jax_split, "_compiled", lambda *given: compiled.append(1) or compile_one(*given)
        )
        split_at(double, start, layered)(*layers())
        assert len(compiled) == 2
        compiled.clear()
        split_at(double, start, layered, lambda: Traits(overlaps=True))(*layers())
        # The mean is computed beside the last gradient or after it.
        assert 6 <= len(compiled) <= 7


def clipped(state, x):
    """An update that depends on norms of gradients and weights, and on the number of the step."""
    loss = jax.grad(lambda w: (jnp.sin(x @ w["a"]) * w["b"]).sum())
    norms = {name: jnp.sqrt(jnp.square(w).sum()) for name, w in state.items()}
    gradients = loss(state)
    a, b = double.bind(gradients["a"], gradients["b"])
    scale = 1 / jnp.sqrt(jnp.square(a).sum() + jnp.square(b).sum())
    steps = {"a": scale * norms["a"] * a, "b": scale * norms["b"] * b}
    return {name: state[name] - step for name, step in steps.items()}, x.sum()


def test_replicas_do_not_depend_on_the_kernels_that_a_rank_chooses(monkeypatch):
    compile_one = jax_split._compiled

    def compile_on(rank):
        """Compiles as a rank whose kernels add up in an order of their own, where it may choose."""

        def compiled(jaxpr, free, options):
            program = compile_one(jaxpr, free, options)
            if options == {"xla_gpu_autotune_level": 0}:
                return program
            return lambda *given: [value * (1 + rank * 1e-6) for value in program(*given)]

        return compiled

    def start(*arrays):
        return lambda: [jnp.full(array.shape, 0.3) for array in arrays]  # equal on all ranks

    found = []
    for rank in range(2):
        monkeypatch.setattr(jax_split, "_compiled", compile_on(rank))
        split = split_at(double, start, clipped, lambda: Traits(are_alike=True))
        state, x = arguments()
        for _ in range(2):
            state, _ = split(state, x)
        found.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
    assert found[0] == found[1]


def test_inputs_that_the_host_still_reads_are_not_donated():
    def function(state, x):
        return double.bind(state["a"])[0], state["a"] + 1

    state, x = arguments()
    seen = []

    def start(array):
        view = np.asarray(array)
        before = view.copy()

        def wait():
            seen.append(np.array_equal(view, before))
            return [jax.device_put(2 * view)]

        return wait

    split_at(double, start, function, lambda: Traits(overlaps=True))(state, x)
    assert seen == [True]


PLAIN, ALIKE, OVERLAPS = Traits(), Traits(are_alike=True), Traits(overlaps=True)
CALLS = {
    **dict.fromkeys([once, inside_jit, only_a_host_call, clipped], 1),
    **dict.fromkeys([twice, nested], 2),
    **dict.fromkeys([with_a_custom_gradient, layered], 3),
    **dict.fromkeys([inside_a_loop, without_a_host_call], 0),
    layered_twice: 6,
}
ROUNDED = (layered, layered_twice, clipped)  # other programs add up in other orders
CASES = [(function, PLAIN) for function in CALLS if function not in ROUNDED]
CASES += [(function, ALIKE) for function in (once, twice, inside_jit, *ROUNDED)]
CASES += [(layered, OVERLAPS), (layered_twice, OVERLAPS)]


@pytest.mark.parametrize(("function", "traits"), CASES)
def test_a_split_function_equals_the_whole_function(function, traits):
    given = layers if "layered" in function.__name__ else arguments
    expected, seen = function(*given()), []
    split = split_at(double, recording(seen), function, lambda: traits)
    for _ in range(2):
        result = split(*given())
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for value, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-6 if traits == PLAIN else 1e-3)
    assert seen.count("start") == seen.count("wait") == 2 * CALLS[function]
    if traits.overlaps:  # the calls of a step begin before the first one is waited for
        assert seen == 2 * (CALLS[function] // 3) * (["start"] * 3 + ["wait"] * 3)


def test_what_an_early_call_does_not_need_follows_it():
    def weighed(state, x):  # the gradient needs the call, the loss does not
        [factor] = double.bind(jnp.abs(x).sum())
        loss = lambda w: (jnp.sin(x @ w["a"]) * w["b"]).sum()  # noqa: E731
        value, gradient = jax.value_and_grad(lambda w: factor * loss(w))(state)
        return {"a": state["a"] - gradient["a"], "b": state["b"]}, value

    programs = []
    for early in (False, True):
        traits = Traits(comes_early=early)
        split = split_at(double, recording([]), weighed, lambda traits=traits: traits)
        with unittest.mock.patch.object(jax_split, "_compiled", wraps=jax_split._compiled) as made:
            found = split(*arguments())
        programs.append(["sin" in str(call.args[0]) for call in made.call_args_list][::-1])
        for value, other in zip(
            jax.tree.leaves(found), jax.tree.leaves(weighed(*arguments())), strict=True
        ):
            np.testing.assert_allclose(value, other, rtol=1e-6)
    assert programs == [[True, False], [False, True]]


def test_the_first_argument_is_donated():
    split = split_at(double, recording([]), once)
    state, x = arguments()
    split(state, x)
    assert state["a"].is_deleted()
    assert not x.is_deleted()


def test_a_value_that_is_returned_twice_has_memory_for_each():
    def same(state, x):
        value = double.bind(x)[0] + state["a"] + state["b"]
        return {"a": value, "b": value, "c": -value}, x

    split = split_at(double, recording([]), same)
    state = {"a": jnp.ones(3), "b": jnp.ones(3)}
    for expected in (4, 10):  # the second call donates both
        state, _ = split(state, jnp.ones(3))
        assert state.pop("c").tolist() == [-expected] * 3
        assert state["a"].tolist() == state["b"].tolist() == [expected] * 3


def test_results_of_the_host_are_copied():
    memory = np.zeros((3, 2), np.float32)

    def start(array):
        memory[...] = np.asarray(array)
        return lambda: [jax.device_put(memory, may_alias=True)]

    result, _ = split_at(double, start, only_a_host_call)(*arguments())
    memory[...] = -1
    np.testing.assert_array_equal(result, np.arange(6.0).reshape(3, 2))


def embedded(ids, how):
    """Returns a loss of a table, in which rows are looked up in some way."""

    def loss(table):
        if how == "tied":
            return (jnp.take(table, ids, axis=0) @ table.T).sum()
        if how == "cast":
            return jnp.sin(jnp.take(table.astype("bfloat16"), ids, axis=0)).sum().astype("float32")
        if how == "regularized":
            return jnp.sin(jnp.take(table, ids, axis=0)).sum() + (table**2).sum()
        if how == "part":
            numbers = jax.lax.GatherDimensionNumbers((ids.ndim,), (0,), (0,))
            part = jax.lax.gather(table, ids[..., None], numbers, (1, 2), mode="fill")
            return jnp.sin(part).sum()
        if how == "indexed":
            return jnp.sin(table[ids]).sum()
        return jnp.sin(jnp.take(table, ids, axis=0, mode=how)).sum()

    return loss


@pytest.mark.parametrize("shape", [(), (5,), (4, 3)])
@pytest.mark.parametrize(
    ("how", "knows"),
    [
        ("fill", True),
        ("wrap", True),
        ("indexed", True),
        ("clip", False),
        ("part", False),
        ("cast", False),
        ("tied", False),
        ("regularized", False),
    ],
)
def test_rows_of_a_table_are_known_where_nothing_is_added_to_them(how, knows, shape):
    table = jnp.asarray(np.random.default_rng(0).standard_normal((40, 3)), "float32")
    ids = np.random.default_rng(1).integers(-45, 45, shape)
    seen = []

    def start(now, *arrays, tables, known):
        seen.append(known)
        if known == (None,):
            return lambda: arrays
        whole = TableRows(*jax_rows.known_rows(*map(np.asarray, arrays), 40), known[0]).dense()
        once = np.flatnonzero(whole.any(1))
        found = TableRows(whole[once], once, whole.shape)
        return lambda: [jax_rows.table_of(found, None)]

    def step(table, ids):
        gradient = jax.grad(embedded(ids, how))(table)
        return gradient, sent.bind(True, gradient, tables=(20,), known=None)[0]

    whole, found = split_at(sent, start, step)(table, ids)
    np.testing.assert_allclose(found, whole, rtol=1e-6)
    is_slice = how == "indexed" and not shape
    assert seen == [((40, 3),) if knows and not is_slice else (None,)]
