"""Gradients that some ranks lack, in updates of a Keras optimizer."""

import contextlib
import sys

import keras
import numpy as np
import pytest
from small_training import BATCH, assert_close, fit_rows, make_data, rows_of_rank, weights_of
from test_updates import Surgery

import keras_dist
from keras_dist import errors

BACKEND = keras.backend.backend()
RANK, SIZE = keras_dist.rank(), keras_dist.size()
STEPS = 6
EAGERLY = [False, True] if BACKEND == "tensorflow" else [False]
# In each step all ranks have the first gradient, some the next two, and none the last one.
SHAPES = {"trunk": (3,), "left": (4, 2), "right": (4, 2), "unused": (2,)}

on_several = pytest.mark.skipif(SIZE == 1, reason="a single rank cannot differ")
pytestmark = [
    pytest.mark.jobs("hooks", "jax-2"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
]


def make_variables():
    return [keras.Variable(np.ones(s, "float32"), name=name) for name, s in SHAPES.items()]


def has(name, rank, step):
    heads = {"left": (rank + step) % 3 != 0, "right": (rank + step // 2) % 2 == 0}
    return heads.get(name, name == "trunk")


def value(name, rank, step):
    seed = [rank, step, len(name)]
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype("float32")


def gradients_of(rank, step):
    """The gradients of a rank; `None` for those that it lacks."""
    return [value(name, rank, step) if has(name, rank, step) else None for name in SHAPES]


def mean_gradients(step):
    """The gradients of one process: the mean over the ranks, where any has the gradient."""
    return [
        np.mean([value(n, r, step) * has(n, r, step) for r in range(SIZE)], axis=0)
        if any(has(n, r, step) for r in range(SIZE))
        else None
        for n in SHAPES
    ]


def as_tensors(gradients):
    return [None if g is None else keras.ops.convert_to_tensor(g) for g in gradients]


def pairs(gradients, variables):
    return zip(gradients, variables, strict=True)


def apply_stateless(optimizer, gradients, variables):
    values = [v.value for v in variables], [v.value for v in optimizer.variables]
    new = optimizer.stateless_apply(values[1], gradients, values[0])
    for variable, changed in pairs([*variables, *optimizer.variables], new[0] + new[1]):
        variable.assign(changed)


WITH_GRADIENT = "pairs with a gradient"
HOW = {
    "apply": lambda optimizer, *given: optimizer.apply(*given),
    "apply without variables": lambda optimizer, gradients, _: optimizer.apply(gradients),
    "apply_gradients": lambda optimizer, *given: optimizer.apply_gradients(pairs(*given)),
    WITH_GRADIENT: lambda optimizer, *given: optimizer.apply_gradients(
        [(gradient, variable) for gradient, variable in pairs(*given) if gradient is not None]
    ),
}
if BACKEND == "jax":
    HOW["stateless_apply"] = apply_stateless


def trained(make, how, wrap, gradients_at):
    """The variables and the state of an optimizer after some steps."""
    variables, optimizer = make_variables(), make()
    if wrap is not None:
        wrap(optimizer)
    optimizer.build(variables)
    for step in range(STEPS):
        HOW[how](optimizer, as_tensors(gradients_at(step)), variables)
    return [keras.ops.convert_to_numpy(v) for v in [*variables, *optimizer.variables]]


def adamw(**options):
    return keras.optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=1.0, **options)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1.0)


def check_equals_one_process(make, how="apply", count=4, **options):
    """Compares the first variables with those of one process; gathered gradients are the rank's."""

    def wrap(optimizer):
        keras_dist.DistributedOptimizer(optimizer, **options)

    found = trained(make, how, wrap, lambda step: gradients_of(RANK, step))
    expected = trained(make, "apply" if how == WITH_GRADIENT else how, None, mean_gradients)
    for one, other in zip(found[:count], expected[:count], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    every = keras_dist.allgather_object([array.tobytes() for array in found[:count]])
    assert every == [every[0]] * SIZE
    assert (found[3] == 1).all()  # not touched, by weight decay either


@pytest.mark.parity("a gradient that some ranks lack counts as zero")
@pytest.mark.parametrize("how", HOW)
def test_missing_gradients_count_as_zero(how):
    check_equals_one_process(adamw, how, count=-1)


@pytest.mark.jobs("double")
def test_missing_gradients_with_accumulation():
    check_equals_one_process(lambda: adamw(gradient_accumulation_steps=2))


FURTHER = {
    "a loss scale": {"make": scaled, "how": "stateless_apply" if BACKEND == "jax" else "apply"},
    "an overridden apply": {"make": lambda: Surgery(0.1)},
    "groups": {"make": adamw, "groups": 2},
    "compression": {"make": adamw, "compression": "fp16"},
    "gradient_predivide_factor": {"make": adamw, "gradient_predivide_factor": 2.0},
    "shard_state": {"make": adamw, "shard_state": True},
}


@pytest.mark.parametrize("name", FURTHER)
def test_missing_gradients_of_further_optimizers(name):
    check_equals_one_process(**FURTHER[name])


def test_a_rank_without_any_gradient():
    variables = make_variables()
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for step in range(2 * SIZE):
        some = [keras.ops.ones((3,)), None, None, None]
        optimizer.apply(some if step % SIZE == RANK else [None] * 4, variables)
    found = keras.ops.convert_to_numpy(variables[0])
    np.testing.assert_allclose(found, -np.ones(3), atol=1e-6)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None] * 4, variables)


