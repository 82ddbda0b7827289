"""A sharded checkpoint is read by other numbers of ranks and on other backends, to the bit."""

import shutil

import pytest
from start_jobs import SCRIPTS, lean, told

# Each backend saves for each other; tests on ranks load on the backend that has saved.
JOBS = [
    [("jax", 4), ("torch", 3), ("tensorflow", 1)],
    [("torch", 2), ("jax", 3), ("tensorflow", 1)],
    [("tensorflow", 2), ("jax", 1), ("torch", 1)],
]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", JOBS, ids=lambda jobs: "-".join(f"{b}{n}" for b, n in jobs))
def test_a_checkpoint_loads_on_other_backends_and_numbers_of_ranks(run_ranks, tmp_path, jobs):
    digests = []
    for backend, ranks in jobs:  # the first one saves
        how, folder = "save", tmp_path / "saved"
        if digests:
            how, folder = "load", tmp_path / f"{backend}-{ranks}"
            shutil.copytree(tmp_path / "saved", folder)  # which goes on in it
        env = lean(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3")
        ended = run_ranks(ranks, SCRIPTS / "saved_sharded.py", folder, how, env=env)
        digests.append(told(ended, r"bits (\w+)")[1])
        assert digests[-1] == digests[0], f"{backend} on {ranks} ranks has read other bits"
