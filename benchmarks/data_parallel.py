"""keras.distribution.DataParallel over the ranks of the benchmark of fit, on JAX."""

import socket

import keras
from mpi4py import MPI


def join_jax():
    """Makes the ranks of the job the processes of JAX, before anything uses it."""
    world = MPI.COMM_WORLD
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = world.bcast(probe.getsockname()[1])
    keras.utils.set_random_seed(0)  # else Keras has JAX agree on one
    keras.distribution.initialize(f"127.0.0.1:{port}", world.size, world.rank)


def data_parallel(make):
    """Returns a function that makes a model whose gradients JAX averages, and its context."""
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)

    def distributed():
        with distribution.scope():
            return make()

    return distributed, distribution.scope
