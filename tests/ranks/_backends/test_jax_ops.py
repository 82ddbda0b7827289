"""keras_dist.jax: pytrees, and the order of calls. See `test_faces` for its operations."""

import jax
import jax.extend.core
import jax.numpy as jnp
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


def equal(found, expected):
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_average_of_int64_does_not_overflow(compiled):
    with jax.enable_x64(True):
        x = jnp.array([2**63 - 1 - 2 * hvd.rank(), -(2**63)])
        assert x.dtype == "int64"
        equal(compiled(hvd.allreduce)(x), [2**63 - hvd.size(), -(2**63)])


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


def test_operations_of_loops_branches_and_later_programs_run_in_program_order(monkeypatch):
    order, reduce = [], ops.allreduce

    def recorded(array, op, name, prescale_factor, *others, **options):
        order.append(prescale_factor)
        return reduce(array, op, name, prescale_factor, *others, **options)

    monkeypatch.setattr(ops, "allreduce", recorded)
    ones = jnp.ones(3).block_until_ready()

    def scaled(factor):
        return lambda x: hvd.allreduce(x * 0 + 1, "sum", prescale_factor=factor)

    @jax.jit
    def first(matrix, flag):
        # The first operation has its argument last: dependencies alone would run it last.
        slow = jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ a), matrix)
        late = scaled(1.0)(slow[:3, 0])
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


def test_a_program_may_donate_what_it_reduces():
    given = [
        jnp.asarray(np.arange(np.prod(shape)).reshape(shape) + hvd.rank(), dtype)
        for dtype in ("bool", "int4", "int8", "bfloat16", "float16", "float32", "complex64")
        for shape in ((), (0,), (3, 5))
    ]

    def reduce(arrays):
        return [hvd.allreduce(x, "max" if x.dtype == bool else "sum") for x in arrays]

    expected = list(map(np.asarray, reduce(given)))
    copies = [jnp.array(array) for array in given]
    for one, other in zip(jax.jit(reduce, donate_argnums=0)(copies), expected, strict=True):
        found = np.asarray(one)
        assert (found.dtype, found.shape) == (other.dtype, other.shape)
        assert found.tobytes() == other.tobytes()


def test_a_transformation_without_meaning_is_explained():
    with pytest.raises(errors.ArgumentError, match=r"Use jax\.grad or jax\.vjp"):
        jax.vmap(hvd.allreduce)(jnp.ones((2, 3)))
    assert hvd.average_gradients is hvd.pmean


def test_a_program_of_several_devices_is_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    rows = jax.sharding.PartitionSpec("x")
    reduced = jax.shard_map(hvd.allreduce, mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(errors.ArgumentError, match=r"a program of 2 devices.* outside of it"):
        jax.jit(reduced).trace(jnp.ones(4)).lower(lowering_platforms=("cpu",))


def test_gradients_of_integers_are_left_alone(compiled):
    tree = {"offset": jnp.arange(3), "scale": jnp.ones(3)}

    def slope(x):
        found = jax.grad(lambda t: (x * t["scale"] + t["offset"]).sum(), allow_int=True)(tree)
        found = hvd.pmean(found)
        assert found["offset"].dtype == jax.dtypes.float0
        return found["scale"]

    equal(compiled(slope)(jnp.full(3, float(hvd.rank()))), np.full(3, (hvd.size() - 1) / 2))


def test_a_maximum_may_be_left_out_of_a_gradient(compiled):
    def loss_of(x):  # the logarithm of a sum of exponentials over all ranks
        largest = jax.lax.stop_gradient(hvd.allreduce(x.max(), "max"))
        return jnp.log(hvd.allreduce(jnp.exp(x - largest).sum(), "sum")) + largest

    x, size = jnp.log(jnp.arange(1.0, 4.0)) + 90 * hvd.rank(), hvd.size()
    shares = np.arange(1, 4) / 6 if hvd.rank() == size - 1 else np.zeros(3)
    np.testing.assert_allclose(compiled(jax.grad(loss_of))(x), size * shares, rtol=1e-5, atol=1e-30)


def test_a_program_that_is_not_compiled_reduces():
    traced = jax.make_jaxpr(hvd.allreduce)(jnp.ones(3))
    [found] = jax.extend.core.jaxpr_as_fun(traced)(jnp.full(3, float(hvd.rank())))
    equal(found, np.full(3, (hvd.size() - 1) / 2))


def test_numpy_collectives_in_a_program_name_the_remedy():
    with pytest.raises(TypeError, match=r"use the functions of .* keras_dist\.jax"):
        jax.jit(keras_dist.allreduce)(jnp.ones(3))
    equal(hvd.allreduce(jnp.ones(2), "sum"), np.full(2, hvd.size()))


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
