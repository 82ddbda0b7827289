"""The bucket size that the ranks measure, agree on and remember."""

import json

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine import tuning
from keras_dist.ops import bucket_size

pytestmark = pytest.mark.jobs("engine")

CALL = _engine.CollectiveSignature("the reduction of gradients")


@pytest.fixture
def cache(shared_tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_tmp_path))
    monkeypatch.setattr(tuning, "PROBE_NBYTES", 2**14)
    return shared_tmp_path / "keras_dist" / "bucket_nbytes.json"


def test_it_is_measured_once_and_equal_on_all_ranks(cache):
    comm = runtime.communicator()
    chosen, how = _engine.best_bucket_nbytes(comm, CALL, 2**20)
    assert chosen in tuning.CANDIDATES
    assert "measured on steps" in how
    assert len(set(keras_dist.allgather_object(chosen))) == 1
    assert _engine.best_bucket_nbytes(comm, CALL, 2**20) == (
        chosen,
        "as measured earlier on this machine",
    )
    keras_dist.barrier()
    assert list(json.loads(cache.read_text()).values()) == [chosen]
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]
    keras_dist.barrier()


@pytest.mark.parametrize("text", ["", "[]", "{1", "null"])
def test_an_unreadable_cache_is_measured_again(cache, text):
    if keras_dist.rank() == 0:
        cache.parent.mkdir()
        cache.write_text(text)
    keras_dist.barrier()
    _, how = _engine.best_bucket_nbytes(runtime.communicator(), CALL, 2**20)
    assert "measured on steps" in how


def test_few_gradients_and_those_that_overlap_are_not_measured(monkeypatch):
    monkeypatch.setattr(_engine, "best_bucket_nbytes", None)  # a call would fail
    comm = runtime.communicator()
    assert bucket_size.bucket_nbytes(comm) == 25 * 2**20
    assert bucket_size.bucket_nbytes(comm, CALL, 2**20) == 25 * 2**20
    assert bucket_size.bucket_nbytes(comm, CALL, 2**30, overlaps=True) == 4 * 2**20


def test_different_gradients_are_named_before_the_measurement(cache, monkeypatch):
    if keras_dist.size() == 1:
        pytest.skip("one rank differs from none")
    monkeypatch.setattr(bucket_size, "USUAL_BUCKET_NBYTES", 4000)
    rows = 1000 if keras_dist.rank() == 0 else 10  # above and below it
    kernel = keras.Variable(np.zeros((rows, 2), np.float32), name="kernel")
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    gradient = keras.ops.ones((rows, 2))
    with pytest.raises(errors.MismatchError, match="'the gradient of kernel' with shape"):
        optimizer._keras_dist([gradient], [kernel])
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()
