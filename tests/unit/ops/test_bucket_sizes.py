"""The sizes of buckets."""

import pytest

from keras_dist import config
from keras_dist.ops import gradient_plans


@pytest.mark.parametrize(
    ("overlaps", "by_nccl", "nbytes"),
    [
        (False, False, 25 * 2**20),
        (True, False, 4 * 2**20),
        (True, True, 25 * 2**20),
        (False, True, 2**62),
    ],
)
def test_a_bucket_has_a_constant_size_unless_one_is_set(monkeypatch, overlaps, by_nccl, nbytes):
    monkeypatch.setattr(config, "settings", lambda: config.parse({}))
    assert gradient_plans.bucket_nbytes(overlaps, by_nccl) == nbytes
    chosen = config.parse({"KERAS_DIST_BUCKET_NBYTES": "100"})
    monkeypatch.setattr(config, "settings", lambda: chosen)
    assert gradient_plans.bucket_nbytes(overlaps, by_nccl) == 100