def rows_by_hand(values, indices, shape):
    """Returns a sparse gradient of arrays and tuples."""
    if BACKEND == "tensorflow":
        return sys.modules["tensorflow"].IndexedSlices(values, indices, shape)
    if BACKEND == "jax":
        from jax.experimental.sparse import BCOO

        return BCOO((values, np.reshape(indices, (-1, 1))), shape=shape)
    return sys.modules["torch"].sparse_coo_tensor([indices], values, shape)


@pytest.mark.parity("gradients may be arrays of numpy, or rows made by hand")
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_may_be_made_by_hand(sparse):
    variable = keras.Variable(np.ones((3, 2), "float32"))
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    gradient = np.zeros((3, 2), "float32")
    gradient[[0, 2]] = RANK
    given = rows_by_hand(gradient[[0, 2]], (0, 2), (3, 2)) if sparse else gradient
    optimizer.apply([given], [variable])
    expected = np.ones((3, 2), "float32")
    expected[[0, 2]] -= (SIZE - 1) / 2
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), expected)


@on_several
@pytest.mark.parity("ranks with gradients of different variables raise an error")
@pytest.mark.parametrize("odd", [["right", "left"], ["left", "other"], ["left"]])
def test_different_variables_are_an_error_that_lists_both(odd):
    names = odd if RANK == SIZE - 1 else ["left", "right"]
    variables = [keras.Variable(np.ones(2, "float32"), name=name) for name in names]
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(errors.MismatchError) as caught:
        optimizer.apply([keras.ops.ones((2,)) for _ in names], variables)
    listed = ", ".join(map(repr, odd))
    assert str(caught.value).startswith(
        f"[rank {SIZE - 1} of {SIZE}] Expected gradients of 2 variables, 'left', 'right' as on "
        f"rank 0. Received: {len(odd)} variables, {listed}. Build the same model"
    )
    assert all((keras.ops.convert_to_numpy(v) == 1).all() for v in variables)
    assert keras_dist.allreduce(1.0, "Sum") == SIZE


@on_several
def test_gradients_of_other_dtypes_are_an_error_that_names_the_variable():
    variables = make_variables()[:2]
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    dtype = "float16" if RANK == SIZE - 1 else "float32"
    gradients = [keras.ops.ones(v.shape, dtype) for v in variables]
    with pytest.raises(errors.MismatchError, match=r"the gradient of 'trunk' .* float32.*float16"):
        optimizer.apply(gradients, variables)


