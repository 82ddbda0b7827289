"""keras.distribution and keras_dist: gradients are not averaged twice."""

import pytest
from start_jobs import lean

pytest.importorskip("jax")

TRAINING = """
import socket
import keras
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = world.bcast(probe.getsockname()[1])
keras.utils.set_random_seed(0)
keras.distribution.initialize(f"127.0.0.1:{port}", world.size, world.rank)
import keras_dist
with keras.distribution.DataParallel(auto_shard_dataset=False).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="twice")
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    try:
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    except keras_dist.errors.BackendError as error:
        print(error)
"""


def test_a_model_under_keras_distribution_is_refused(run_ranks):
    job = run_ranks(2, "-c", TRAINING, env=lean(KERAS_BACKEND="jax"))
    assert job.returncode == 0, job.stdout
    assert job.stdout.count("a model whose gradients keras_dist alone averages, 'twice'") == 2
    assert "keras.distribution.DataParallel active on 2 ranks" in job.stdout
