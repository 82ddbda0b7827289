"""keras_dist.jax: collectives of arrays and pytrees, inside and outside `jax.jit`."""

import jax
import jax.extend.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import keras_dist
import keras_dist.jax as hvd
from keras_dist import errors, ops
from keras_dist._backends import jax_callback

pytestmark = pytest.mark.jobs("tensorflow-2")


@pytest.fixture(autouse=True, scope="module")
def started():
    hvd.init()


@pytest.fixture(params=[False, True], ids=["eager", "jit"])
def compiled(request):
    return jax.jit if request.param else (lambda function: function)


def own(shape, dtype="float32", rank=None):
    """Returns an array of small integers, different on each rank."""
    rank = hvd.rank() if rank is None else rank
    return (((np.arange(np.prod(shape)) * (rank + 2) + rank) % 5) + 1).reshape(shape).astype(dtype)


def stacked(shape, dtype="float32"):
    return np.stack([own(shape, dtype, rank) for rank in range(hvd.size())])


def equal(found, expected):
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_allreduce_of_every_op_and_dtype(compiled):
    for dtype in ("uint8", "int8", "int16", "int32", "float16", ml_dtypes.bfloat16, "float32"):
        for shape in [(), (5, 3)]:
            x, stack = jnp.asarray(own(shape, dtype)), stacked(shape, dtype)

            def all_ops(x):
                ops = (hvd.Sum, hvd.Min, hvd.Max, hvd.Product, "average")
                return [hvd.allreduce(x, op) for op in ops]

            total, minimum, maximum, product, mean = compiled(all_ops)(x)
            assert total.dtype == x.dtype and total.shape == shape
            equal(total, stack.sum(0).astype(dtype))
            equal(minimum, stack.min(0))
            equal(maximum, stack.max(0))
            equal(product, stack.prod(0).astype(dtype))
            equal(mean, (stack.astype("float64").sum(0) / hvd.size()).astype(dtype))


def test_average_of_int64_does_not_overflow(compiled):
    with jax.enable_x64(True):
        x = jnp.array([2**63 - 1 - 2 * hvd.rank(), -(2**63)])
        assert x.dtype == "int64"
        equal(compiled(hvd.allreduce)(x), [2**63 - hvd.size(), -(2**63)])


def test_data_movement_and_reducescatter(compiled):
    size, rank = hvd.size(), hvd.rank()
    x = own((2 * size, 3))
    stack = stacked((2 * size, 3))

    def all_ops(x):
        return (
            hvd.allgather(x),
            hvd.broadcast(x, size - 1),
            hvd.alltoall(x),
            hvd.reducescatter(x, "sum"),
            *hvd.grouped_allgather([x, x]),
            *hvd.grouped_reducescatter([x[:, 0], (x[1:] * 2).astype("int32")], "sum"),
        )

    gathered, sent, exchanged, scattered, first, second, column, uneven = compiled(all_ops)(x)
    for found in (gathered, first, second):
        equal(found, stack.reshape(-1, 3))
    equal(sent, stack[-1])
    equal(exchanged, stack[:, 2 * rank : 2 * rank + 2].reshape(-1, 3))
    equal(scattered, stack.sum(0)[2 * rank : 2 * rank + 2])
    equal(column, stack.sum(0)[2 * rank : 2 * rank + 2, 0])
    equal(uneven, np.array_split(stack.sum(0)[1:] * 2, size)[rank])


def test_different_lengths_outside_jit():
    rows = hvd.allgather(jnp.ones((hvd.rank() + 1, 2)))
    assert len(rows) == sum(range(1, hvd.size() + 1))
    rows, received = hvd.alltoall(jnp.ones(hvd.size()), splits=[1] * hvd.size())
    assert rows.shape == (hvd.size(),) and received.tolist() == [1] * hvd.size()
    with pytest.raises(keras_dist.errors.ArgumentError, match="no splits in an alltoall of"):
        jax.jit(lambda x: hvd.alltoall(x, splits=[1] * hvd.size()))(jnp.ones(hvd.size()))


