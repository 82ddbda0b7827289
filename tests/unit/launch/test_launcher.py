"""The environment variables of launchers."""

import pytest

from keras_dist.runtime import launch_environment


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "3", "MPI_LOCALNRANKS": "2"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16"}, 8),
        ({"SLURM_NTASKS": "16"}, 16),
        ({"PMIX_RANK": "5"}, 6),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "16"}, 2),
    ],
)
def test_the_number_of_ranks_is_read(environment, size):
    announced = launch_environment.announced_size(environment)
    assert announced is not None
    assert announced.size == size
    assert announced.variable in environment


def test_no_launcher_says_nothing():
    assert launch_environment.announced_size({"HOME": "/", "PMI_SIZE": "many"}) is None
    assert launch_environment.announced_local_size({}) == 1


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4"}, 1),  # an allocation, but no srun around this process
    ],
)
def test_the_number_of_ranks_on_the_node_is_read(environment, size):
    assert launch_environment.announced_local_size(environment) == size


@pytest.mark.parametrize(
    ("environment", "rank", "local_rank"),
    [
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 5, 1),
        ({"PMI_RANK": "2", "MPI_LOCALRANKID": "0"}, 2, 0),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, 3, 1),
        ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, 1, None),
        ({"HOME": "/"}, None, None),
    ],
)
def test_the_place_of_this_process_is_read(environment, rank, local_rank):
    assert launch_environment.announced_rank(environment) == rank
    assert launch_environment.announced_local_rank(environment) == local_rank
