"""A JAX rank allocates memory only on its GPU, chosen before JAX creates its client."""

import pytest
from start_jobs import lean

pytest.importorskip("jax")

# Two functions simulate GPUs: whether JAX has a plugin for them, and the driver's count.
JOB = """
import logging
import os
import jax, keras, keras_dist
from jax._src import xla_bridge
from keras_dist._backends import jax_devices
gpus = {"cuda": 4}
jax_devices._may_use = gpus.__contains__
jax_devices._count = gpus.get
logging.basicConfig(format="%(message)s")
visible = lambda: jax.config.values["jax_cuda_visible_devices"]

# A single write: the ranks share an output, and print writes a line in several.
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

SEEN = f"""{JOB}
keras_dist.init()
assert not xla_bridge.backends_are_initialized(), "JAX has made its client"
say("sees", keras_dist.rank(), visible())
jax.config.update("jax_cuda_visible_devices", "3,1")
assert jax_devices.choose_gpu(0, 2) is None and visible() == "3,1"
for count in (1, 4):
    gpus["cuda"] = count
    jax.config.update("jax_cuda_visible_devices", "all")
    assert jax_devices.choose_gpu(0, 1) is None and visible() == "all"
gpus["cuda"] = 2
say("sharing", jax_devices.choose_gpu(3, 4), visible())
"""

LATE = f"""{JOB}
jax.config.update("jax_num_cpu_devices", 4)
jax_devices._gpus_of_client = jax.local_devices
jax.numpy.zeros(1)
keras_dist.init()
assert visible() == "all"
say("uses", keras_dist.rank(), jax.config.jax_default_device.id)
"""


def test_a_rank_sees_only_its_gpu_if_jax_has_no_client(run_ranks):
    job = run_ranks(2, "-c", SEEN, env=lean(KERAS_BACKEND="jax"))
    assert job.returncode == 0, job.stdout
    assert "sees 0 0" in job.stdout and "sees 1 1" in job.stdout
    assert "sharing shares its GPU: 4 ranks on this node, 2 GPUs. 1" in job.stdout


def test_a_rank_that_has_used_jax_before_warns(run_ranks):
    job = run_ranks(2, "-c", LATE, env=lean(KERAS_BACKEND="jax"))
    assert job.returncode == 0, job.stdout
    assert "uses 0 0" in job.stdout and "uses 1 1" in job.stdout
    assert job.stdout.count("allocates memory on each of 4 GPUs") == 2