@pytest.mark.parametrize("with_splits", [False, True])
def test_gradients_with_unequal_numbers_of_rows(with_splits):
    """Outside `jax.jit`: each row gets the gradient of its place at the receiver."""
    size, rank = hvd.size(), hvd.rank()
    counts = np.array([[2 * source + 1] * size for source in range(size)])
    if with_splits:
        counts += np.arange(size)
    unsent = 1 if with_splits else 0  # after the last row of the splits

    def loss(x):
        result = hvd.alltoall(x, counts[rank] if with_splits else None)
        rows = result[0] if with_splits else result
        return (rows[:, 0] * (100.0 * rank + 1 + jnp.arange(len(rows)))).sum()

    found = jax.grad(loss)(jnp.zeros((counts[rank].sum() + unsent, 1)))
    expected = [
        100 * receiver + counts[:rank, receiver].sum() + 1 + i
        for receiver in range(size)
        for i in range(counts[rank, receiver])
    ]
    equal(found[:, 0], np.array([*expected, *[0] * unsent]))

    def gathered(x):
        rows = hvd.allgather(x)
        return (rows * jnp.arange(1.0, len(rows) + 1)).sum()

    start = rank * (rank + 1) // 2
    equal(jax.grad(gathered)(jnp.zeros(rank + 1)), np.arange(1.0, rank + 2) + start)
    length = 2 * size + 1
    weights = jnp.arange(1.0, length + 1)
    own = np.array_split(np.arange(length), size)[rank]

    def scattered(x):
        return (hvd.reducescatter(x, hvd.Sum) * weights[own]).sum()

    equal(jax.grad(scattered)(jnp.zeros(length)), np.array(weights) * size)
    sent = jax.grad(lambda x: (hvd.broadcast(x, size - 1) * (rank + 1)).sum())(jnp.zeros(3))
    equal(sent, np.full(3, (size + 1) / 2 if rank == size - 1 else 0))


def test_gradients(compiled):
    size, rank = hvd.size(), hvd.rank()
    x = own((2 * size, 2))
    weight = float(rank + 1)
    weights = np.arange(1, size + 1)

    def gradient(operation):
        return compiled(jax.grad(lambda x: (weight * operation(x) ** 2).sum()))(x)

    stack = stacked((2 * size, 2))
    total, mean = stack.sum(0), stack.mean(0)
    np.testing.assert_allclose(
        gradient(lambda x: hvd.allreduce(x, hvd.Sum)), 2 * total * weights.sum(), rtol=1e-6
    )
    np.testing.assert_allclose(gradient(hvd.allreduce), 2 * mean * weights.mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient(hvd.allgather), 2 * x * weights.mean(), rtol=1e-6)
    of_group = gradient(lambda x: jnp.concatenate(hvd.grouped_allgather([x, 3 * x[:1]])))
    expected = 2 * x * weights.mean() * (1 + 9 * (np.arange(2 * size) == 0))[:, None]
    np.testing.assert_allclose(of_group, expected, rtol=1e-6)
    integers = jnp.arange(size)
    beside_integers = gradient(lambda x: hvd.grouped_allgather([integers, x])[1])
    np.testing.assert_allclose(beside_integers, 2 * x * weights.mean(), rtol=1e-6)
    np.testing.assert_allclose(
        gradient(hvd.broadcast), 2 * x * weights.mean() * (rank == 0), rtol=1e-6
    )
    infinite = gradient(lambda x: hvd.broadcast(x) * jnp.inf)
    equal(infinite, np.full(x.shape, 0 if rank else np.inf))
    np.testing.assert_allclose(
        gradient(hvd.alltoall), 2 * x * np.repeat(weights, 2)[:, None], rtol=1e-6
    )
    np.testing.assert_allclose(
        gradient(lambda x: hvd.reducescatter(x, hvd.Sum)),
        2 * total * np.repeat(weights, 2)[:, None] * size,
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        gradient(lambda x: hvd.grouped_reducescatter([x, x[:, 0]])[0]),
        2 * mean * np.repeat(weights, 2)[:, None],
        rtol=1e-6,
    )


