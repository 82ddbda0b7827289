"""Packages for scripts without Keras do not import Keras."""

import pytest
from start_jobs import lean, told

COMMITS = """
import sys
{elastic}
import keras_dist.{framework} as hvd
assert elastic.__name__ == "keras_dist.elastic"
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


# torch has the module path of Horovod as well.
@pytest.mark.parametrize(
    ("framework", "elastic"),
    [
        ("torch", "import keras_dist.torch.elastic as elastic"),
        ("jax", "from keras_dist import elastic"),
    ],
)
def test_an_elastic_state_imports_no_keras(run_ranks, tmp_path, framework, elastic):
    # No such backend: importing Keras fails.
    env = lean(framework, KERAS_BACKEND="none")
    text = COMMITS.format(framework=framework, elastic=elastic)
    job = run_ranks(2, "-c", text, str(tmp_path / "state"), env=env)
    told(job, "kept")
