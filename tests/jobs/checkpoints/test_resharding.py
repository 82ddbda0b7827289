"""Sharded state after the death of a rank: training resumes on another number of ranks."""

import pytest
from start_jobs import SCRIPTS, lean, told


@pytest.mark.slow
def test_a_job_that_is_killed_resumes_sharded_on_another_number_of_ranks(run_ranks, tmp_path):
    command = SCRIPTS / "resharded.py", tmp_path
    env = lean(KERAS_BACKEND="jax")  # which starts fastest
    assert run_ranks(2, *command, "kill", env=env).returncode != 0
    resumed = run_ranks(3, *command, "go", env=env)
    whole, sharded = told(resumed, r"ended after (\d+ steps: \w+) (\d+ steps: \w+)").groups()
    assert resumed.stdout.count("The backup was written by 2 ranks") == 2
    assert whole == sharded