SLOPES = {
    "sum": (lambda x: hvd.allreduce(x, "sum"), 1),
    "average": (hvd.allreduce, 1),
    "grouped": (lambda x: jnp.concatenate(hvd.grouped_allreduce([x, 2 * x], "sum")), 1),
    "alltoall": (hvd.alltoall, 1),
    "pmean": (lambda x: hvd.pmean({"a": [x]})["a"][0], 1),
    "allgather": (hvd.allgather, 1 / hvd.size()),
    "broadcast": (hvd.broadcast, 1 / hvd.size()),
    "reducescatter": (hvd.reducescatter, hvd.size()),
    "grouped sum": (lambda x: hvd.grouped_reducescatter([x, x], "sum")[1], hvd.size()),
}


@pytest.mark.parametrize("name", SLOPES)
def test_gradients_against_finite_differences(name):
    operation, factor = SLOPES[name]
    size, rank = hvd.size(), hvd.rank()
    x, step = np.arange(2.0 * size, dtype="float32").reshape(size, 2) / 4 + rank + 1, 0.5

    def loss(x):
        result = operation(x).ravel()
        return (result**2 * (jnp.arange(result.size) + rank + 1)).sum()

    found = np.asarray(jax.grad(loss)(x))
    for source in range(size):
        direction = np.linspace(0.5, 1, x.size, dtype="float32").reshape(x.shape) * (source == rank)
        # A central difference is exact for a quadratic function.
        slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
        total = hvd.allreduce(slope, "sum")
        if source == rank:
            np.testing.assert_allclose((found * direction).sum(), factor * total, rtol=1e-4)


