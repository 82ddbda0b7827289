"""keras_dist.tensorflow: custom loops with the tape or the optimizer. See `test_loops`."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests the TensorFlow backend", allow_module_level=True)

import tensorflow as tf

import keras_dist.tensorflow as hvd

pytestmark = pytest.mark.jobs("tensorflow-2")

SIZE, RANK = hvd.size(), hvd.rank()
MEAN = (SIZE - 1) / 2  # mean of the ranks


def products(persistent=False):
    """Returns a recorded tape, and sources whose gradients are the rank plus one."""
    sources = [tf.Variable(tf.ones([2])), tf.Variable(tf.ones([3, 2])), tf.Variable(1.0)]
    with tf.GradientTape(persistent=persistent) as tape:
        target = (RANK + 1.0) * tf.add_n([tf.reduce_sum(one) for one in sources[:2]])
    return tape, target, sources


# --- The tape


def test_gradients_are_averaged_in_the_structure_of_the_sources():
    tape, target, (a, b, unused) = products(persistent=True)
    ours = hvd.DistributedGradientTape(tape)
    assert isinstance(ours, tf.GradientTape)
    found = ours.gradient(target, {"a": a, "rest": [b, unused]})
    np.testing.assert_allclose(found["a"], [MEAN + 1] * 2)
    np.testing.assert_allclose(found["rest"][0], np.full((3, 2), MEAN + 1))
    assert found["rest"][1] is None
    np.testing.assert_allclose(ours.gradient(target, a), [MEAN + 1] * 2)  # the tape is persistent
    np.testing.assert_allclose(tape.gradient(target, a), [RANK + 1.0] * 2)  # as the original is
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        x = tf.constant([1.0, 2.0])
        tape.watch(x)
        target = (RANK + 1.0) * tf.reduce_sum(x)
    np.testing.assert_allclose(tape.gradient(target, x), [MEAN + 1] * 2)
    unrelated = tf.constant(2.0)  # of which no rank uses the source
    with tf.GradientTape() as tape:
        target = 3.0 * unrelated
    assert hvd.DistributedGradientTape(tape).gradient(target, [a]) == [None]


def test_gradients_of_an_embedding_are_sparse_unless_sparse_as_dense():
    for dense in (False, True):
        table = tf.Variable(tf.ones([SIZE + 1, 2]))
        with tf.GradientTape() as tape:
            target = tf.reduce_sum(tf.gather(table, [0, RANK + 1, 0]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense)
        gradient = tape.gradient(target, [table])[0]
        assert isinstance(gradient, tf.IndexedSlices) is not dense
        expected = np.full((SIZE + 1, 2), 1 / SIZE)
        expected[0] = 2
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-6)


def branches(rank, table, left, right):
    """Returns the loss of a rank: ranks use different variables, as rows or as a whole."""
    if rank % 3 == 0:
        return tf.reduce_sum(left) + tf.reduce_sum(tf.gather(table, [0, 2, 2]))
    if rank % 3 == 1:
        return 2.0 * tf.reduce_sum(right)
    return tf.reduce_sum(left) + 3.0 * tf.reduce_sum(table)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_missing_gradients_count_as_zero(graph, op):
    sources = [tf.Variable(tf.ones([4, 2]), name=name) for name in ("table", "left", "right")]
    unused = tf.Variable(1.0, name="unused")
    every = [*sources, unused]

    def gradients(rank):
        with tf.GradientTape() as tape:
            loss = branches(rank, *sources)
        if rank == RANK:
            tape = hvd.DistributedGradientTape(tape, op=op)
        return tape.gradient(loss, {"all": every})["all"]

    found = (tf.function(gradients) if graph else gradients)(RANK)
    assert found[3] is None
    assert isinstance(found[0], tf.IndexedSlices) == (SIZE < 3)
    factor = 1 / SIZE if op == hvd.Average else 1.0
    for index, source in enumerate(sources):
        alone = [gradients_alone(rank, sources)[index] for rank in range(SIZE)]
        expected = sum(tf.convert_to_tensor(g) for g in alone if g is not None)
        if all(g is None for g in alone):
            assert found[index] is None
        else:
            got = tf.convert_to_tensor(found[index])
            np.testing.assert_allclose(got, expected * factor, rtol=1e-6)
            assert got.shape == source.shape


def gradients_alone(rank, sources):
    with tf.GradientTape() as tape:
        loss = branches(rank, *sources)
    return tape.gradient(loss, sources)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_tape_around_a_distributed_one_takes_the_second_gradient(graph, op):
    table, scale = tf.Variable(tf.reshape(tf.range(6.0), (3, 2)) + 1), tf.Variable(2.0)

    def loss(rank):
        return (rank + 1.0) * scale * tf.reduce_sum(tf.gather(table, [0, rank % 3, 0]) ** 3)

    def penalty(first, wrap, of):
        """Returns the squared norm of the gradients, and its gradients."""
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = first()
            gradients = wrap(inner).gradient(value, [table, scale])
            norm = tf.add_n([tf.reduce_sum(tf.convert_to_tensor(g) ** 2) for g in gradients])
        return norm, [tf.convert_to_tensor(g) for g in of(outer).gradient(norm, [table, scale])]

    def distributed(tape):
        return hvd.DistributedGradientTape(tape, op=op)

    def ours():
        # The norm is equal on all ranks, of which each has a part of its gradient.
        return penalty(lambda: loss(RANK), distributed, hvd.DistributedGradientTape)

    factor = 1 / SIZE if op == hvd.Average else 1.0
    norm, expected = penalty(
        lambda: factor * tf.add_n([loss(rank) for rank in range(SIZE)]), lambda t: t, lambda t: t
    )
    found, gradients = (tf.function(ours) if graph else ours)()
    np.testing.assert_allclose(found, norm, rtol=1e-5)
    for gradient, one in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, one, rtol=1e-5)


@pytest.mark.skipif(SIZE == 1, reason="one rank reduces nothing")
@pytest.mark.parametrize("rows", [False, True])
def test_a_tape_around_the_function_of_a_distributed_one_is_refused(rows):
    _, _, sources = products()

    @tf.function
    def first():
        with tf.GradientTape() as inner:
            value = tf.gather(sources[0], [0, 1]) if rows else sources[0]
            value = (RANK + 1.0) * tf.reduce_sum(value**3)
        gradient = hvd.DistributedGradientTape(inner).gradient(value, sources[0])
        assert isinstance(gradient, tf.IndexedSlices) == rows
        return gradient.values if rows else gradient

    np.testing.assert_allclose(first(), [3 * (MEAN + 1)] * 2)
    with tf.GradientTape(), pytest.raises(LookupError, match="a tape around a call"):
        first()


def test_a_graph_that_lacks_a_gradient_when_it_runs_is_an_error():
    if SIZE == 1:
        pytest.skip("a single rank has no other to differ from")
    left, right = (tf.Variable(1.0, name=name) for name in ("left", "right"))

    @tf.function
    def step(both):
        with tf.GradientTape() as tape:
            loss = left + right if both else 1.0 * left
        return hvd.DistributedGradientTape(tape).gradient(loss, [left, right])

    for both in (True, False):  # traced on all ranks
        assert (step(both)[1] is None) is not both
    with pytest.raises(tf.errors.OpError, match=r"of 'right'.*eagerly"):
        step(RANK == 0)
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == SIZE


@pytest.mark.parametrize("scales", [True, False])
def test_gradients_of_local_sources_are_not_reduced(scales):
    layers = [keras.layers.Dense(2, use_bias=False), keras.layers.Dense(1, use_bias=False)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    variables = model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        target = tf.reduce_sum(model(tf.ones([1, 3]))) * (RANK + 1.0)
    own = tape.gradient(target, variables)
    options = {"scale_local_gradients": scales}
    partial = hvd.PartialDistributedGradientTape(tape, local_layers=layers[0], **options)
    registered = hvd.DistributedGradientTape(tape, **options)
    registered.register_local_source(variables[0])
    for ours in (partial, registered):
        local, shared = ours.get_local_and_global_gradients(target, variables)
        assert local[0][0] is variables[0] and shared[0][0] is variables[1]
        np.testing.assert_allclose(local[0][1], own[0] / (SIZE if scales else 1), rtol=1e-6)
        np.testing.assert_allclose(shared[0][1], hvd.allreduce(own[1]), rtol=1e-6)
        both = ours.gradient(target, variables)
        np.testing.assert_allclose(both[0], local[0][1])
        np.testing.assert_allclose(both[1], shared[0][1])
    everything = hvd.PartialDistributedGradientTape(tape, local_layers=layers, **options)
    assert not everything.get_local_and_global_gradients(target, variables)[1]
    late = keras.layers.Dense(1, use_bias=False)  # it has no variables before its first call
    partial = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=late, **options)
    with partial:
        target = tf.reduce_sum(late(tf.ones([1, 3]))) * (RANK + 1.0)
    ((source, gradient),), shared = partial.get_local_and_global_gradients(target, late.weights)
    assert source is late.kernel and not shared
    np.testing.assert_allclose(gradient, (RANK + 1) / (SIZE if scales else 1))


def test_a_sharded_embedding_trains_by_alltoall():
    """Rank r holds r + 2 rows of a table; every rank looks up all rows."""
    counts = [rank + 2 for rank in range(SIZE)]
    begin = sum(counts[:RANK])
    rows = np.arange(2.0 * sum(counts), dtype="float32").reshape(-1, 2) / 10
    table = tf.Variable(rows[begin : begin + counts[RANK]])
    scale = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        wanted = tf.concat([tf.range(count) for count in counts], 0)
        asked, askers = hvd.alltoall(wanted, splits=counts)
        found, _ = hvd.alltoall(tf.gather(table, asked), splits=askers)
        loss = (RANK + 1.0) * tf.reduce_sum(found * scale)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(table)
    of_table, of_scale = tape.gradient(loss, [table, scale])
    np.testing.assert_allclose(found, rows)
    expected = np.broadcast_to(
        [MEAN + 1, 2 * (MEAN + 1)], table.shape
    )  # of all ranks, by their number
    np.testing.assert_allclose(tf.convert_to_tensor(of_table), expected, rtol=1e-6)
    np.testing.assert_allclose(of_scale, (MEAN + 1) * rows.sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("average", [True, False])
def test_four_backward_passes_per_step_in_a_graph(average):
    dense, table = keras.Variable(np.zeros(2, "f4")), keras.Variable(np.zeros((3, 2), "f4"))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        sparse_as_dense=True,
        backward_passes_per_step=4,
        average_aggregated_gradients=average,
    )
    optimizer.build([dense, table])

    @tf.function
    def step():
        rows = tf.IndexedSlices(tf.fill([1, 2], RANK + 1.0), tf.constant([1]), tf.constant([3, 2]))
        optimizer.apply([tf.fill([2], RANK + 1.0), rows], [dense, table])

    for number in range(1, 11):
        step()
        moved = -(MEAN + 1) * (1 if average else 4) * (number // 4)
        np.testing.assert_allclose(dense.numpy(), moved, rtol=1e-6)
        np.testing.assert_allclose(table.numpy()[1], moved, rtol=1e-6)
        assert int(optimizer.iterations) == number // 4  # as Keras counts steps


def test_wrong_tapes_and_sources_are_refused():
    for given in ("tape", hvd.DistributedGradientTape(tf.GradientTape())):
        with pytest.raises(TypeError, match="that is not distributed"):
            hvd.DistributedGradientTape(given)
    with pytest.raises(ValueError, match="op to be Average"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max)
    kernel, other = keras.Variable([1.0], name="kernel"), tf.Variable(1.0, name="other")
    for source in (other, kernel.value):
        with tf.GradientTape() as tape:
            target = 2.0 * kernel
        ours = hvd.DistributedGradientTape(tape)
        ours.register_local_source(source)
        with pytest.raises(ValueError, match="each local source to be among the sources"):
            ours.gradient(target, [kernel])


@pytest.mark.parametrize("scales", [True, False])
def test_local_variables_of_tensorflow(scales):
    kernel = keras.Variable(0.0, name="kernel")
    own, shared = tf.Variable(0.0, name="own"), tf.Variable(0.0, name="shared")
    variables = [kernel, own, shared]
    with tf.GradientTape(persistent=True) as tape:
        loss = (RANK + 1.0) * (3.0 * kernel + 10.0 * own + 2.0 * shared)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scales)
    optimizer.register_local_var(own)
    optimizer.register_local_var(kernel.value)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    share = (RANK + 1) / (SIZE if scales else 1)
    np.testing.assert_allclose([float(kernel), float(own)], [-3 * share, -10 * share], rtol=1e-6)
    np.testing.assert_allclose(float(shared), -2 * (MEAN + 1), rtol=1e-6)
    wrong = tf.Variable(0.0, name="wrong")
    optimizer.register_local_var(wrong)
    with pytest.raises(ValueError, match="Received: 'wrong', which is not among 3"):
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [tf.int8, tf.int32, tf.int64])
def test_averages_of_integer_rows_are_exact_and_truncated(dtype, graph):
    rows = tf.constant([[3], [-3 - RANK], [120]], dtype)
    shape = tf.constant([4 + SIZE, 1])
    slices = tf.IndexedSlices(rows, tf.constant([0, 1, 3 + RANK]), shape)
    average = tf.function(hvd.allreduce) if graph else hvd.allreduce
    found = average(slices)
    assert found.values.dtype == dtype
    table = {int(i): int(v[0]) for i, v in zip(found.indices, found.values, strict=True)}
    expected = {0: 3, 1: int(-3 - MEAN)} | {3 + rank: 120 // SIZE for rank in range(SIZE)}
    assert table == expected


@pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
def test_a_mismatch_names_the_sources_and_the_job_continues():
    source = tf.Variable(tf.ones([RANK + 1]), name="kernel")
    with tf.GradientTape() as tape:
        target = tf.reduce_sum(source)
    with pytest.raises(tf.errors.FailedPreconditionError, match="the gradient of kernel"):
        hvd.DistributedGradientTape(tape).gradient(target, [source])
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == SIZE


# --- Training loops


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("how", ["returned", "assigned in the step", "assigned behind it", "read"])
def test_gradients_may_be_kept_and_written_to(eagerly, how, sliced):
    """Gradients may be in shared memory, but a script that keeps or writes them has a copy."""
    count, rounds = 100_000, 6  # reduced in slices
    source = tf.Variable(tf.zeros([2 * count if sliced else count]))
    holders = [tf.Variable(tf.zeros([count])) for _ in range(rounds)]

    def step(x, holder):
        with tf.GradientTape() as tape:
            target = tf.reduce_sum(source * x)
        [gradient] = hvd.DistributedGradientTape(tape).gradient(target, [source])
        if sliced:  # TensorFlow may write to a slice in address
            gradient = gradient[:count]
        if how == "assigned in the step":
            holder.assign(gradient)
        return gradient

    steps = [step if eagerly else tf.function(step)] * rounds
    if how == "assigned in the step":  # one graph per variable
        steps = [step if eagerly else tf.function(step) for _ in range(rounds)]
    kept = []
    for number, (run, holder) in enumerate(zip(steps, holders, strict=True)):
        gradient = run(tf.fill(source.shape, float(number + RANK)), holder)
        if how == "assigned behind it":
            holder.assign(gradient)
        if how == "returned":
            kept.append(gradient)
        elif how == "read":
            kept.append(np.asarray(gradient))
        else:
            del gradient
            hvd.barrier()
            if RANK == 0:  # in address if TensorFlow can
                holder.assign_add(tf.ones([count]))
                holder.assign_add(tf.ones([count]))
            hvd.barrier()
            kept.append(holder)
    change = 0 if how in ("returned", "read") or RANK > 0 else 2
    for number, gradient in enumerate(kept):
        np.testing.assert_array_equal(gradient, np.full(count, number + MEAN + change, np.float32))


@pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
def test_in_place_writes_to_gradients_change_no_other_rank():
    experts = tf.Variable(tf.ones([4, 128, 128]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            target = tf.reduce_sum(tf.sin(experts * x))
        gradient = hvd.DistributedGradientTape(tape).gradient(target, experts)
        parts = [tf.clip_by_norm(-0.1 * gradient[number], 1.0) for number in range(4)]
        experts.assign_add(tf.stack(parts))

    for number in range(12):
        step(tf.fill([4, 128, 128], float(RANK + number)))
    weights = hvd.allgather(experts[None])
    np.testing.assert_array_equal(weights, np.repeat(weights[:1], SIZE, axis=0))


@pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
@pytest.mark.parametrize("count, is_leased", [(100_000, True), (20_000, False)])
def test_large_gradients_are_read_without_a_copy(count, is_leased):
    sources = [tf.Variable(tf.zeros([count])) for _ in range(4)]
    seen = []

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            target = tf.add_n([tf.reduce_sum(source * x) for source in sources])
        gradients = hvd.DistributedGradientTape(tape).gradient(target, sources)
        tf.numpy_function(lambda one: seen.append(one.ctypes.data), [gradients[0]], [])

    for _ in range(9):
        step(tf.ones([count]))
    few = len(set(seen)) <= 3
    with open("/proc/self/maps") as lines:
        segments = [line for line in lines if "/dev/shm" in line]
    bounds = [[int(end, 16) for end in line.split()[0].split("-")] for line in segments]
    shared = [any(low <= address < high for low, high in bounds) for address in seen]
    assert (few and all(shared)) if is_leased else not any(shared)


@pytest.mark.parametrize("options", [{}, {"backward_passes_per_step": 2}], ids=str)
@pytest.mark.parametrize("eagerly", [False, True])
def test_an_optimizer_refuses_gradients_of_a_distributed_tape(options, eagerly):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    x = np.random.default_rng(RANK).standard_normal((8, 3)).astype("float32")
    optimizer = hvd.DistributedOptimizer(tf.optimizers.SGD(0.1), "SGD", **options)

    def step(wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x[:, :1]) ** 2)
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # While tracing, AutoGraph raises an error of its own with the same text.
    with pytest.raises(Exception, match="Use the tape with a plain optimizer"):
        (step if eagerly else tf.function(step))(hvd.DistributedGradientTape)
    if not options:
        before = model.get_weights()
        tf.function(step)(lambda tape: tape)
        assert np.any(before[0] != model.get_weights()[0])


def test_operations_follow_an_update_of_accumulated_gradients():
    layers = [keras.layers.Dense(8) for _ in range(3)]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    x = np.random.default_rng(RANK).standard_normal((8, 3)).astype("float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x[:, :1]) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return [hvd.allreduce(tf.constant(RANK + 1.0) * number) for number in range(3)]

    for _ in range(6):  # an operation before the update is an error of ranks that differ
        np.testing.assert_allclose(step(), [0.0, MEAN + 1, 2 * (MEAN + 1)])
    for weight in model.get_weights():
        np.testing.assert_array_equal(hvd.broadcast(weight, 0), weight)
