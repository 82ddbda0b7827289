"""`keras_dist.jax` for the tests of all faces: see `face_tensorflow`."""

import jax
import jax.numpy as jnp
import numpy as np

import keras_dist.jax as hvd

DTYPES = "bool uint8 int8 uint16 int16 int32 float16 bfloat16 float32 complex64".split()
NARROW = ()
COUNTS = "int64"
FORMS, GRADIENTS = ("eager", "jit"), ("eager", "jit")
TENSOR = jax.Array
NO_GRADIENT = "Average or Sum in an allreduce"


def raised_for(kinds, form):
    return Exception if form == "jit" else kinds


def tensor(array):
    return jnp.asarray(array)


def array(result):
    return np.asarray(result)


def kind_of(result):
    return result.dtype.name, result.devices()


def operation(name, form):
    return getattr(hvd, name)


def run(form, program, *tensors):
    return jax.block_until_ready((jax.jit(program) if form == "jit" else program)(*tensors))


def flat(results):
    return jnp.concatenate([result.ravel() for result in results])


def gradient(form, function, given, weights):
    derive = jax.grad(lambda x: (flat(function(x)) * weights).sum())
    return np.asarray(run(form, derive, given))


def second_gradient(form, function, given, weights, others):
    slope = jax.grad(lambda x: (flat(function(x)) ** 2 * weights).sum() / 2)
    return np.asarray(run(form, jax.grad(lambda x: (slope(x) * others).sum()), given))


def broadcast_state(arrays, root_rank, **options):
    tree = {"arrays": [jnp.asarray(one) if n % 2 else one for n, one in enumerate(arrays)]}
    found = hvd.broadcast_parameters(tree, root_rank, **options)["arrays"]
    assert [isinstance(one, jax.Array) for one in found] == [bool(n % 2) for n in range(len(found))]
    return list(map(np.asarray, found))


def trained(form, weights, batches, options, kind="sgd", rate=0.1, is_sparse=False):
    def loss_of(tree, tokens, y):
        found = jnp.tanh(tree["table"][tokens].reshape(len(tokens), -1) @ tree["rest"][0])
        return ((found @ tree["rest"][1] - y) ** 2).mean()

    def step(tree, tokens, y):
        gradients = jax.grad(loss_of)(tree, tokens, y)
        if options is not None:
            how = dict(options)
            average = hvd.psum if how.pop("op", None) == hvd.Sum else hvd.pmean
            gradients = average(gradients, **how)
        return jax.tree.map(lambda weight, gradient: weight - rate * gradient, tree, gradients)

    tree = {"table": jnp.asarray(weights[0]), "rest": list(map(jnp.asarray, weights[1:]))}
    run_step = jax.jit(step) if form == "jit" else step
    for batch in batches:
        tree = run_step(tree, *batch)
    return list(map(np.asarray, [tree["table"], *tree["rest"]]))