def test_steps_equal_those_of_one_process():
    rng = np.random.default_rng(0)
    batches = rng.standard_normal((4, hvd.size(), 8, 3)).astype("float32")
    start = {"w": rng.standard_normal((3, 1)).astype("float32"), "b": [np.zeros(1, "float32")]}

    def loss_of(weights, x):
        return (
            (jnp.tanh(x @ weights["w"]) + weights["b"][0] - x.sum(1, keepdims=True)) ** 2
        ).mean()

    def step_by(average):
        def step(weights, x):
            gradients = average(jax.grad(loss_of)(weights, x))
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

        return step

    alone = start
    other = {"w": start["w"] + hvd.rank(), "b": [start["b"][0] - hvd.rank()]}
    shared = hvd.broadcast_parameters(other, root_rank=0)
    step = jax.jit(step_by(hvd.pmean))
    for batch in batches:
        alone = step_by(lambda tree: tree)(alone, batch.reshape(-1, 3))
        shared = step(shared, batch[hvd.rank()])
    assert jax.tree.structure(shared) == jax.tree.structure(alone)
    for found, expected in zip(jax.tree.leaves(shared), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        equal(found, hvd.broadcast(found))
    assert hvd.average_gradients is hvd.pmean
    equal(hvd.psum({"a": jnp.ones(2)})["a"], np.full(2, hvd.size()))


@jax.tree_util.register_pytree_node_class
class Stateful:
    """A node of a pytree whose text differs between ranks."""

    def __init__(self, weights, function):
        self.weights, self.function = weights, function

    def tree_flatten(self):
        return (self.weights,), self.function

    @classmethod
    def tree_unflatten(cls, function, leaves):
        return cls(*leaves, function)


def test_broadcast_parameters_keeps_the_types_of_leaves():
    rank = hvd.rank()
    tree = {
        "key": jax.random.key(rank),
        "step": np.int64(2**40 + rank),
        "rows": [np.full(2, rank, "float64"), None, ()],
        "numbers": (3 + rank, 0.5 + rank, bool(rank)),
        "state": Stateful(jnp.full(3, rank), lambda x: x),
    }
    found = hvd.broadcast_parameters(tree)
    equal(jax.random.key_data(found["key"]), jax.random.key_data(jax.random.key(0)))
    assert found["step"] == 2**40 and found["step"].dtype == np.int64
    equal(found["rows"][0], np.zeros(2))
    assert found["rows"][0].dtype == np.float64 and found["rows"][1:] == [None, ()]
    assert found["numbers"] == (3, 0.5, False) and type(found["numbers"][2]) is bool
    assert isinstance(found["state"].weights, jax.Array)
    equal(found["state"].weights, np.zeros(3))


def test_calls_wait_for_programs_started_before_them():
    @jax.jit
    def slow(matrix):
        return jax.lax.fori_loop(0, 30, lambda _, a: jnp.tanh(a @ a), matrix)

    @jax.jit
    def reduce(matrix):
        return hvd.allreduce(matrix[0, 0] * 0 + 100, hvd.Sum)

    ready, matrix = jnp.ones(()).block_until_ready(), jnp.eye(600)
    reduce(slow(matrix)).block_until_ready()
    later = [
        lambda: hvd.allreduce(ready, hvd.Sum),
        lambda: hvd.allreduce(ready, hvd.Sum, name="with a name"),
        lambda: keras_dist.allreduce_async(np.float32(1), hvd.Sum).wait(),
        lambda: sum(hvd.allgather_object(1)),
    ]
    for call in later:
        batch = slow(matrix)
        if hvd.rank() == 0:  # on the other ranks the program is still running
            batch.block_until_ready()
        first, second = reduce(batch), call()
        assert (float(first), float(second)) == (100 * hvd.size(), hvd.size())
    last = reduce(slow(matrix))
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert float(last) == 100 * hvd.size()


def recorded_order(monkeypatch):
    """Returns a list to which each call of `allreduce` adds its factor before the reduction."""
    order, reduce = [], ops.allreduce

    def recorded(array, op, name, prescale_factor, *others, **options):
        order.append(prescale_factor)
        return reduce(array, op, name, prescale_factor, *others, **options)

    monkeypatch.setattr(ops, "allreduce", recorded)
    return order


def test_operations_run_in_program_order(monkeypatch):
    order = recorded_order(monkeypatch)

    @jax.jit
    def program(matrix):
        # The first operation has its argument last: dependencies alone would run it last.
        slow = jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ a), matrix)
        late = hvd.allreduce(slow[0, 0] * 0 + 1, "sum", prescale_factor=0.5)
        early = [hvd.allreduce(jnp.ones(3), "sum", prescale_factor=f) for f in (1.0, 2.0, 4.0)]
        return late, *early

    results = program(jnp.eye(300))
    for found, factor in zip(results, (0.5, 1, 2, 4), strict=True):
        equal(found, np.full(found.shape, factor * hvd.size()))
    assert order == [0.5, 1.0, 2.0, 4.0]


def test_operations_of_loops_branches_and_later_programs_run_in_program_order(monkeypatch):
    order = recorded_order(monkeypatch)
    ones = jnp.ones(3).block_until_ready()

    def scaled(factor):
        return lambda x: hvd.allreduce(x * 0 + 1, "sum", prescale_factor=factor)

    @jax.jit
    def first(matrix, flag):
        slow = jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ a), matrix)
        late = scaled(1.0)(slow[:3, 0])
        # None of these needs the results of others.
        looped = jax.lax.scan(lambda c, x: (c, scaled(2.0)(x)), 0, jnp.ones((3, 3)))[1]
        branch = jax.lax.cond(flag, scaled(4.0), scaled(8.0), ones)
        return late, looped, branch, scaled(16.0)(ones)

    second = jax.jit(scaled(32.0))
    found = *first(jnp.eye(300), True), second(ones)
    for result, factor in zip(found, (1, 2, 4, 16, 32), strict=True):
        equal(result, np.full(result.shape, factor * hvd.size()))
    assert order == [1, 2, 2, 2, 4, 16, 32]


