"""Ranks in the workers of a real Dask cluster on this host."""

import distributed
import pytest
from cluster_training import ENVIRONMENT, join, join_and_fail, train
from start_jobs import launcher

import keras_dist.dask
from keras_dist import errors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(launcher()) > 1, reason="needs MPICH"),
]


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as connected,
    ):
        yield connected


def test_a_function_trains_on_the_workers(client):
    first, second = keras_dist.dask.run(train, client=client, env=ENVIRONMENT)
    assert first[:2] == (0, 2) and second[:2] == (1, 2) and first[2] == second[2]


@pytest.mark.parametrize("end", ["raises", "is killed"])
def test_a_lost_rank_is_an_error_and_the_workers_stay(client, end):
    before = set(client.scheduler_info()["workers"])
    with pytest.raises(errors.RankError) as caught:
        keras_dist.dask.run(join_and_fail, (end,), client=client, env=ENVIRONMENT)
    if end == "raises":
        assert caught.value.rank == 1 and isinstance(caught.value.__cause__, ValueError)
    else:
        assert "rank 1 of 2" in str(caught.value)
    assert set(client.scheduler_info()["workers"]) == before


def test_a_worker_that_dies_is_an_error(client):
    with pytest.raises(errors.RankError, match="rank 1 of 2"):
        keras_dist.dask.run(join_and_fail, ("loses its worker",), client=client, env=ENVIRONMENT)
    client.wait_for_workers(2)


def test_a_rank_that_cannot_join_says_why(client):
    with pytest.raises(errors.RankError, match="not a rank yet"):
        keras_dist.dask.run(join, client=client, env={"PMI_SIZE": "2"})


def test_too_few_workers(client):
    with pytest.raises(errors.ArgumentError, match="3 workers or more"):
        keras_dist.dask.run(join, np=3, client=client)