@pytest.mark.jobs("torch-3")
@pytest.mark.skipif(SIZE < 3, reason="needs three ranks")
def test_a_gradient_may_be_missing_in_a_process_set():
    some = keras_dist.add_process_set([0, 2])
    variables = make_variables()
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=some)
    ones = [keras.ops.ones(v.shape) for v in variables]
    optimizer.apply([ones[0], ones[1] if RANK else None, None, None], variables)
    expected = 1 - (0.5 if some.included() else 1.0)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1]), np.full((4, 2), expected))
    keras_dist.remove_process_set(some)


class TwoHeads(keras.Model):
    """A model whose loss uses a head that depends on the rank.

    Args:
        ranks: those that take turns in the rows of a batch.
    """

    def __init__(self, ranks):
        super().__init__()
        self.trunk = keras.layers.Dense(5, name="trunk")
        self.heads = [keras.layers.Dense(1, name=name) for name in ("left", "right")]
        self.ranks = ranks

    def build(self, shape):
        self.trunk.build(shape)
        for head in self.heads:
            head.build((None, 5))

    def call(self, x):
        rows = [x[at * BATCH : (at + 1) * BATCH] for at in range(len(self.ranks))]
        found = [
            self.heads[rank % 2](self.trunk(x)) for rank, x in zip(self.ranks, rows, strict=True)
        ]
        return keras.ops.concatenate(found)


@pytest.mark.parity("`fit` of a model whose branch depends on the rank")
@pytest.mark.parametrize("eagerly", EAGERLY)
def test_fit_of_a_model_whose_branch_depends_on_the_rank(eagerly):
    def made(ranks, wrap=lambda optimizer: optimizer):
        keras.utils.set_random_seed(1)
        model = TwoHeads(ranks)
        optimizer = wrap(keras.optimizers.SGD(0.1, momentum=0.9))
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        model.build((None, 6))
        return model

    x, y = make_data(3 * BATCH * SIZE)
    y = y[:, None].astype("float32")
    plain, model = made(range(SIZE)), made([RANK], keras_dist.DistributedOptimizer)
    plain.run_eagerly = eagerly or BACKEND == "tensorflow"
    plain.fit(x, y, batch_size=BATCH * SIZE, shuffle=False, verbose=0)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    assert_close(weights_of(model), weights_of(plain), 1e-5)


class Scalars(keras.layers.Layer):
    """Multiplies by one of two scalar weights, which may depend on the rank."""

    def __init__(self, differs):
        super().__init__()
        self.number = RANK % 2 if differs else 0

    def build(self, shape):
        self.factors = [
            self.add_weight(shape=(), initializer="ones", name=name) for name in ("left", "right")
        ]

    def call(self, x):
        return x * self.factors[self.number]


@pytest.mark.jobs("double")
@pytest.mark.parity("frozen layers, variables without a gradient")
@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("eagerly", EAGERLY)
def test_fit_of_a_model_with_scalar_weights_that_the_loss_does_not_use(differs, eagerly):
    frozen = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)
    model = keras.Sequential([keras.Input((1,)), Scalars(differs), frozen])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    rows = np.ones((2, 1), "float32")
    # On JAX such a variable has a gradient of zeros, without a warning.
    warned = pytest.warns(UserWarning, match="Gradients do not exist")
    with contextlib.nullcontext() if BACKEND == "jax" or differs else warned:
        model.fit(rows, 0 * rows, batch_size=2, verbose=0)
    # The gradient of each rank is 2.0 * 1.0 for the factor that it uses.
    share = np.mean([rank % 2 for rank in range(SIZE)]) if differs else 0.0
    expected = [1.0 - 2.0 * (1.0 - share), 1.0 - 2.0 * share, 1.0, 0.0]  # and kernel and bias
    found = np.concatenate([weight.ravel() for weight in weights_of(model)])
    np.testing.assert_allclose(found, expected, atol=1e-6)