@pytest.mark.parametrize("in_place", [True, False])
def test_loops_and_branches_have_the_bits_of_single_calls(monkeypatch, in_place):
    if not in_place:  # as other devices, and versions of JAX without buffer callbacks
        monkeypatch.setattr(jax_callback, "has_buffer_callbacks", lambda context: False)
    rows = jnp.asarray(np.random.default_rng(hvd.rank()).standard_normal((4, 40_000)), "float32")

    def step(carry, given):
        number, row = given
        mean = hvd.allreduce(jnp.maximum(carry, row))
        out = jax.lax.cond(
            number % 2 == 0,
            lambda x: hvd.allreduce(x, "sum", prescale_factor=1 / 3),
            lambda x: hvd.allreduce(x, "max"),
            row,
        )
        return mean, out

    program = jax.jit(lambda rows: jax.lax.scan(step, rows[0], (jnp.arange(4), rows)))
    mean, outs = program(rows)
    carry = rows[0]
    for number, row in enumerate(rows):
        carry, out = step(carry, (np.int32(number), row))
        assert np.asarray(outs[number]).tobytes() == np.asarray(out).tobytes()
    assert np.asarray(mean).tobytes() == np.asarray(carry).tobytes()
    assert ("xla_buffer_python" in program.lower(rows).as_text()) is in_place


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_programs_reduce_every_dtype_and_shape(dtype, shape):
    x = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) + hvd.rank(), dtype)
    op = "max" if dtype == "bool" else "sum"
    donating = jax.jit(lambda x: hvd.allreduce(x, op), donate_argnums=0)
    expected = np.asarray(hvd.allreduce(x, op))
    found = np.asarray(donating(x + x.dtype.type(0)))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda: jax.vmap(hvd.allreduce)(jnp.ones((2, 3))),
        lambda: jax.jit(jax.grad(lambda x: hvd.allreduce(x, "max").sum()))(jnp.ones(3)),
    ],
)
def test_transformations_without_meaning_are_explained(transformed):
    with pytest.raises(errors.ArgumentError, match=r"Use jax\.grad or jax\.vjp"):
        transformed()


def test_a_program_that_is_not_compiled_reduces():
    traced = jax.make_jaxpr(hvd.allreduce)(jnp.ones(3))
    [found] = jax.extend.core.jaxpr_as_fun(traced)(jnp.full(3, float(hvd.rank())))
    equal(found, np.full(3, (hvd.size() - 1) / 2))


def test_mismatches_are_errors_on_every_rank_and_the_job_continues():
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    odd = hvd.rank() == 1
    with pytest.raises(RuntimeError, match=r"rank \d of"):
        hvd.allreduce(jnp.ones(3 + odd))
    with pytest.raises(Exception, match=r"rank \d of"):
        jax.block_until_ready(jax.jit(hvd.allreduce)(jnp.ones(3 + odd)))
    with pytest.raises(TypeError, match=r"use the functions of .* keras_dist\.jax"):
        jax.jit(keras_dist.allreduce)(jnp.ones(3))
    equal(hvd.allreduce(jnp.ones(2), "sum"), np.full(2, hvd.size()))


@pytest.mark.skipif(hvd.size() == 1, reason="a set of one rank is the whole job")
def test_process_sets(compiled):
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    x = jnp.ones(2) * hvd.rank()
    if even.included():
        found = compiled(lambda x: hvd.pmean(x, even))(x)
        equal(found, np.full(2, np.mean(even.ranks)))
    else:
        with pytest.raises(keras_dist.errors.ArgumentError, match="process_set"):
            hvd.pmean(x, even)
    hvd.remove_process_set(even)


def test_compression_of_arrays(compiled):
    for compression, narrow in (
        (hvd.Compression.none, "float32"),
        (hvd.Compression.fp16, "float16"),
        (hvd.Compression.bf16, "bfloat16"),
    ):
        compressed = compiled(compression.compress)(jnp.asarray(own((5,))))
        assert isinstance(compressed, jax.Array) and compressed.dtype == narrow
        result = compiled(lambda x, c=compression: c.decompress(x, jnp.float32))(compressed)
        assert result.dtype == "float32"
        equal(result, own((5,)))
