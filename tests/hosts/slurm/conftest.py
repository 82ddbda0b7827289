"""A Slurm cluster of two nodes on this machine, for jobs that are submitted for real."""

import pytest
from namespaces import Unavailable
from slurm_cluster import make_cluster


@pytest.fixture(scope="session")
def made_cluster(tmp_path_factory):
    """The cluster; skips the test where it cannot be made."""
    folder = tmp_path_factory.mktemp("slurm")
    try:
        with make_cluster(folder, 2) as made:
            yield made
    except Unavailable as error:
        pytest.skip(f"NOT TESTED: Slurm: {error}")


@pytest.fixture
def cluster(made_cluster):
    """The cluster, without jobs before and after a test."""
    yield made_cluster
    made_cluster.cancel_all()
