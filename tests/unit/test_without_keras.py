"""Packages for scripts without Keras do not import Keras."""

import subprocess
import sys

import pytest
from start_jobs import lean, told

COMMITS = """
import sys
import keras_dist.{framework} as hvd
from keras_dist import elastic
hvd.init()
for expected in (0, 3):  # the second state reads the directory of the first
    state = elastic.ObjectState(directory=sys.argv[1], epoch=0)
    state.sync()
    assert state.epoch == expected, state.epoch
    state.epoch = 3
    state.commit()
if hvd.rank() == 0:
    print("kept", *sorted({{"keras", "tensorflow"}} & set(sys.modules)))
"""


def test_elastic_has_the_module_path_of_horovod():
    code = "import keras_dist.torch.elastic as elastic; import keras_dist; print(elastic.__name__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "keras_dist.elastic\n", ended.stderr


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_an_elastic_state_imports_no_keras(run_ranks, tmp_path, framework):
    # No such backend: importing Keras fails.
    env = lean(framework, KERAS_BACKEND="none")
    text = COMMITS.format(framework=framework)
    job = run_ranks(2, "-c", text, str(tmp_path / "state"), env=env)
    told(job, "kept")
