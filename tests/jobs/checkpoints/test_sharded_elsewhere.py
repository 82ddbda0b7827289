"""A sharded checkpoint is read by other numbers of ranks and on other backends, to the bit."""

import pytest
from start_jobs import SCRIPTS, lean, told

# Each backend goes on from another, on another number of ranks. Tests on ranks load on the backend
# that has saved, so that each reads what each has written.
JOBS = "jax 2, torch 3, tensorflow 1, jax 2".split(", ")


@pytest.mark.slow
def test_a_checkpoint_loads_on_other_backends_and_numbers_of_ranks(run_ranks, tmp_path):
    saved = "nothing"
    for job in JOBS:
        backend, ranks = job.split()
        env = lean(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3")
        ended = run_ranks(ranks, SCRIPTS / "saved_sharded.py", tmp_path / "saved", env=env)
        loaded, now = told(ended, r"loaded (\w+), saved (\w+)").groups()
        assert loaded == saved, f"{backend} on {ranks} ranks has read other bits"
        saved = now
